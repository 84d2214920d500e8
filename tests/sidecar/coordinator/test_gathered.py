"""The coordinator's combined view of reports, which it counts as they come in."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.ids import Digest, Rank, RestartRound, Step, TierName, Worker
from holdfast_core.messages.schema import (
    AcceptedRound,
    Failure,
    Progress,
    WorkerReport,
)
from holdfast_sidecar.coordinator.gathered import Gathered

WORKERS = frozenset(map(Worker, range(3)))
FULL = Failure(None, TierName.NODE, "NodeVolumeFull", "no room")

reports = st.builds(
    WorkerReport,
    round=st.just(RestartRound(0)),
    worker=st.sampled_from(sorted(WORKERS)),
    failures=st.sampled_from([(), (FULL,)]),
    barrier_open=st.booleans(),
    done=st.booleans(),
    idle=st.booleans(),
).flatmap(
    lambda report: st.integers(0, 5).map(
        lambda step: WorkerReport(
            report.round,
            report.worker,
            progress=(
                Progress(report.round, Rank(report.worker), Step(step), blocked_seconds=step / 2),
            )
            if step
            else (),
            failures=report.failures,
            barrier_open=report.barrier_open,
            done=report.done,
            idle=report.idle,
        )
    )
)


@given(st.lists(reports, max_size=20))
def test_the_counts_are_those_of_the_newest_reports(sent: list[WorkerReport]) -> None:
    gathered = Gathered(WORKERS, 3, 0.0)
    for report in sent:
        gathered.receive(report, 1.0)
    newest = {report.worker: report for report in sent}.values()
    progress = [p for r in newest for p in r.progress]
    steps = [p.step for p in progress]
    assert gathered.pressed == any(r.failures for r in newest)
    assert gathered.done == (len(newest) == 3 and all(r.done for r in newest))
    assert gathered.idle == (len(newest) == 3 and all(r.idle for r in newest))
    assert gathered.running == (len(steps) == 3)
    assert gathered.finished == min(steps, default=None)
    found = gathered.progress
    if not steps:
        assert found is None
        return
    assert (found.first, found.last) == (min(steps), max(steps))
    assert found.total_steps == sum(steps)
    assert found.blocked_seconds == max(p.blocked_seconds for p in progress)


def test_progress_alone_is_not_urgent() -> None:
    gathered = Gathered(WORKERS, 3, 0.0)

    def receive(step: int, *failures: Failure) -> bool:
        progress = (Progress(RestartRound(0), Rank(0), Step(step)),)
        report = WorkerReport(RestartRound(0), Worker(0), progress=progress, failures=failures)
        return gathered.receive(report, 1.0)

    assert receive(1), "the first report"
    assert not receive(2)
    assert receive(2, FULL)
    assert receive(3), "the failure is over"


def test_pods_that_end_keep_no_copies() -> None:
    gathered = Gathered(WORKERS, 3, 0.0)
    report = WorkerReport(RestartRound(0), Worker(1))
    gathered.receive(report, 1.0)
    assert gathered.stays([Worker(1)])
    gathered.receive(replace(report, ends=True), 2.0)
    assert not gathered.stays([Worker(1)]), "a worker whose ranks still run keeps no copy either"
    assert gathered.stays([Worker(1), Worker(2)])
    assert not gathered.stays([])
    assert (gathered.ending, gathered.leaves) == ({Worker(1)}, False)
    gathered.receive(replace(report, ends=True, leaves=True), 3.0)
    assert gathered.leaves


def accepted(version: int, content: str = "b3:a") -> AcceptedRound:
    return AcceptedRound(version, Digest(content))


@pytest.mark.parametrize(
    ("reports", "since", "expected"),
    [
        pytest.param([accepted(1), accepted(3), accepted(2)], 0.0, accepted(3), id="the same"),
        pytest.param([accepted(1), accepted(1)], 0.0, None, id="one has not reported"),
        pytest.param([accepted(1), accepted(1), None], 0.0, None, id="one has accepted none"),
        pytest.param([accepted(1), accepted(1), accepted(2, "b3:b")], 0.0, None, id="another one"),
        pytest.param([accepted(1), accepted(1), accepted(1)], 1.5, None, id="one is silent"),
    ],
)
def test_the_round_that_all_have_accepted(
    reports: list[AcceptedRound | None], since: float, expected: AcceptedRound | None
) -> None:
    gathered = Gathered(WORKERS, 3, 0.0)
    for worker, report in enumerate(reports):
        gathered.receive(
            WorkerReport(RestartRound(0), Worker(worker), accepted=report), 1.0 + worker
        )
    assert gathered.accepted(since) == expected


def test_ranks_are_counted_by_their_tiers_once_every_worker_has_its_shards() -> None:
    gathered = Gathered(WORKERS, 6, 0.0)
    tiers = {
        0: (TierName.MEMORY, TierName.MEMORY),
        1: (TierName.NODE, TierName.MEMORY),
        2: (TierName.PEER, TierName.OBJECT),
    }
    reports = [
        WorkerReport(RestartRound(1), Worker(w), rehydrate_seconds=0.1, restored_from=found)
        for w, found in tiers.items()
    ]
    for report in reports[:2]:
        gathered.receive(report, 1.0)
    assert gathered.restored_from is None
    gathered.receive(replace(reports[2], rehydrate_seconds=None, restored_from=()), 1.0)
    assert gathered.restored_from is None
    gathered.receive(reports[2], 1.0)
    assert gathered.restored_from == {
        TierName.MEMORY: 3,
        TierName.NODE: 1,
        TierName.PEER: 1,
        TierName.OBJECT: 1,
    }


def test_metrics_of_steps_outlive_the_reports_that_name_them() -> None:
    gathered = Gathered(WORKERS, 3, 0.0)
    for step in (10, 20):
        found = {Step(step): {"loss": 1.0 / step}}
        gathered.receive(WorkerReport(RestartRound(0), Worker(0), step_metrics=found), 1.0)
    gathered.receive(WorkerReport(RestartRound(0), Worker(1)), 2.0)
    assert gathered.metrics(Step(10)) == {"loss": 0.1}
    assert gathered.metrics(Step(20)) == {"loss": 0.05}
    assert gathered.metrics(Step(30)) == {}
