"""Several loops in one process: how they continue, and every way to leave one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.counted import Training, lap, restored

import holdfast


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


@pytest.mark.fault("A script begins a second loop in one process")
def test_a_second_loop_continues_where_the_first_ended(folder: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(dir=folder, interval_steps=2, when_busy="wait") as ckpt:
        assert list(lap(ckpt, training, 3)) == [0, 1, 2]
        with torch.no_grad():
            training.model.weight += (
                10  # a restore would undo the changes that the script made between the loops
            )
        assert list(lap(ckpt, training, 3)) == []
        assert list(lap(ckpt, training, 7)) == [3, 4, 5, 6]
        assert ckpt.saves_failed == 0
    assert restored(folder) == (7, 17)


def test_a_loop_continues_after_steps_by_hand(folder: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(dir=folder, interval_steps=2, when_busy="wait") as ckpt:
        for step in (1, 2, 3):
            training.step()
            if ckpt.should_save(step):
                ckpt.save(step, training.state)
        assert list(lap(ckpt, training, 5)) == [3, 4]
        assert list(lap(ckpt, training, 6)) == [5]
        assert ckpt.saves_failed == 0
    assert restored(folder) == (6, 6)


def test_a_loop_after_steps_by_hand_restores_an_existing_checkpoint(folder: Path) -> None:
    """The second run of the script repeats its own steps before it restores."""
    for total, expected in ((5, [3, 4]), (7, [5, 6])):
        training = Training()
        with holdfast.Checkpointer(dir=folder, interval_steps=2, when_busy="wait") as ckpt:
            for step in (1, 2, 3):
                training.step()
                ckpt.should_save(step)
            assert list(lap(ckpt, training, total)) == expected
        assert restored(folder) == (total, total)


def test_a_loop_does_not_continue_steps_by_hand_on_another_model(folder: Path) -> None:
    first, second = Training(), Training()
    with holdfast.Checkpointer(dir=folder, interval_steps=100) as ckpt:
        first.step()
        ckpt.save(1, first.state).wait(timeout=HANG_SECONDS)
        assert next(ckpt.steps(5, second.state)) == 0


def test_a_loop_over_another_model_restores(folder: Path) -> None:
    first, second = Training(), Training()
    with holdfast.Checkpointer(dir=folder, interval_steps=2, when_busy="wait") as ckpt:
        assert list(lap(ckpt, first, 3)) == [0, 1, 2]
        assert list(lap(ckpt, second, 5)) == [3, 4]
        assert second.done == 5


def test_a_loop_after_a_restore_restores_the_generators_again(folder: Path) -> None:
    training = Training()
    torch.manual_seed(1)
    with holdfast.Checkpointer(dir=folder, interval_steps=1, when_busy="wait") as ckpt:
        state = {**training.state, "rng": holdfast.RNG()}
        for _ in ckpt.steps(2, state):
            training.step()
    expected = torch.rand(1)
    with holdfast.Checkpointer(dir=folder) as ckpt:
        assert ckpt.restore(state) == 2
        torch.rand(5)  # the script builds something
        for _ in ckpt.steps(3, state):
            assert torch.equal(torch.rand(1), expected)


@pytest.mark.fault("A loop is left by break before or after its step")
def test_a_break_before_a_step_saves_the_step_before(folder: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(dir=folder, interval_steps=100) as ckpt:
        for index in ckpt.steps(9, training.state):
            if index == 3:
                break
            training.step()
    assert restored(folder) == (3, 3)


def test_a_loader_that_ends_first_ends_with_a_save(folder: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(dir=folder, interval_steps=100) as ckpt:
        for _ in zip(ckpt.steps(9, training.state), range(3), strict=False):
            training.step()
    assert restored(folder) == (3, 3)


def test_a_return_from_a_referenced_loop_saves_at_close(folder: Path) -> None:
    training = Training()

    def train(ckpt: holdfast.Checkpointer) -> Any:
        loop = ckpt.steps(9, training.state)
        for index in loop:
            training.step()
            if index == 3:
                return loop

    with holdfast.Checkpointer(dir=folder, interval_steps=100) as ckpt:
        loop = train(ckpt)
    assert restored(folder) == (4, 4)
    loop.close()


def test_the_save_at_a_break_has_the_state_of_that_moment(folder: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(dir=folder, interval_steps=100) as ckpt:
        for index in ckpt.steps(9, training.state):
            training.step()
            if index == 3:
                break
        with torch.no_grad():
            training.model.weight += 100  # for example averages for an evaluation
    assert restored(folder) == (4, 4)


def test_a_save_by_the_script_replaces_the_loops_save_of_the_same_step(folder: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(dir=folder, interval_steps=100) as ckpt:
        for index in ckpt.steps(9, training.state):
            training.step()
            if index == 3:
                break
        with torch.no_grad():
            training.model.weight += 100
        ckpt.save(4, training.state).wait(timeout=HANG_SECONDS)
        assert ckpt.saves_failed == 0
    assert restored(folder) == (4, 104)


def test_a_loop_after_a_break_continues(folder: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(dir=folder, interval_steps=100) as ckpt:
        for index in ckpt.steps(9, training.state):
            training.step()
            if index == 3:
                break
        assert list(lap(ckpt, training, 6)) == [4, 5]
    assert restored(folder) == (6, 6)


@pytest.mark.fault("A loop is left by an exception")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_saves_nothing_of_the_step_it_left(
    folder: Path, error: type[BaseException]
) -> None:
    training = Training()
    arguments = [1] if error is SystemExit else []
    ckpt = holdfast.Checkpointer(dir=folder, interval_steps=2, when_busy="wait")
    with pytest.raises(error), ckpt:
        for index in ckpt.steps(9, training.state):
            training.step()
            if index == 2:
                raise error(*arguments)
    assert restored(folder) == (2, 2)


def test_a_clean_exit_inside_of_the_loop_saves(folder: Path) -> None:
    training = Training()
    ckpt = holdfast.Checkpointer(dir=folder, interval_steps=100)
    with pytest.raises(SystemExit), ckpt:
        for index in ckpt.steps(9, training.state):
            training.step()
            if index == 2:
                sys.exit()
    assert restored(folder) == (3, 3)
