"""Containers and processes that die while their pod survives. The job must not lose anything.

Neither may another job of the same name in another namespace, which is not disturbed. A person causes the
faults of a game day by `kubectl holdfast inject`, and follows the logs of all ranks meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from testbed import faults
from testbed.driver.command_line import run_holdfast, running_holdfast
from testbed.driver.jobs import prepare_namespace
from testbed.driver.kube import Kube, wait_for
from testbed.driver.scenario import SHORT, Scenario


@pytest.fixture
def neighbour(scenario: Scenario, pool: str, installed: Kube) -> Iterator[Scenario]:
    """Return a scenario in another namespace on the same nodes."""
    with installed.new_namespace(f"{scenario.namespace}-b", pool=pool) as namespace:
        prepare_namespace(installed, namespace, pool=pool)
        it = Scenario(installed, namespace, scenario.reference, scenario.nodes)
        yield it
        for job in it.jobs:
            job.close()


def inject(scenario: Scenario, *fault: str) -> None:
    ended = run_holdfast(scenario.namespace, "inject", "job/gpt", *fault, "--yes")
    assert ended.returncode == 0, ended.stderr


def test_a_killed_sidecar_rank_and_container_restart_in_place(
    scenario: Scenario, neighbour: Scenario, tmp_path: Path
) -> None:
    """Each dies in another pod, one after the other."""
    undisturbed = neighbour.start()
    job = scenario.start(replace(SHORT, sleep_per_step=1.0))  # each loss must hit the run
    step = job.wait_step(10)
    pods = job.pod_uids()
    refused = run_holdfast(scenario.namespace, "inject", "job/gpt", "--kill", "rank=2", "--yes")
    assert refused.returncode == 6, refused.stderr
    assert "does not permit game days: kubectl label namespace" in refused.stderr
    allowed = {"metadata": {"labels": {"holdfast.dev/game-days": "allowed"}}}
    scenario.kube.core.patch_namespace(scenario.namespace, allowed)

    log = tmp_path / "followed"
    follow = ("logs", "-f", "job/gpt")
    with running_holdfast(scenario.namespace, *follow, output=log) as follower:
        inject(scenario, "--drain-sidecar", "1")
        job.wait_step(step + 10)
        assert job.round == 0, "the ended sidecar: it is no reason for a new round"
        sidecar = "serve|holdfast-sidecar"
        faults.kill_process(scenario.namespace, job.pod_name(0), "holdfast-sidecar", match=sidecar)
        step = job.wait_step(step + 20)
        assert job.round == 0, "the killed sidecar: it is no reason for a new round"

        inject(scenario, "--kill", "rank=2")
        job.wait_round(1)
        assert job.pod_uids() == pods, "the killed rank: no pod was replaced"
        assert job.status["members"] == [0, 0, 0], "the killed rank: it restarts in its pod"

        faults.oom_container(scenario.namespace, job.pod_name(1), "trainer")
        job.wait_round(2)
        assert job.pod_uids() == pods, "the OOM-killed container: no pod was replaced"
        job.wait_complete()
        wait_for(
            "the end of the followed logs",
            lambda: follower.poll() is not None,
        )
    assert follower.returncode == 0, log.read_text()
    assert_followed_to_the_end(log.read_text())
    scenario.finish_and_judge(job)

    undisturbed.wait_complete()
    assert undisturbed.status["restartRound"] == 0, "the other job was not touched"
    assert undisturbed.wait_persisted(80)["step"] == 80, "its last step is in the store"
    neighbour.finish_and_judge(undisturbed)


def assert_followed_to_the_end(log: str) -> None:
    """Assert that the followed logs show the begin of each later round, and the last line of each rank."""
    for worker in range(3):
        for round_ in (1, 2):
            assert re.search(
                rf"^\[worker {worker}\] \[holdfast\] round {round_}\b", log, re.MULTILINE
            ), log
        assert re.search(rf"^\[rank {worker}\] .*finalDigest", log, re.MULTILINE), log
