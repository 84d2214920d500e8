"""A spare pod takes the place of a worker whose pod is deleted."""

from __future__ import annotations

from dataclasses import replace

from testbed.driver.scenario import SHORT

from holdfast_core.ids import FIRST_SPARE


def _spares(job) -> dict[str, str]:
    """Return the uid of each pod of the job that was created as a spare, by name."""
    found = (pod["metadata"] for pod in job.pods())
    return {
        meta["name"]: meta["uid"]
        for meta in found
        if int(meta["labels"]["holdfast.dev/worker"]) >= FIRST_SPARE
    }


def test_a_spare_pod_takes_the_place_of_a_deleted_one(scenario):
    training = replace(SHORT, sleep_per_step=0.6)  # the second spare must be ready before the end
    job = scenario.start(training, more={"spares": 1})
    job.wait_step(5)
    job.wait_condition("SparesReady")
    ((spare, uid),) = _spares(job).items()
    job.wait_replicated(10)
    scenario.kube.delete_pod(scenario.namespace, job.pod_name(1), grace_seconds=0)
    job.wait_round(1)
    status = job.status
    assert status["spares"]["promoted"] == [f"1={spare}"]
    assert status["members"] == [0, 1, 0]
    assert job.pod_name(1) == spare
    assert _spares(job)[spare] == uid, "no pod was created for the worker"
    job.wait("a new spare", lambda: set(_spares(job)) - {spare})
    [recovery] = job.status["recoveries"]
    # A peer that has not received ROUND yet refuses, and the store is asked at once.
    assert recovery["sources"].keys() & {"peer", "object"}, "the spare pod had no shard"
    scenario.finish_and_judge(job, training)
