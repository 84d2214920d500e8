"""The limit of background transfers depends on the durations of the trainer's steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast_core.ids import Rank, RestartRound, Step
from holdfast_core.pacing import (
    LEAST_BYTES_PER_SECOND,
    BackgroundLimit,
    bytes_each_step,
)
from holdfast_core.shm.slot_file import HEADER_BYTES, SlotHeader, SlotState, slot_name

MIB = 1 << 20


class Trainer:
    """A trainer with steps of one second, or 1.1 seconds while bytes are moved.

    A sleep takes no time unless a test sets `sleep`: transfers ignore the limit.
    """

    def __init__(self, slots_dir: Path) -> None:
        self.now = 0.0
        self.step = 0
        self.blocked = 0.0
        self.sleep: Callable[[float], None] = lambda seconds: None
        self.waited_for_copies: list[float] = []
        self.background = BackgroundLimit(
            slots_dir,
            lambda: self.now,
            lambda seconds: self.sleep(seconds),
            self.waited_for_copies.append,
        )

    def steps(
        self, count: int, *, moving: int = 0, blocked: float = 0.0, slower: float = 0.1
    ) -> None:
        for _ in range(count):
            self.background.take(moving)
            self.now += 1.0 + blocked + (slower if moving else 0.0)
            self.step += 1
            self.blocked += blocked
            self.background.step_done(self.step, self.blocked)


def test_slower_steps_set_a_limit_and_undisturbed_ones_remove_it(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.background.begin()
    trainer.steps(10)
    assert trainer.background.limit is None
    trainer.steps(10, moving=1000 * MIB)
    found = trainer.background.limit
    assert LEAST_BYTES_PER_SECOND <= found < 1000 * MIB
    trainer.steps(100, moving=10 * MIB, slower=0.0)
    assert trainer.background.limit is None


def test_the_time_for_which_saves_blocked_does_not_count_as_slower(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.background.begin()
    trainer.steps(10)
    trainer.steps(50, moving=1000 * MIB, blocked=0.5, slower=0.0)
    assert trainer.background.limit is None


def test_checkpoints_are_never_late_for_the_next_one(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.background.begin()
    trainer.background.expect(500.0 * MIB)
    trainer.steps(10)
    trainer.steps(200, moving=1000 * MIB)
    found = trainer.background.limit
    assert found >= 500 * MIB


def test_hurry_removes_the_limit_until_the_next_round(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.background.begin()
    trainer.steps(10)
    trainer.steps(10, moving=1000 * MIB)
    limited = trainer.background.limit
    assert limited is not None
    trainer.background.remove_limit()
    assert trainer.background.limit is None
    trainer.background.begin()
    assert trainer.background.limit == limited


def test_the_first_step_of_a_round_is_compared_with_nothing(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.background.begin()
    trainer.steps(10)
    trainer.now += 3600  # the gang was down
    trainer.background.begin()
    trainer.steps(40, moving=10 * MIB, slower=0.0)
    assert trainer.background.limit is None


def test_a_transfer_waits_for_a_copy_unless_it_is_urgent(tmp_path: Path) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    begin_copy(tmp_path, 1)

    waited_for_copies: list[float] = []
    background = BackgroundLimit(tmp_path, lambda: now[0], sleep, waited_for_copies.append)
    background.begin()
    background.remove_limit()
    background.take(MIB)
    assert waited_for_copies == []
    background.begin()
    background.take(MIB)
    assert len(waited_for_copies) == 1
    assert waited_for_copies[0] > 0
    background.take(MIB)  # it has waited the maximum for this copy before
    assert len(waited_for_copies) == 1


def test_a_copy_that_begins_while_the_limit_holds_is_not_overlooked(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.background.begin()
    trainer.steps(10)
    trainer.steps(10, moving=1000 * MIB)
    assert trainer.background.limit is not None

    def sleep(seconds: float) -> None:
        trainer.now += seconds
        begin_copy(tmp_path, 1)

    trainer.sleep = sleep
    trainer.background.take(1000 * MIB)
    assert len(trainer.waited_for_copies) == 1


def begin_copy(slots_dir: Path, step: int) -> None:
    header = SlotHeader(SlotState.FILLING, Rank(0), 0, RestartRound(0), Step(step))
    (slots_dir / slot_name(Rank(0), 0)).write_bytes(header.pack().ljust(HEADER_BYTES, b"\0"))


def test_the_bytes_of_a_step_count_the_node_the_copies_and_the_uploads() -> None:
    assert bytes_each_step(1000, 10, 1, None) == 200.0
    assert bytes_each_step(1000, 10, 1, 100) == 210.0
    assert bytes_each_step(1000, 10, 0, None) == 100.0
    assert bytes_each_step(1000, 0, 1, None) == 0.0


@pytest.mark.fault("A step is reported twice")
def test_a_step_that_is_reported_again_counts_once(tmp_path: Path) -> None:
    """A save after the step takes time, and a second message about the same step includes it."""
    trainer = Trainer(tmp_path)
    trainer.background.begin()
    for _ in range(60):
        trainer.steps(1, moving=1000 * MIB, slower=0.0)
        trainer.now += 0.5
        trainer.blocked += 0.5
        trainer.background.step_done(trainer.step, trainer.blocked)
    assert trainer.background.limit is None
