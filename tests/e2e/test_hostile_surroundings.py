"""A name that is used twice."""

from __future__ import annotations

import pytest
from testbed.driver.kube import wait_for


@pytest.mark.fault("A job is created again under its name on a real cluster")
def test_a_job_created_again_under_the_same_name_completes(scenario):
    """The first job's Checkpoints are retained. The new job has the same name, steps and round."""
    first = scenario.start()
    first.wait_persisted(20)
    uid = first.uid
    first.close()
    scenario.kube.delete("TrainingJob", scenario.namespace, first.name)
    wait_for(
        "the first job's object to go",
        lambda: scenario.kube.get("TrainingJob", scenario.namespace, first.name) is None,
    )
    kept = {c["metadata"]["name"] for c in scenario.kube.items("Checkpoint", scenario.namespace)}
    assert kept, "the deletion retains the first job's Checkpoints"
    second = scenario.start()
    assert second.uid != uid
    second.wait_persisted(40)
    scenario.finish_and_judge(second)
    now = {c["metadata"]["name"] for c in scenario.kube.items("Checkpoint", scenario.namespace)}
    assert kept <= now, "the second job left the first one's Checkpoints alone"
