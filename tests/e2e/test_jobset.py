"""A gang whose pods a JobSet creates, with the controller of JobSet: `make e2e-jobset` runs these tests.

Each training ends with the bits of an undisturbed run.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from testbed import faults
from testbed.driver.jobset import AdoptedJobSet
from testbed.driver.kube import Kube
from testbed.driver.scenario import SHORT

TRAINING = replace(SHORT, steps=100, sleep_per_step=0.3)

pytestmark = pytest.mark.jobset


@pytest.fixture(autouse=True)
def controller(installed: Kube) -> None:
    if not AdoptedJobSet.OWNER.is_served(installed.api):
        pytest.skip("no JobSet controller runs: `make e2e-jobset` builds and installs it")


def only_recovery(job: AdoptedJobSet) -> dict:
    (recovery,) = job.status["recoveries"]
    print({k: recovery.get(k) for k in sorted(recovery)})
    return recovery


def uids(job: AdoptedJobSet) -> set[str]:
    """Return the uids of the members' pods."""
    return {pod["uid"] for pod in job.status.get("pods") or []}


@pytest.mark.fault("A pod of an adopted JobSet is lost")
def test_a_jobset_replaces_only_the_lost_pod_where_it_has_a_backoff_limit(scenario):
    job = scenario.adopt_jobset(TRAINING)
    job.wait_replicated(20)
    scenario.kube.delete_pod(scenario.namespace, job.pod_name(1), grace_seconds=1)
    job.wait_round(1)
    assert job.status["members"] == [0, 1, 0], "only the lost worker has a new pod"
    job.wait_complete()
    recovery = only_recovery(job)
    assert recovery["workers"] == [1]
    assert recovery["restoredStep"] >= 20
    assert job.restarts() == 0
    job.wait_batch_job()
    scenario.finish_and_judge(job, TRAINING)


@pytest.mark.fault("JobSet creates all pods of an adopted gang again")
def test_a_gang_that_jobset_restarts_continues_from_the_store(scenario):
    job = scenario.adopt_jobset(TRAINING, backoff_limit=0)
    persisted = job.wait_persisted(20)["step"]
    assert "object store" in job.wait_condition("Adopted")["message"]
    scenario.kube.delete_pod(scenario.namespace, job.pod_name(1), grace_seconds=1)
    job.wait_round(1)
    assert job.restarts() == 1
    assert job.status["members"] == [1, 1, 1], "JobSet created every pod again"
    job.wait_complete()
    recovery = only_recovery(job)
    assert recovery["restoredStep"] >= persisted
    job.wait_batch_job()
    scenario.finish_and_judge(job, TRAINING)


def test_a_suspended_jobset_continues_from_the_step_that_it_saved_last(scenario):
    """It is suspended twice. JobSet deletes all pods each time, so that only the store has the step."""
    training = replace(TRAINING, steps=200)
    job = scenario.adopt_jobset(training)
    persisted = job.wait_persisted(20)["step"]
    for _ in range(2):
        round_, pods = job.round, uids(job)
        job.suspend()
        job.resume()
        job.wait_round(round_ + 1)
        assert not uids(job) & pods
        recovery = job.status["recoveries"][-1]
        print({k: recovery.get(k) for k in sorted(recovery)})
        assert recovery["restoredStep"] >= persisted
        assert recovery["lostSteps"] == 0, "the pods ended before the last step was in the store"
        persisted = job.wait_persisted(recovery["restoredStep"] + 20)["step"]
    job.wait_complete()
    job.wait_batch_job()
    scenario.finish_and_judge(job, training)


@pytest.mark.node_faults
def test_a_jobset_replaces_the_pod_of_a_lost_node(scenario, nodes_back):
    training = replace(TRAINING, workers=4)
    job = scenario.adopt_jobset(training)
    job.wait_replicated(20)
    lost = job.node_of(2)
    faults.kill_node(lost)
    job.wait_round(1)
    assert job.node_of(2) != lost
    job.wait_complete()
    recovery = job.status["recoveries"][-1]
    print({k: recovery.get(k) for k in sorted(recovery)})
    assert recovery["reason"] == "NodeLost"
    assert recovery["restoredStep"] >= 20
    faults.heal_nodes()  # a Job is not complete before the pod of the lost node has ended
    job.wait_batch_job()
    scenario.finish_and_judge(job, training)
