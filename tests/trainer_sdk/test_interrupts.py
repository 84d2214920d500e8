"""Ctrl-C inside and outside of a loop, and in the middle of a save."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.counted import Training, lap, restored
from tests.support.trainer.launched import committed_step

import holdfast


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


@pytest.mark.fault("A user presses Ctrl-C in a loop")
def test_ctrl_c_saves_after_the_step_that_runs(folder: Path) -> None:
    training = Training()
    ckpt = holdfast.Checkpointer(dir=folder, interval_steps=100)
    with pytest.raises(KeyboardInterrupt), ckpt:
        for index in ckpt.steps(9, training.state):
            if index == 2:
                os.kill(os.getpid(), signal.SIGINT)
            training.step()
    assert training.done == 3
    assert restored(folder) == (3, 3)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.fault("A user presses Ctrl-C, and the same process calls steps() again")
def test_the_same_process_may_continue_after_ctrl_c(folder: Path) -> None:
    """In a notebook, the next cell may run the loop again."""
    training = Training()
    ckpt = holdfast.Checkpointer(dir=folder, interval_steps=100)
    with pytest.raises(KeyboardInterrupt):
        for index in ckpt.steps(6, training.state):
            if index == 2:
                os.kill(os.getpid(), signal.SIGINT)
            training.step()
    assert not ckpt.stopping
    assert list(lap(ckpt, training, 6)) == [3, 4, 5]
    ckpt.close()
    assert restored(folder) == (6, 6)


def test_a_second_ctrl_c_does_not_wait(folder: Path) -> None:
    training = Training()
    ckpt = holdfast.Checkpointer(dir=folder, interval_steps=2, when_busy="wait")
    with pytest.raises(KeyboardInterrupt), ckpt:
        for index in ckpt.steps(9, training.state):
            training.step()
            if index == 2:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
                pytest.fail("it went on")
    assert restored(folder) == (2, 2)


def test_python_handles_ctrl_c_outside_of_a_loop(folder: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(dir=folder, interval_steps=100) as ckpt:
        list(lap(ckpt, training, 2))
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


class Interrupted:
    """A state that raises KeyboardInterrupt while it is saved."""

    def __init__(self, times: int) -> None:
        self.times = times

    def state_dict(self) -> dict[str, int]:
        for _ in range(self.times):
            os.kill(os.getpid(), signal.SIGINT)
        return {"value": 7}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"value": 7}


@pytest.mark.fault("A user presses Ctrl-C in the middle of a save")
def test_ctrl_c_in_a_save_is_raised_when_the_save_is_handed_over(folder: Path) -> None:
    """An interrupt in the middle of a save could leave a lock held or a slot full, so no later save would
    become durable."""
    with holdfast.Checkpointer(dir=folder) as ckpt:
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(1, {"part": Interrupted(1)})
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert ckpt.last_committed_step == 1
    with holdfast.Checkpointer(dir=folder) as ckpt:
        assert ckpt.restore({"part": Interrupted(0)}) == 1


@pytest.mark.fault("A user presses Ctrl-C twice in the middle of a save")
def test_a_second_ctrl_c_in_a_save_does_not_wait(folder: Path) -> None:
    with holdfast.Checkpointer(dir=folder) as ckpt:
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(1, {"part": Interrupted(2)})
        for step in (2, 3, 4):  # more saves than slots
            ckpt.save(step, {"part": Interrupted(0)}).wait(timeout=HANG_SECONDS)
    assert ckpt.last_committed_step == 4
    assert committed_step(folder) == 4
