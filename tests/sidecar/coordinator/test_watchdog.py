"""The coordinator reports a gang that trains without commits, for each cause."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.sidecar.coordinators import CoordinatorWorld

from holdfast_core.ids import Rank, RestartRound, Step, TierName
from holdfast_core.messages.schema import (
    CoordinatorState,
    Failure,
    Interval,
    Policy,
    Progress,
    Timing,
)
from holdfast_sidecar.coordinator.watchdog import (
    NO_COMMIT,
    CommitInterval,
    CommitWatch,
    interval_of,
)
from holdfast_sidecar.wire.server import BUNDLE_SECONDS

EVERY = CommitInterval(10)


def watch() -> CommitWatch:
    return CommitWatch(intervals=3, seconds=60.0)


@pytest.mark.parametrize(
    ("finished", "now", "is_overdue"),
    [
        pytest.param(129, 1000.0, False, id="fewer intervals than the bound, long ago"),
        pytest.param(130, 1059.0, False, id="many intervals in a short time"),
        pytest.param(130, 1060.0, True, id="both bounds passed"),
    ],
)
def test_a_commit_is_overdue_when_both_bounds_are_passed(
    finished: int, now: float, is_overdue: bool
) -> None:
    found = watch()
    found.look(Step(100), Step(90), EVERY, 1000.0)
    assert (found.look(Step(finished), Step(90), EVERY, now) is not None) is is_overdue


@pytest.mark.parametrize(
    ("finished", "now", "is_overdue"),
    [
        pytest.param(9000, 1899.0, False, id="many steps in less than three intervals"),
        pytest.param(102, 9000.0, False, id="steps that are longer than the interval"),
        pytest.param(103, 1900.0, True, id="three intervals and three steps"),
    ],
)
def test_a_commit_is_overdue_after_intervals_of_time(
    finished: int, now: float, is_overdue: bool
) -> None:
    found, every = watch(), CommitInterval(seconds=300.0)
    found.look(Step(100), Step(90), every, 1000.0)
    assert (found.look(Step(finished), Step(90), every, now) is not None) is is_overdue


@pytest.mark.parametrize(
    ("timing", "reported", "expected"),
    [
        pytest.param(None, None, CommitInterval(7), id="steps"),
        pytest.param(Timing(60.0, 9.0), None, CommitInterval(seconds=60.0), id="seconds"),
        pytest.param(Timing(None, 900.0), None, CommitInterval(seconds=900.0), id="auto, unknown"),
        pytest.param(
            Timing(None, 900.0), Interval(5, 80.0), CommitInterval(seconds=80.0), id="auto, known"
        ),
        pytest.param(
            Timing(None, 900.0), Interval(5, 0.0), CommitInterval(seconds=1.0), id="auto, nothing"
        ),
    ],
)
def test_the_interval_of_a_round(
    timing: Timing | None, reported: Interval | None, expected: CommitInterval
) -> None:
    assert interval_of(Policy(7, timing=timing), reported) == expected


def test_a_gang_that_never_committed_counts_from_its_first_step() -> None:
    found = watch()
    assert found.look(None, None, EVERY, 0.0) is None
    assert found.look(Step(5), None, EVERY, 1000.0) is None
    overdue = found.look(Step(36), None, EVERY, 1090.0)
    assert (overdue.since, overdue.steps, overdue.intervals) == (1000.0, 31, 3)


def test_a_commit_or_a_step_back_restarts_the_count() -> None:
    found = watch()
    found.look(Step(10), None, EVERY, 0.0)
    assert found.look(Step(50), None, EVERY, 100.0) is not None
    assert found.look(Step(50), Step(40), EVERY, 100.0) is None, "committed"
    assert found.look(Step(79), Step(40), EVERY, 200.0) is None
    assert found.look(Step(80), Step(40), EVERY, 200.0) is not None
    assert found.look(Step(20), Step(40), EVERY, 200.0) is None, "the script went back"
    assert found.look(Step(45), Step(40), EVERY, 300.0) is None


class World(CoordinatorWorld):
    """A gang that trains. No member receives anything: the coordinator is not started."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, members=None)

    def step(self, step: int, *failures: Failure) -> None:
        """Report that both ranks have finished the step, with these failures of worker 1."""
        for worker in (0, 1):
            self.tell(
                worker,
                progress=(Progress(RestartRound(0), Rank(worker), Step(step)),),
                failures=failures if worker == 1 else (),
            )

    async def state(self) -> CoordinatorState:
        return await self.coordinator.state(0, 0.0, 0.0, acknowledges=False)


async def test_a_report_without_anything_new_raises_no_version(tmp_path: Path) -> None:
    """The operator of a thousand jobs would read each of them every second for nothing."""
    async with World(tmp_path) as world:
        world.step(1)
        seen = await world.coordinator.state(0, 0.0, 0.0, acknowledges=False)
        seen = await world.coordinator.state(
            seen.version, 2 * BUNDLE_SECONDS, 0.0, acknowledges=False
        )
        world.step(1)
        again = await world.coordinator.state(
            seen.version, 2 * BUNDLE_SECONDS, 0.0, acknowledges=False
        )
        assert again.version == seen.version
        world.step(2)
        moved = await world.coordinator.state(seen.version, 60.0, 0.0, acknowledges=False)
        assert moved.version > seen.version


@pytest.mark.fault("Nothing is committed while training goes on")
async def test_the_state_names_since_when_and_what_is_missing(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        world.step(1)
        world.hold(2, ranks=(0,))
        world.clock.advance(61)
        world.step(4)
        (failure,) = (await world.state()).failures
        assert (failure.reason, failure.step, failure.tier) == (NO_COMMIT, None, TierName.NODE)
        assert "since 1970-01-01T00:16:40Z" in failure.message
        assert "step 2 waits for 1 of 2 ranks (rank 1)" in failure.message
        assert world.coordinator.overdue_seconds == 61


@pytest.mark.fault("A rank hands over no save any more")
async def test_the_state_names_that_no_rank_has_saved(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        world.step(1)
        world.clock.advance(61)
        world.step(4)
        (failure,) = (await world.state()).failures
        assert "no rank has written a newer step" in failure.message


async def test_a_known_cause_in_a_node_tier_comes_first(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        full = Failure(Step(3), TierName.NODE, "NodeVolumeFull", "worker 1 is full")
        slow = Failure(None, TierName.PEER, "PeerUnreachable", "worker 0 is away")
        world.step(1)
        world.clock.advance(61)
        world.step(4, slow, full)
        reasons = [f.reason for f in (await world.state()).failures]
        assert reasons == ["NodeVolumeFull", NO_COMMIT, "PeerUnreachable"]


async def test_a_gang_that_returned_is_not_overdue(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        world.step(1)
        world.clock.advance(61)
        world.step(4)
        assert [f.reason for f in (await world.state()).failures] == [NO_COMMIT]
        for worker in (0, 1):
            world.tell(worker, done=True)
        assert (await world.state()).failures == ()
        assert world.coordinator.overdue_seconds == 0
