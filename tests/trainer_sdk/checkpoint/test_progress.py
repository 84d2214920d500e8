"""The sidecar receives each finished step, whichever calls a training loop uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.clock import ManualClock
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.launched import until
from tests.support.trainer.watched_sidecar import WatchedSidecar

import holdfast
from holdfast.checkpoint.status import LOOP_ENDED, ProgressReporter
from holdfast.connection.session import Session
from holdfast_core.ids import JobUid, Rank, RestartRound, Step
from holdfast_core.messages.codec import MAX_METRICS
from holdfast_core.messages.schema import Hello, Progress

STEPS = 7
INTERVAL = 3
Loop = Callable[[holdfast.Checkpointer, dict[str, Any]], None]


@pytest.fixture
def interval_steps() -> int:
    return INTERVAL


def newest(sidecar: WatchedSidecar) -> Progress:
    sidecar.wait_for(Progress)
    return sidecar.messages(Progress)[-1]


def train(ckpt: holdfast.Checkpointer, state: dict[str, Any]) -> None:
    state["t"] += 1
    ckpt.report(loss=0.5)


def with_steps(ckpt: holdfast.Checkpointer, state: dict[str, Any]) -> None:
    for _ in ckpt.steps(STEPS, state):
        train(ckpt, state)


def with_should_save(ckpt: holdfast.Checkpointer, state: dict[str, Any]) -> None:
    start = ckpt.restore(state) or 0
    for step in range(start + 1, STEPS + 1):
        train(ckpt, state)
        if ckpt.should_save(step):
            ckpt.save(step, state)


def without_the_saves(ckpt: holdfast.Checkpointer, state: dict[str, Any]) -> None:
    """Train as a script that calls `should_save` and then does not save."""
    ckpt.restore(state)
    for step in range(1, STEPS + 1):
        train(ckpt, state)
        ckpt.should_save(step)


def with_its_own_interval(ckpt: holdfast.Checkpointer, state: dict[str, Any]) -> None:
    for step in range(1, STEPS + 1):
        train(ckpt, state)
        ckpt.save(step, state).wait("local", timeout=HANG_SECONDS)


@pytest.mark.fault("A script uses restore, should_save and save, or save alone")
@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        pytest.param(with_steps, [1, 2, 3, 4, 5, 6, 7], id="steps"),
        pytest.param(with_should_save, [1, 2, 3, 4, 5, 6, 7], id="should_save and save"),
        # Steps 3 and 6 were due. Their saves would have reported them; the next step does so instead.
        pytest.param(without_the_saves, [1, 2, 4, 5, 7], id="should_save alone"),
        pytest.param(with_its_own_interval, [1, 2, 3, 4, 5, 6, 7], id="save alone"),
    ],
)
def test_every_kind_of_loop_reports_its_steps(
    sidecar: WatchedSidecar, loop: Loop, expected: list[int]
) -> None:
    with holdfast.Checkpointer(when_busy="wait") as ckpt:
        loop(ckpt, {"t": torch.zeros(1)})
    until(lambda: newest(sidecar).step == expected[-1], "the last step")
    reported = sidecar.messages(Progress)
    assert list(dict.fromkeys(message.step for message in reported)) == expected
    assert all(message.metrics == {"loss": 0.5} for message in reported)


@pytest.mark.fault("A script reports values whose names are no text, or too many of them")
@pytest.mark.fault("A reported value has a lone surrogate in its name")
def test_what_a_script_reports_never_loses_a_message(sidecar: WatchedSidecar) -> None:
    """Names become labels of /metrics, which is UTF-8: one bad name would break the whole page."""
    with holdfast.Checkpointer() as ckpt:
        ckpt.report(**{"\ud800": 1, "l" * 1000: 2, "none": float("nan")})
        ckpt.report(**{f"n{i}": i for i in range(100)})
        ckpt.report(n0=7, n99=7)
        ckpt.should_save(1)
        found = sidecar.wait_for(Progress).metrics
    assert len(found) == MAX_METRICS
    assert list(found.items())[:3] == [("?", 1.0), ("l" * 128, 2.0), ("n0", 7.0)]


@pytest.mark.fault("A script does not save a due step")
def test_a_due_step_without_a_save_is_reported_at_the_end(sidecar: WatchedSidecar) -> None:
    with holdfast.Checkpointer() as ckpt:
        for step in range(1, 2 * INTERVAL + 1):
            ckpt.should_save(step)
    assert sidecar.wait_for(Progress, 5).step == 2 * INTERVAL


@pytest.mark.fault("A save is skipped, and later steps would count it again")
def test_skipped_saves_are_counted_once(
    sidecar: WatchedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message has the whole number, so that none is lost or counted again with a connection."""
    sidecar.faults.delay_seconds["Stage"] = 1.0
    with holdfast.Checkpointer() as ckpt:
        state = {"t": torch.zeros(1)}
        for step in range(1, 9):
            ckpt.save(step, state)
        skipped = ckpt.saves_skipped
        assert skipped > 0
        sidecar.wait_for(
            Progress, 15
        )  # the begin and the end of each save, but no begin before a step
    assert sidecar.messages(Progress)[-1].saves_skipped == skipped


