"""Rolling back: to saves of this process, of an earlier run, and by all ranks together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.crash.failpoints import in_every_python
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.counted import Training, lap, restored
from tests.support.trainer.launched import committed_step, run_two_ranks

import holdfast
from holdfast.base.settings import RankSettings
from holdfast.places.folder_start import FolderStart
from holdfast_core.errors import ConfigError, CorruptionError, NotFoundError
from holdfast_core.ids import RestartRound, Step
from holdfast_core.messages.schema import RestorePoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


def save_steps(ckpt: holdfast.Checkpointer, training: Training, last: int) -> None:
    """Train and save steps 1 to `last`, each of which is durable before the next one begins."""
    for step in range(1, last + 1):
        training.step()
        ckpt.save(step, training.state).wait(timeout=HANG_SECONDS)


def damage_step_2(folder: Path) -> None:
    """Damage the payload of one shard of step 2."""
    shard = min(folder.rglob("s000000000002-*/*.shard"))
    data = bytearray(shard.read_bytes())
    data[-100:] = bytes(100)
    shard.write_bytes(data)


@pytest.mark.fault("A process rolls back to its own save")
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


@pytest.mark.fault("A process rolls back to an older step and trains on")
def test_saves_after_a_roll_back_replace_later_steps(folder: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(holdfast.Folder(folder, keep_last=9)) as ckpt:
        save_steps(ckpt, training, 4)
        assert ckpt.restore(training.state, step=2) == 2
        assert training.done == 2
        with torch.no_grad():
            training.model.weight += 10  # a different history
        ckpt.save(3, training.state).wait(timeout=HANG_SECONDS)
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
        ckpt.save(1, training.state).wait(timeout=HANG_SECONDS)
        with pytest.raises(ConfigError, match=r"step=7\): .* has steps 1"):
            ckpt.restore(training.state, step=7)
        ckpt.save(2, training.state).wait(timeout=HANG_SECONDS)
    assert restored(folder)[0] == 2


@pytest.mark.fault("A step that was asked for has no readable copy")
def test_a_step_that_cannot_be_read_is_not_replaced_by_another(folder: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(holdfast.Folder(folder, keep_last=9)) as ckpt:
        save_steps(ckpt, training, 3)
        damage_step_2(folder)
        with pytest.raises(CorruptionError, match=r"restore\(step=2\): no copy"):
            ckpt.restore(training.state, step=2)
        assert ckpt.restore(training.state) == 3
        assert training.done == 3


@pytest.mark.fault(
    "A step that was asked for is known to have no readable copy, and the script goes on"
)
@pytest.mark.parametrize("saves", [False, True], ids=["restores", "saves and restores"])
def test_a_script_goes_on_after_the_error_about_a_damaged_step(folder: Path, saves: bool) -> None:
    """The first error comes from the shard, and the second from the choice of the checkpoint."""
    training = Training()
    with holdfast.Checkpointer(holdfast.Folder(folder, keep_last=9)) as ckpt:
        save_steps(ckpt, training, 3)
    damage_step_2(folder)
    with holdfast.Checkpointer(holdfast.Folder(folder, keep_last=9)) as ckpt:
        for _ in range(2):
            with pytest.raises(CorruptionError, match=r"restore\(step=2\): no copy"):
                ckpt.restore(training.state, step=2)
        if saves:
            training.step()
            ckpt.save(4, training.state).wait(timeout=HANG_SECONDS)
        assert ckpt.restore(training.state) == (4 if saves else 3)
        assert training.done == (4 if saves else 3)


@pytest.mark.fault("The step of a rollback is pruned meanwhile")
@pytest.mark.parametrize("is_chosen", [False, True], ids=["before the choice", "after the choice"])
def test_the_error_of_a_step_that_is_pruned_after_it_was_looked_up_names_the_pruning(
    folder: Path, is_chosen: bool
) -> None:
    """Another run may prune it meanwhile. The script must not start from step 0."""
    state = Training().state
    with holdfast.Checkpointer(holdfast.Folder(folder, keep_last=2)) as ckpt:
        ckpt.save(1, state).wait(timeout=HANG_SECONDS)
        start = FolderStart(folder, RankSettings(), keep_last=2)
        start.roll_back(None, Step(1))
        for step in (2, 3):
            ckpt.save(step, state).wait(timeout=HANG_SECONDS)
    chosen = RestorePoint(1, 0) if is_chosen else RestorePoint()
    start.agree(None, lambda round_: None, lambda: (RestartRound(1), chosen, None))
    error = NotFoundError("checkpoint s1-r0: no manifest") if is_chosen else None
    with pytest.raises(CorruptionError, match=r"restore\(step=1\): .*pruned.*") as raised:
        start.after_fetch(None, None, error)
    assert "keep_last=2" in str(raised.value)
    assert "steps 2, 3" in str(raised.value)


def test_the_error_of_a_step_that_was_never_there_names_what_is_kept(folder: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(holdfast.Folder(folder, keep_last=2)) as ckpt:
        save_steps(ckpt, training, 3)
    with holdfast.Checkpointer(holdfast.Folder(folder, keep_last=2)) as ckpt:
        with pytest.raises(ConfigError, match=r"step=1\): .* has steps 2, 3.*keep_last=2"):
            ckpt.restore(training.state, step=1)


@pytest.mark.fault("A script saves step 0 before it restores")
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


@pytest.mark.fault("A loop is left after a loss spike and rolled back")
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


@pytest.mark.fault("A loop's body restores and goes on")
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


@pytest.mark.fault("A second loop begins while the first is open")
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


@pytest.mark.fault("Ranks roll back together")
def test_ranks_roll_back_together(tmp_path: Path) -> None:
    program = (
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
        "    ckpt.save(9, {'t': t}).wait()\n"
    )
    run_two_ranks(program, tmp_path)
    assert committed_step(tmp_path / "ckpt") == 9


@pytest.mark.fault("Two ranks go on after the error about a damaged step")
def test_ranks_go_on_together_after_the_error_about_a_damaged_step(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    program = (
        "import sys, torch, holdfast\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "t = torch.full((4,), 3.0)\n"
        "with holdfast.Checkpointer(holdfast.Folder(sys.argv[1], keep_last=9)) as ckpt:\n"
        "    for _ in range(2):\n"
        "        try:\n"
        "            ckpt.restore({'t': t}, step=2)\n"
        "        except holdfast.CorruptionError as error:\n"
        "            assert str(error).startswith('Checkpointer.restore(step=2): no copy'), error\n"
        "        else:\n"
        "            raise AssertionError('it was restored')\n"
        "    ckpt.save(4, {'t': t + 1}).wait()\n"
        "    assert ckpt.restore({'t': t}) == 4 and t[0] == 4, t\n"
    )
    saves = (
        "import sys, torch, holdfast\n"
        "with holdfast.Checkpointer(holdfast.Folder(sys.argv[1], keep_last=9)) as ckpt:\n"
        "    for step in (1, 2, 3):\n"
        "        ckpt.save(step, {'t': torch.full((4,), float(step))}).wait()\n"
    )
    run_two_ranks(saves, tmp_path)
    damage_step_2(folder)
    run_two_ranks(program, tmp_path)
    assert committed_step(folder) == 4


@pytest.mark.fault("A save that was left out is made after a roll back")
def test_a_skipped_save_is_made_after_a_roll_back(tmp_path: Path) -> None:
    """All ranks leave step 4 out because their one slot is still being written. They do step 4 again after
    a roll back, when the slot is free."""
    written = tmp_path / "written"
    program = (
        "import pathlib, sys, torch, holdfast\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "t = torch.zeros(4)\n"
        "with holdfast.Checkpointer(holdfast.Folder(sys.argv[1], slots=1), interval_steps=2) as ckpt:\n"
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
    waits = in_every_python(tmp_path, f"directory.write_shard=wait:{written}")
    run_two_ranks(program, tmp_path, str(written), environment=waits)
    assert committed_step(tmp_path / "ckpt") == 4
