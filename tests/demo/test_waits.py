"""A wait lasts as long as there is progress. The error of a stalled wait has three lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from demo.recorder import Act, Recovery, Sample
from demo.screen import act_line, phases_lines, status_line
from demo.waits import DemoFailed, Pause, wait_while_moving

STALL = 60.0


@dataclass
class Clock:
    now: float = 0.0

    def pause(self) -> Pause:
        return Pause(lambda: self.now, self.sleep, between_seconds=1.0)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def failed(happened: str) -> DemoFailed:
    return DemoFailed(happened, "step 3", "build/x.log")


def wait(clock: Clock, signs: Iterator[object], done_at: float) -> float:
    return wait_while_moving(
        "step 9",
        lambda: clock.now if clock.now >= done_at else None,
        lambda: next(signs),
        failed,
        pause=clock.pause(),
        stall_seconds=STALL,
    )


@pytest.mark.fault("A machine is slow")
def test_a_slow_machine_is_waited_for() -> None:
    """The wait may take hours, as long as a step follows from time to time."""
    clock = Clock()
    assert wait(clock, (int(clock.now // 50) for _ in iter(int, 1)), 10_000.0) == 10_000.0


@pytest.mark.fault("The demo stands still, or restarts for ever")
@pytest.mark.parametrize(
    "sign",
    [
        pytest.param(lambda now: 0, id="nothing moves"),
        pytest.param(lambda now: int(now) % 3, id="it goes in circles"),
    ],
)
def test_a_stall_ends_the_wait_with_three_lines(sign: object) -> None:
    clock = Clock()
    with pytest.raises(DemoFailed) as stalled:
        wait(clock, (sign(clock.now) for _ in iter(int, 1)), 10_000.0)  # type: ignore[operator]
    assert str(stalled.value).splitlines() == [
        "It waited for step 9, and there was no progress for 60 s.",
        "Seen: step 3",
        "Logs: build/x.log",
    ]
    assert clock.now <= 2 * STALL


ACT = Act("all copies removed", "every pod with memory and node tier", "object")
ACT.step_before = 12345
ACT.recovery = Recovery(
    12340,
    "object x3, peer x1",
    {
        "detect": 0.14,
        "back off": 0.0,
        "seal": 0.14,
        "schedule": 120.26,
        "rehydrate": 3.333,
        "rendezvous": 1.04,
        "first step": 0.09,
    },
    125.003,
)


@pytest.mark.fault("A terminal has 80 columns")
def test_the_table_fits_a_narrow_terminal_and_adds_up() -> None:
    assert len(act_line(ACT)) <= 80
    assert all(len(line) <= 76 for line in phases_lines(ACT))
    assert ACT.phases() == {
        "detect": 0.1,
        "seal": 0.2,
        "schedule": 120.2,
        "rehydrate": 3.4,
        "rendezvous": 1.0,
        "first step": 0.1,
    }
    assert round(sum(ACT.phases().values()), 1) == round(ACT.recovery.total_seconds, 1)  # type: ignore[union-attr]


def test_the_table_names_the_step_that_was_reached_and_not_the_one_that_was_seen() -> None:
    act = Act("a rank", "its process", "memory")
    act.step_before = 87
    act.recovery = Recovery(90, "", {}, 1.0, 4)
    assert "step 94 -> 90" in act_line(act)


def test_phases_add_up_to_a_total_that_lies_between_two_tenths() -> None:
    seconds = [2.446, 1.816, 1.048, 0.794, 2.124, 2.622]
    act = Act("a node", "one pod", "peer")
    act.recovery = Recovery(10, "", {f"phase {n}": each for n, each in enumerate(seconds)}, 10.85)
    total = sum(act.phases().values())
    assert f"{total:.1f}" == f"{act.recovery.total_seconds:.1f}"


def test_a_line_of_the_log_fits_a_narrow_terminal() -> None:
    sample = Sample(0.0, "Restarting", 12, 12345, 1.0, 12340, 12300)
    assert len(status_line(sample, 20000)) <= 80


def test_a_line_of_the_log_has_a_dash_before_the_first_checkpoint() -> None:
    sample = Sample(0.0, "Running", 0, None, None, None, None)
    assert status_line(sample, 160) == "  Running    round 0  step -/160  committed -  persisted -"


def test_a_job_that_restarts_for_ever_stands_still() -> None:
    """The number of its rounds grows, but nothing else changes."""
    first = Sample(1.0, "Restarting", 1, 10, None, 10, None, pods=("Running",))
    later = Sample(2.0, "Restarting", 2, 10, None, 10, None, pods=("Running",))
    assert first.sign == later.sign
