"""Containers and processes that die while their pod survives. The job must not lose anything."""

from __future__ import annotations

from dataclasses import replace

from testbed import faults
from testbed.driver.scenario import SHORT


def test_a_killed_sidecar_rank_and_container_restart_in_place(scenario):
    """Each dies in another pod, one after the other."""
    job = scenario.start(replace(SHORT, sleep_per_step=0.2))  # each loss must hit the run
    step = job.wait_step(15)
    pods = _uids(job)

    sidecar = "serve|holdfast-sidecar"
    faults.kill_process(scenario.namespace, job.pod_name(0), "holdfast-sidecar", match=sidecar)
    job.wait_step(step + 15)
    assert job.round == 0, "the killed sidecar: it is no reason for a new round"

    faults.kill_process(scenario.namespace, job.pod_name(2), "trainer", match="holdfast-rank")
    job.wait_round(1)
    assert _uids(job) == pods, "the killed rank: no pod was replaced"
    assert job.status["members"] == [0, 0, 0], "the killed rank: it restarts in its pod"

    faults.oom_container(scenario.namespace, job.pod_name(1), "trainer")
    job.wait_round(2)
    assert _uids(job) == pods, "the OOM-killed container: no pod was replaced"
    scenario.finish_and_judge(job)


def _uids(job) -> set[str]:
    return {pod["metadata"]["uid"] for pod in job.pods()}
