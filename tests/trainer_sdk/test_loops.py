"""Several calls in one process: rolling back, continuing, and every way to leave a loop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.crash.failpoints import in_every_python
from tests.support.trainer.launched import committed_step

import holdfast
from holdfast_core.errors import ConfigError, CorruptionError


class Training:
    """A model whose weight counts its optimizer steps."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optimizer}

    def step(self) -> None:
        self.model.weight.grad = torch.full((1, 1), -1.0)
        self.optimizer.step()

    @property
    def done(self) -> int:
        return int(self.model.weight.item())


def restored(directory: Path) -> tuple[int | None, int]:
    training = Training()
    with holdfast.Checkpointer(dir=directory) as ckpt:
        return ckpt.restore(training.state), training.done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


# ------------------------------------------------------------------------------- rolling back


def test_restore_sees_the_saves_of_this_process(folder: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(dir=folder, when_busy="wait") as ckpt:
        assert ckpt.restore(training.state) is None
        for step in (1, 2, 3):
            training.step()
            ckpt.save(step, training.state)
        training.step()
        assert ckpt.restore(training.state) == 3
        assert training.done == 3
    assert restored(folder) == (3, 3)


def test_saves_after_a_roll_back_replace_later_steps(folder: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(dir=folder, keep_last=9) as ckpt:
        for step in (1, 2, 3, 4):
            training.step()
            ckpt.save(step, training.state).wait(timeout=60)
        assert ckpt.restore(training.state, step=2) == 2
        assert training.done == 2
        with torch.no_grad():
            training.model.weight += 10  # a different history
        ckpt.save(3, training.state).wait(timeout=60)
        assert ckpt.restore(training.state) == 3
        assert training.done == 12
    assert restored(folder) == (3, 12)


def test_a_script_can_roll_back_repeatedly(folder: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(dir=folder) as ckpt:
        for lap in range(3):
            training.step()
            ckpt.save(lap + 1, training.state)
            training.step()
            assert ckpt.restore(training.state) == lap + 1
            assert training.done == lap + 1


def test_a_restore_of_an_absent_step_is_refused(folder: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(dir=folder) as ckpt:
        ckpt.save(1, training.state).wait(timeout=60)
        with pytest.raises(ConfigError, match=r"step=7\): .* has steps 1"):
            ckpt.restore(training.state, step=7)
        ckpt.save(2, training.state).wait(timeout=60)
    assert restored(folder)[0] == 2


def test_a_step_that_cannot_be_read_is_not_replaced_by_another(folder: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(dir=folder, keep_last=9) as ckpt:
        for step in (1, 2, 3):
            training.step()
            ckpt.save(step, training.state).wait(timeout=60)
        (shard,) = folder.rglob("s000000000002/*/*.shard")
        data = bytearray(shard.read_bytes())
        data[-100:] = bytes(100)
        shard.write_bytes(data)
        with pytest.raises(CorruptionError, match=r"restore\(step=2\): no copy"):
            ckpt.restore(training.state, step=2)
        assert ckpt.restore(training.state) == 3
        assert training.done == 3


def test_a_save_before_the_first_restore_does_not_count_as_trained(folder: Path) -> None:
    """A script that saves step 0 at each start must continue where the last run ended."""
    for total, expected in ((3, [0, 1, 2]), (5, [3, 4])):
        training = Training()
        with holdfast.Checkpointer(dir=folder, interval_steps=1, when_busy="wait") as ckpt:
            ckpt.save(0, training.state)
            assert list(lap(ckpt, training, total)) == expected
        assert training.done == total
    assert restored(folder) == (5, 5)


def test_an_older_step_of_an_earlier_run_can_be_restored(folder: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(dir=folder, interval_steps=1, when_busy="wait") as ckpt:
        for _ in ckpt.steps(3, training.state):
            training.step()
    with holdfast.Checkpointer(dir=folder) as ckpt:
        assert ckpt.restore(training.state, step=2) == 2
        assert training.done == 2


def test_a_script_can_roll_back_after_a_loss_spike(folder: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(dir=folder, interval_steps=2, when_busy="wait") as ckpt:
        for index in ckpt.steps(9, training.state):
            training.step()
            if index == 4:
                break  # the loss spiked at a step that is not worth a checkpoint
        assert ckpt.restore(training.state) == 4
        assert training.done == 4
        assert list(lap(ckpt, training, 9)) == [4, 5, 6, 7, 8]
    assert restored(folder) == (9, 9)


def lap(ckpt: holdfast.Checkpointer, training: Training, total: int) -> Iterator[int]:
    for index in ckpt.steps(total, training.state):
        training.step()
        yield index


def test_a_loop_ends_when_a_restore_inside_of_it_changes_the_step(folder: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(dir=folder, interval_steps=2, when_busy="wait") as ckpt:
        with pytest.raises(ConfigError, match="call steps again"):
            for index in ckpt.steps(9, training.state):
                training.step()
                if index == 4:
                    assert ckpt.restore(training.state) == 4
        assert list(lap(ckpt, training, 9)) == [4, 5, 6, 7, 8]
    assert restored(folder) == (9, 9)


def test_a_second_loop_ends_the_first(folder: Path) -> None:
    """The generator of the first loop is referenced, so Python has not closed it."""
    training = Training()
    with holdfast.Checkpointer(dir=folder, interval_steps=100) as ckpt:
        first = ckpt.steps(9, training.state)
        for _ in range(3):
            next(first)
            training.step()
        assert list(lap(ckpt, training, 5)) == [3, 4]
        with pytest.raises(ConfigError, match="another loop began"):
            next(first)
    assert restored(folder) == (5, 5)


def test_ranks_roll_back_together(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch, holdfast\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "t = torch.zeros(4)\n"
        "with holdfast.Checkpointer(dir=sys.argv[1], interval_steps=2, when_busy='wait') as ckpt:\n"
        "    for index in ckpt.steps(5, {'t': t}):\n"
        "        t += 1\n"
        "        dist.barrier()\n"
        "    assert ckpt.restore({'t': t}, step=4) == 4 and t[0] == 4, t\n"
        "    for index in ckpt.steps(8, {'t': t}):\n"
        "        t += 1\n"
        "        dist.barrier()\n"
        "    assert t[0] == 8, t\n"
        "    assert ckpt.restore({'t': t}) == 8\n"
        "    try:\n"
        "        ckpt.restore({'t': t}, step=77)\n"
        "    except holdfast.ConfigError as error:\n"
        "        assert 'step=77' in str(error), error\n"
        "    else:\n"
        "        raise AssertionError('it was found')\n"
        "    ckpt.save(9, {'t': t}).wait(timeout=60)\n"
    )
    text = [sys.executable, "-m", "holdfast.run", "--nproc", "2", "--", "python", str(program)]
    done = subprocess.run(
        [*text, str(tmp_path / "ckpt")], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert committed_step(tmp_path / "ckpt") == 9


def test_a_skipped_save_is_made_after_a_roll_back(tmp_path: Path) -> None:
    """All ranks leave step 4 out because their one slot is still being written. They do step 4 again after
    a roll back, when the slot is free."""
    written = tmp_path / "written"
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, sys, torch, holdfast\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "t = torch.zeros(4)\n"
        "with holdfast.Checkpointer(dir=sys.argv[1], interval_steps=2, slots=1) as ckpt:\n"
        "    def saved(*steps):\n"
        "        for step in steps:\n"
        "            t.add_(1)\n"
        "            dist.barrier()\n"
        "            if ckpt.should_save(step):\n"
        "                ckpt.save(step, {'t': t})\n"
        "                yield step\n"
        "    assert ckpt.restore({'t': t}) is None\n"
        "    assert list(saved(1, 2, 3, 4)) == [2]\n"
        "    dist.barrier()\n"
        "    pathlib.Path(sys.argv[2]).touch()\n"
        "    assert ckpt.restore({'t': t}) == 2\n"
        "    assert list(saved(3, 4)) == [4]\n"
    )
    text = [sys.executable, "-m", "holdfast.run", "--nproc", "2", "--", "python", str(program)]
    done = subprocess.run(
        [*text, str(tmp_path / "ckpt"), str(written)],
        env={
            **os.environ,
            **in_every_python(tmp_path, f"directory.write_shard=wait:{written}"),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert committed_step(tmp_path / "ckpt") == 4


# ------------------------------------------------------------------------------- continuing


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
        ckpt.save(1, first.state).wait(timeout=60)
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


# ------------------------------------------------------------------------------- leaving early


def test_a_break_after_a_step_saves_that_step(folder: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(dir=folder, interval_steps=100) as ckpt:
        for index in ckpt.steps(9, training.state):
            training.step()
            if index == 3:
                break
    assert restored(folder) == (4, 4)


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
        ckpt.save(4, training.state).wait(timeout=60)
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


def test_a_second_ctrl_c_in_a_save_does_not_wait(folder: Path) -> None:
    with holdfast.Checkpointer(dir=folder) as ckpt:
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(1, {"part": Interrupted(2)})
        for step in (2, 3, 4):  # more saves than slots
            ckpt.save(step, {"part": Interrupted(0)}).wait(timeout=60)
    assert ckpt.last_committed_step == 4
    assert committed_step(folder) == 4


# ------------------------------------------------------------------------------- numbers of steps


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(np.int64(5), id="numpy"),
        pytest.param(torch.tensor(5), id="tensor"),
        pytest.param(np.array(5), id="array"),
        pytest.param(np.uint8(5), id="uint8"),
    ],
)
def test_an_integer_of_every_kind_is_a_step(folder: Path, step: Any) -> None:
    with holdfast.Checkpointer(dir=folder, interval_steps=5) as ckpt:
        assert ckpt.should_save(step)
        handle = ckpt.save(step, {"t": torch.ones(4)})
        handle.wait(timeout=60)
        assert type(handle.step) is int
    assert committed_step(folder) == 5


@pytest.mark.parametrize(
    "step", [-1, 2.0, 10**13, "5", None, True, torch.tensor(2.0), np.float32(1), torch.ones(2)]
)
def test_a_value_that_is_not_a_step_takes_no_slot(folder: Path, step: Any) -> None:
    with holdfast.Checkpointer(dir=folder, slots=2) as ckpt:
        for _ in range(3):
            with pytest.raises(ConfigError, match=r"save\(step\): expected"):
                ckpt.save(step, {"t": torch.ones(4)})
        with pytest.raises(ConfigError, match=r"should_save\(step\): expected"):
            ckpt.should_save(step)
        with pytest.raises(ConfigError, match=r"steps\(total=\.\.\.\): expected"):
            next(ckpt.steps(step, {"t": torch.ones(4)}))
        assert ckpt.saves_failed == 0
        ckpt.save(1, {"t": torch.ones(4)}).wait(timeout=60)


# ------------------------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_last": "3"},
        {"keep_last": None},
        {"slots": 2.0},
        {"interval_steps": 2.5},
        {"interval_steps": "10"},
        {"interval_steps": True},
        {"on_save_error": "ignore"},
        {"when_busy": "never"},
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_by_its_name(folder: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}=.*expected"):
        holdfast.Checkpointer(dir=folder, **wrong)
    assert not folder.exists()


def test_a_model_in_the_place_of_the_state_is_refused(folder: Path) -> None:
    model: Any = torch.nn.Linear(1, 1)
    with holdfast.Checkpointer(dir=folder) as ckpt:
        for call in (
            lambda: list(ckpt.steps(3, model)),
            lambda: ckpt.restore(model),
            lambda: ckpt.save(1, model),
            lambda: ckpt.allocate(model),
        ):
            with pytest.raises(ConfigError, match=r"as a dict of names .* found Linear"):
                call()
    assert committed_step(folder) == 0
