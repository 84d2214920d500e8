"""A name that is used twice."""

from __future__ import annotations

import pytest
from testbed.driver.kube import wait_for


def _checkpoints(scenario) -> set[str]:
    """Return the names of all Checkpoints of the namespace."""
    items = scenario.kube.items("Checkpoint", scenario.namespace)
    return {item["metadata"]["name"] for item in items}


@pytest.mark.fault("A job is created again under its name on a real cluster")
def test_a_job_created_again_under_the_same_name_completes(scenario):
    """The first job's Checkpoints are retained. The new job has the same name, steps and round."""
    first = scenario.start()
    first.wait_persisted(20)
    # The operator creates the Checkpoint of a step after it has recorded the step in the status.
    first.wait("a Checkpoint", lambda: _checkpoints(scenario))
    uid = first.uid
    first.close()
    scenario.kube.delete("TrainingJob", scenario.namespace, first.name)
    wait_for(
        "the first job's object to go",
        lambda: scenario.kube.get("TrainingJob", scenario.namespace, first.name) is None,
    )
    kept = _checkpoints(scenario)
    assert kept, "the deletion retains the first job's Checkpoints"
    second = scenario.start()
    assert second.uid != uid
    second.wait_persisted(40)
    scenario.finish_and_judge(second)
    assert kept <= _checkpoints(scenario), "the second job left the first one's Checkpoints alone"
