"""Two operator processes on a real API server, of which one leads and the other one is a warm standby."""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.operator.operator_bed import OperatorBed
from tests.support.servers.ports import free_port

pytestmark = pytest.mark.integration


@pytest.fixture
def first(empty_bed: OperatorBed) -> OperatorBed:
    """Return a job that trains, with an operator that leads."""
    empty_bed.forget_lease()
    empty_bed.start_operator()
    empty_bed.train()
    return empty_bed


@pytest.fixture
def second(first: OperatorBed, tmp_path: Path) -> Iterator[OperatorBed]:
    """Return a second operator of the same installation. It is a ready standby."""
    folder = tmp_path / "second"
    folder.mkdir()
    ports = {"metrics_port": free_port(), "health_port": free_port()}
    bed = replace(first, folder=folder, pod_name="operator-1", process=None, **ports)
    bed.start_operator()
    try:
        bed.until("it is a standby", lambda: "is a standby, operator-0 leads" in bed.log())
        with urllib.request.urlopen(f"http://127.0.0.1:{bed.health_port}/readyz") as reply:
            assert reply.status == 200
        assert leads(bed) == 0
        yield bed
    finally:
        if bed.process is not None:
            bed.kill_operator()
        bed.forget_lease()


def leads(bed: OperatorBed) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{bed.metrics_port}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith("holdfast_operator_leads ")]
    return float(value)


def assert_one_recovery(bed: OperatorBed) -> None:
    bed.until("round 1", lambda: bed.status().get("restartRound") == 1)
    bed.until("new pod", lambda: bed.pod_names() == [bed.pod(0, 0), bed.pod(1, 1)])
    assert bed.status()["restarts"] == 1


@pytest.mark.fault("The leader is killed and a pod is lost while a standby waits, real API server")
def test_a_standby_takes_over_from_a_killed_leader_and_gives_the_lease_back_at_its_end(
    first: OperatorBed, second: OperatorBed
) -> None:
    first.kill_operator()
    first.kubelet.delete_pod(first.pod(1, 0))
    assert_one_recovery(second)
    second.until("the standby leads", lambda: leads(second) == 1)  # 0 while a renewal is late
    first.start_operator()
    first.until("it is a standby", lambda: "is a standby, operator-1 leads" in first.log())
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(timeout=HANG_SECONDS) == 0
    assert "the lease is given back" in second.log()
    first.until("it leads", lambda: leads(first) == 1)
    assert_one_recovery(first)


@pytest.mark.fault("The leading operator is stopped (SIGSTOP) and continues later")
@pytest.mark.fault(
    "The leader's process is frozen (SIGSTOP), another one leads and recovers, the first one "
    "continues"
)
def test_a_leader_that_was_frozen_ends_and_changes_nothing(
    first: OperatorBed, second: OperatorBed
) -> None:
    """When it continues, it sees a lost pod in round 0, which the other operator has replaced in round 1."""
    first.process.send_signal(signal.SIGSTOP)
    try:
        second.until("the standby leads", lambda: leads(second) == 1)
        second.kubelet.delete_pod(second.pod(1, 0))
        assert_one_recovery(second)
    finally:
        first.process.send_signal(signal.SIGCONT)
    assert first.process.wait(timeout=HANG_SECONDS) == 1
    assert "operator-1 has taken it" in first.log()
    assert_one_recovery(second)
