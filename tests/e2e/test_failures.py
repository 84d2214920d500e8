"""One scenario a test: what is lost, what must come back, and the judgement at the end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from testbed import faults
from testbed.driver import install, metrics
from testbed.driver.jobs import prepare_namespace
from testbed.driver.kube import Kube, wait_for
from testbed.driver.scenario import SHORT, Scenario


def _served_by(job) -> dict[int, str]:
    with ThreadPoolExecutor(4) as pool:
        return metrics.gang(job, job.status, pool).restored


def test_trains_to_completion_without_faults(scenario):
    job = scenario.start()
    job.wait_complete()
    assert job.status["restartRound"] == 0
    assert job.status["lastPersisted"]["step"] == 80
    scenario.finish_and_judge(job)


def test_deleted_pod_is_rehydrated_from_a_peer(scenario):
    job = scenario.start()
    job.wait_step(25)
    scenario.kube.delete_pod(scenario.namespace, job.pod_name(1), grace_seconds=1)
    job.wait_round(1)
    assert job.status["members"] == [0, 1, 0], "only the lost worker gets a new pod"
    assert _served_by(job)[1] == "peer"
    scenario.finish_and_judge(job)


def test_killed_rank_restarts_in_place(scenario):
    job = scenario.start()
    job.wait_step(25)
    before = {p["metadata"]["uid"] for p in job.pods()}
    faults.kill_process(scenario.namespace, job.pod_name(2), "trainer", match="holdfast-rank")
    job.wait_round(1)
    assert {p["metadata"]["uid"] for p in job.pods()} == before, "no pod was replaced"
    assert job.status["members"] == [0, 0, 0]
    scenario.finish_and_judge(job)


def test_oom_killed_trainer_container_restarts_in_place(scenario):
    job = scenario.start()
    job.wait_step(25)
    faults.oom_container(scenario.namespace, job.pod_name(1), "trainer")
    job.wait_round(1)
    scenario.finish_and_judge(job)


def test_killed_sidecar_does_not_stop_training(scenario):
    job = scenario.start()
    step = job.wait_step(25)
    faults.kill_process(
        scenario.namespace, job.pod_name(0), "holdfast-sidecar", match="serve|holdfast-sidecar"
    )
    job.wait_step(step + 15)
    assert job.round == 0, "a dead sidecar is no reason for a new round"
    scenario.finish_and_judge(job)


@pytest.mark.alone
def test_killed_node_is_replaced_from_a_peer(scenario, nodes_back):
    job = scenario.start()
    job.wait_step(25)
    faults.kill_node(job.node_of(2))
    job.wait_round(1, 150)
    first, second, lost = job.status["members"]
    assert (first, second) == (0, 0), "survivors keep their pods"
    assert lost > 0, "the lost worker has a new pod"
    scenario.finish_and_judge(job)


@pytest.mark.alone
def test_paused_node_is_replaced_and_cannot_harm_when_it_returns(scenario, nodes_back):
    job = scenario.start()
    job.wait_step(25)
    node = job.node_of(1)
    faults.pause_node(node)
    job.wait_round(1, 150)
    faults.unpause_node(node)
    scenario.finish_and_judge(job)


def test_all_pods_deleted_restores_the_newest_persisted_step(scenario):
    job = scenario.start()
    persisted = job.wait_persisted(20)
    for pod in job.pods():
        scenario.kube.delete_pod(scenario.namespace, pod["metadata"]["name"], grace_seconds=0)
    job.wait_round(1, 180)
    point = job.status["restorePoint"]
    assert point["step"] >= persisted["step"]
    assert set(_served_by(job).values()) == {"object"}
    scenario.finish_and_judge(job)


def test_a_step_trained_twice_never_comes_back(scenario):
    """Restored to an older step, the steps after it are trained again; the first ones are gone."""
    slow = replace(SHORT, sleep_per_step=0.2)  # failures late in the run, on a busy machine, too
    job = scenario.start(slow, interval=10, object_every=40)
    job.wait_persisted(40)
    job.wait_step(52)
    for pod in job.pods():
        scenario.kube.delete_pod(scenario.namespace, pod["metadata"]["name"], grace_seconds=0)
    job.wait_round(1, 180)
    assert job.status["restorePoint"]["step"] == 40
    again = job.round
    job.wait_step(58)
    faults.kill_process(scenario.namespace, job.pod_name(0), "trainer", match="holdfast-rank")
    job.wait_round(again + 1)
    point = job.status["restorePoint"]
    assert point["step"] >= 50, "50 was committed again before step 58 was done"
    assert point["round"] == again, "those of the new round count, never round 0's"
    scenario.finish_and_judge(job)


@pytest.mark.alone
def test_store_down_during_training_and_back(scenario):
    job = scenario.start()
    job.wait_step(5)
    with faults.store_down():
        step = job.wait_step(30)
        condition = job.wait_condition("RemoteTierHealthy", "False", 90)
        assert condition["message"], "says what the store or the network said"
        assert step >= 30, "training went on"
    job.wait_condition("RemoteTierHealthy", "True", 120)
    scenario.finish_and_judge(job)


def test_two_jobs_in_two_namespaces(scenario, installed: Kube):
    other = scenario.namespace + "-b"
    prepare_namespace(installed, other)
    try:
        twin = Scenario(installed, other, scenario.reference)
        jobs = [scenario.start(), twin.start()]
        for job in jobs:
            job.wait_step(25)
        faults.kill_process(other, jobs[1].pod_name(0), "trainer", match="holdfast-rank")
        jobs[1].wait_round(1)
        assert jobs[0].round == 0, "the other job is not touched"
        scenario.finish_and_judge(jobs[0])
        twin.finish_and_judge(jobs[1])
    finally:
        installed.delete_namespace(other)


@pytest.mark.alone
def test_survivor_that_answers_late(scenario, nodes_back):
    """One survivor is frozen while another pod is lost: it is Unknown, not Nothing."""
    job = scenario.start()
    job.wait_step(25)
    late = job.node_of(0)
    victim = job.pod_name(1)
    faults.pause_node(late)
    scenario.kube.delete_pod(scenario.namespace, victim, grace_seconds=0)
    wait_for("round 1", lambda: job.round >= 1, timeout_seconds=60, describe=job.describe)
    faults.unpause_node(late)
    job.wait_round(1, 180)
    scenario.finish_and_judge(job)


@pytest.mark.alone
def test_operator_killed_during_recovery(scenario, installed: Kube):
    """Killed after CAS 1, after the seal, after CAS 2: each time the next operator goes on."""
    job = scenario.start()
    phases = {
        "CAS 1": lambda before: job.round > before,
        "the seal": lambda before: job.metric(0, "holdfast_restart_round").get("", 0) > before,
        "CAS 2": lambda before: job.round > before and "restorePoint" in job.status,
    }
    for name, reached in phases.items():
        job.wait_step(job.live_step() + 15)
        before = job.round
        scenario.kube.delete_pod(scenario.namespace, job.pod_name(1), grace_seconds=0)
        wait_for(
            name,
            lambda r=reached, b=before: r(b),
            timeout_seconds=60,
            describe=job.describe,
            every_seconds=0.02,
        )
        install.kill_operator(installed)
        job.wait_round(before + 1, 180)
    scenario.finish_and_judge(job)


def test_retained_checkpoint_starts_a_new_job(scenario):
    job = scenario.start()
    job.wait_persisted(40)
    job.delete()
    kept = max(
        (c for c in scenario.kube.items("Checkpoint", scenario.namespace)),
        key=lambda c: c["spec"]["step"],
    )
    again = scenario.start(name="again", restore_from=kept["metadata"]["name"])
    again.wait_round(0)
    assert again.status["restorePoint"]["step"] == kept["spec"]["step"]
    scenario.finish_and_judge(again)
