"""Containers and processes that die while their pod survives. The job must not lose anything."""

from __future__ import annotations

from testbed import faults


def test_a_job_trains_to_completion_without_faults(scenario):
    job = scenario.start()
    job.wait_complete()
    assert job.status["restartRound"] == 0
    assert job.status["lastPersisted"]["step"] == 80
    scenario.finish_and_judge(job)


def test_a_killed_rank_restarts_in_place(scenario):
    job = scenario.start()
    job.wait_step(25)
    before = {p["metadata"]["uid"] for p in job.pods()}
    faults.kill_process(scenario.namespace, job.pod_name(2), "trainer", match="holdfast-rank")
    job.wait_round(1)
    assert {p["metadata"]["uid"] for p in job.pods()} == before, "no pod was replaced"
    assert job.status["members"] == [0, 0, 0]
    scenario.finish_and_judge(job)


def test_an_oom_killed_trainer_container_restarts_in_place(scenario):
    job = scenario.start()
    job.wait_step(25)
    faults.oom_container(scenario.namespace, job.pod_name(1), "trainer")
    job.wait_round(1)
    scenario.finish_and_judge(job)


def test_a_killed_sidecar_does_not_stop_training(scenario):
    job = scenario.start()
    step = job.wait_step(25)
    faults.kill_process(
        scenario.namespace, job.pod_name(0), "holdfast-sidecar", match="serve|holdfast-sidecar"
    )
    job.wait_step(step + 15)
    assert job.round == 0, "a dead sidecar is no reason for a new round"
    scenario.finish_and_judge(job)
