"""What a sidecar knows of its own ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast_core.ids import Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import (
    DeadRank,
    LauncherState,
    Ok,
    Progress,
    RankWork,
    WorkerReport,
)
from holdfast_sidecar.gang.state import LocalGang

ROUND = RestartRound(3)
RANKS = range(2, 4)


def step_of(gang: LocalGang, rank: int) -> None:
    gang.progressed(Progress(ROUND, Rank(rank), Step(7)))


def training() -> LocalGang:
    gang = LocalGang(2)
    gang.running_round = ROUND
    for rank in RANKS:
        step_of(gang, rank)
    return gang


def new_round(gang: LocalGang) -> None:
    gang.reset()
    gang.running_round = ROUND


def half_new_round(gang: LocalGang) -> None:
    new_round(gang)
    step_of(gang, 2)


def ended(gang: LocalGang) -> None:
    gang.running_round = None


RETURNED = LauncherState(ROUND, returned=(Rank(3),))
FAILED = LauncherState(ROUND, dead=(DeadRank(Rank(3), Worker(1), 1),))


@pytest.mark.fault("A pod is evicted while its gang does not train")
@pytest.mark.parametrize(
    ("happens", "expected"),
    [
        pytest.param(lambda gang: None, True, id="nothing"),
        pytest.param(lambda gang: gang.reported(RETURNED, RANKS), False, id="one returned"),
        pytest.param(lambda gang: gang.reported(FAILED, RANKS), False, id="one failed"),
        pytest.param(lambda gang: gang.lost([Rank(2)], "gone"), False, id="one was killed"),
        pytest.param(ended, False, id="they were ended"),
        pytest.param(new_round, False, id="they restore"),
        pytest.param(half_new_round, False, id="one has not finished a step yet"),
    ],
)
def test_a_pod_trains_while_all_of_its_ranks_do(
    happens: Callable[[LocalGang], None], expected: bool
) -> None:
    """The PodDisruptionBudget lets a worker be evicted only while all pods train."""
    gang = training()
    happens(gang)
    assert gang.trains(ROUND, RANKS) is expected
    assert not gang.trains(RestartRound(4), RANKS)


@pytest.mark.fault("The launcher ends after its ranks have returned")
@pytest.mark.parametrize(
    ("returned", "lost"),
    [
        pytest.param((), (Rank(2), Rank(3)), id="they were running"),
        pytest.param((2, 3), (), id="they had saved and stopped"),
        pytest.param((2,), (Rank(3),), id="one had saved and stopped"),
    ],
)
def test_ranks_that_end_with_their_launcher(
    returned: tuple[int, ...], lost: tuple[Rank, ...]
) -> None:
    """The launcher of a pod that leaves exits after its ranks have returned: a drain is no failure."""
    gang = training()
    gang.reported(LauncherState(ROUND, returned=tuple(map(Rank, returned))), RANKS)
    gang.launcher_lost(map(Rank, RANKS), "the launcher ended")
    assert gang.dead == {r: DeadRank(r, Worker(1), -9, "the launcher ended") for r in lost}


def test_a_pod_leaves_once_it_ends_and_its_ranks_have_stopped() -> None:
    gang = training()
    gang.ends = True
    assert not gang.leaves, "its ranks may still save"
    ended(gang)
    assert gang.leaves
    gang.reset()
    assert gang.leaves, "a seal does not keep the pod"


def test_a_pod_whose_ranks_have_returned_for_good_does_not_leave() -> None:
    """The coordinator persists the last step of a gang that has finished in any case."""
    gang = training()
    gang.ends, gang.done = True, True
    assert not gang.leaves


def test_only_the_reply_to_a_report_that_the_pod_ends_counts() -> None:
    """Before, the coordinator does not count this pod among those that end."""
    gang = training()
    report, reply = WorkerReport(ROUND, Worker(1)), Ok(ROUND, waits_for_store=True)
    gang.replied(report, reply)
    assert gang.waits_for_store is None
    gang.replied(replace(report, ends=True), reply)
    assert gang.waits_for_store is True
    gang.reset()
    assert gang.waits_for_store is None


def test_the_newest_work_of_a_rank_is_reported() -> None:
    gang = training()
    for seconds in (1.0, 2.0):
        work = RankWork(0.5, seconds, 12)
        gang.progressed(Progress(ROUND, Rank(2), Step(8), work=work))
    assert gang.progress[Rank(2)].work == RankWork(0.5, 2.0, 12)
    assert gang.progress[Rank(3)].work is None


def report(gang: LocalGang, step: int, **metrics: float) -> None:
    gang.progressed(Progress(ROUND, Rank(0), Step(step), metrics))


def values(gang: LocalGang) -> dict[Step, dict[str, float]]:
    return gang.saved.newest


def test_a_save_has_the_metrics_of_its_own_step() -> None:
    gang = LocalGang(2)
    gang.saved.staged(Step(5))  # nothing was reported before it
    for step in (10, 20, 30):
        report(gang, step, loss=1.0 / step)
    gang.saved.staged(Step(20))  # the copy from a GPU ended during step 30
    assert values(gang) == {20: {"loss": 0.05}}
    new_round(gang)
    assert values(gang) == {}


def test_the_metrics_of_the_newest_saves_are_reported() -> None:
    gang = LocalGang(2)
    for step in range(100):
        report(gang, step, loss=float(step))
        gang.saved.staged(Step(step))
    assert values(gang) == {step: {"loss": float(step)} for step in range(92, 100)}