@pytest.mark.fault("A sidecar restarts between two steps, or after the last one")
def test_a_sidecar_that_restarts_receives_the_step_again(sidecar: WatchedSidecar) -> None:
    """No other message would report the step between two steps or after the last one."""
    with holdfast.Checkpointer() as ckpt:
        ckpt.should_save(1)
        sidecar.wait_for(Progress)
        round_ = sidecar.round
        sidecar.die()
        sidecar.start(round_)
        sidecar.wait_for(Hello, 2)
        again = sidecar.wait_for(Progress, 2)
    assert (again.step, again.blocked_seconds, again.saves_skipped) == (1, 0.0, 0)


def test_pauses_are_reported_when_they_begin_and_when_they_end(sidecar: WatchedSidecar) -> None:
    def pauses() -> list[str]:
        found = [message.paused for message in sidecar.messages(Progress)]
        return [text for text, before in zip(found, [None, *found], strict=False) if text != before]

    with holdfast.Checkpointer(when_busy="wait") as ckpt:
        state = {"t": torch.zeros(1)}
        for index in ckpt.steps(INTERVAL, state):
            if index == 1:
                with ckpt.paused("an evaluation"), ckpt.paused("a part of it"):
                    train(ckpt, state)
        until(lambda: LOOP_ENDED in pauses(), "the end of the loop")
        with ckpt.paused("the last evaluation"):
            train(ckpt, state)
    loop = ["", "an evaluation", "a part of it", "an evaluation", "", "a save", "", LOOP_ENDED]
    until(lambda: pauses()[len(loop) :][-1:] == [LOOP_ENDED], "the end")
    assert pauses() == [*loop, "the last evaluation", LOOP_ENDED]
    assert sidecar.messages(Progress)[-1].finished == INTERVAL


class Recorded(Session):
    """A session that keeps the newest report instead of sending it."""

    def __init__(self) -> None:
        super().__init__(JobUid("job"), Rank(0), RestartRound(0))
        self.newest: Progress | None = None

    def progress(self, message: Progress) -> bool:
        self.newest = message
        return True


class Reports:
    """A reporter whose clock the test moves."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self._session = Recorded()
        self.reporter = ProgressReporter(self._session, self.clock.monotonic)

    def step(self, number: int, seconds: float = 0.0) -> Progress:
        self.clock.advance(seconds)
        self.reporter.finished(Step(number))
        self.reporter.send()
        return self.newest

    @property
    def newest(self) -> Progress:
        assert self._session.newest is not None
        return self._session.newest


def test_the_step_time_is_the_median_without_pauses() -> None:
    reports = Reports()
    assert reports.step(1, seconds=600).step_seconds is None
    assert reports.step(2, seconds=600).step_seconds is None, "the first steps may compile"
    assert reports.step(3, seconds=2).step_seconds is None
    with reports.reporter.paused("an evaluation"):
        reports.clock.advance(1000)
        with reports.reporter.paused("a save"):
            reports.clock.advance(100)
    assert reports.step(4, seconds=3).step_seconds == 3
    reports.clock.advance(5)
    with reports.reporter.paused("a save of a loop without should_save"):
        assert reports.step(5, seconds=7).step_seconds == 4
        reports.clock.advance(50)
    for number in range(6, 100):
        last = reports.step(number, seconds=4)
    assert last.step_seconds == 4


def test_steps_that_are_repeated_after_a_rollback_count_again() -> None:
    reports = Reports()
    reports.step(1)
    assert reports.step(2).finished == 2
    assert reports.step(2).finished == 2, "should_save and save report the same step"
    reports.reporter.rolled_back()
    assert reports.step(2).finished == 3
    assert reports.step(1).finished == 4


def test_a_loop_that_an_error_ended_is_no_pause() -> None:
    """If the process does not end after the error, the gang hangs."""
    reports = Reports()
    reports.step(1)
    reports.reporter.loop_ended()
    assert reports.newest.paused == LOOP_ENDED
    reports.reporter.loop_ended(is_error=True)
    assert reports.newest.paused == ""
    reports.reporter.loop_ended()
    assert reports.step(2).paused == "", "the script trains in a loop of its own"
