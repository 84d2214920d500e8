"""Containers and processes that die while their pod survives. The job must not lose anything.

Neither may another job of the same name in another namespace, which is not disturbed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from testbed import faults
from testbed.driver.jobs import prepare_namespace
from testbed.driver.kube import Kube
from testbed.driver.scenario import SHORT, Scenario


@pytest.fixture
def neighbour(scenario: Scenario, pool: str, installed: Kube) -> Iterator[Scenario]:
    """Return a scenario in another namespace on the same nodes."""
    namespace = scenario.namespace + "-b"
    prepare_namespace(installed, namespace, pool=pool)
    it = Scenario(installed, namespace, scenario.reference, scenario.nodes)
    yield it
    for job in it.jobs:
        job.close()
    installed.delete_namespace(namespace)


def test_a_killed_sidecar_rank_and_container_restart_in_place(
    scenario: Scenario, neighbour: Scenario
) -> None:
    """Each dies in another pod, one after the other."""
    undisturbed = neighbour.start()
    job = scenario.start(replace(SHORT, sleep_per_step=0.5))  # each loss must hit the run
    step = job.wait_step(10)
    pods = job.pod_uids()

    sidecar = "serve|holdfast-sidecar"
    faults.kill_process(scenario.namespace, job.pod_name(0), "holdfast-sidecar", match=sidecar)
    job.wait_step(step + 10)
    assert job.round == 0, "the killed sidecar: it is no reason for a new round"

    faults.kill_process(scenario.namespace, job.pod_name(2), "trainer", match="holdfast-rank")
    job.wait_round(1)
    assert job.pod_uids() == pods, "the killed rank: no pod was replaced"
    assert job.status["members"] == [0, 0, 0], "the killed rank: it restarts in its pod"

    faults.oom_container(scenario.namespace, job.pod_name(1), "trainer")
    job.wait_round(2)
    assert job.pod_uids() == pods, "the OOM-killed container: no pod was replaced"
    scenario.finish_and_judge(job)

    undisturbed.wait_complete()
    assert undisturbed.status["restartRound"] == 0, "the other job was not touched"
    assert undisturbed.status["lastPersisted"]["step"] == 80, "its last step is in the store"
    neighbour.finish_and_judge(undisturbed)
