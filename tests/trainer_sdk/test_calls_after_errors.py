"""A script catches an error of a restore and goes on in the same process."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.launched import committed_step, persisters_of, run_two_ranks, until

import holdfast
from holdfast.connection.session import Session
from holdfast.places.folder import PersisterProcess
from holdfast.places.place import Place, wait_connected
from holdfast_core.errors import ConfigError, CorruptionError, UnavailableError
from holdfast_core.ids import RestartRound

State = dict[str, torch.Tensor]


def state_of(step: int) -> State:
    return {"t": torch.full((2000,), float(step))}


def save(ckpt: holdfast.Checkpointer, *steps: int) -> None:
    for step in steps:
        ckpt.save(step, state_of(step)).wait(timeout=HANG_SECONDS)


def damage(folder: Path, step: int) -> None:
    (shard,) = folder.rglob(f"s{step:012d}-*/*.shard")
    shard.write_bytes(shard.read_bytes()[:-100])


def kill_persister(folder: Path) -> None:
    (pid,) = persisters_of(os.getpid(), folder)
    os.kill(pid, 9)


@contextmanager
def no_process_can_start(folder: Path) -> Iterator[None]:
    """Kill the process that writes to the folder, and let no other start."""

    def refused(*_: object) -> NoReturn:
        raise OSError(errno.ENOMEM, "cannot allocate memory")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PersisterProcess, "start", refused)
        patched.setattr("holdfast.places.folder._STARTING_SECONDS", 0.0)
        kill_persister(folder)
        yield


CALLS: dict[str, Callable[[holdfast.Checkpointer], int | None]] = {
    "restore": lambda ckpt: ckpt.restore(state_of(0)),
    "restore_tensors": lambda ckpt: _step(ckpt.restore_tensors(state_of(0))),
    "peek": lambda ckpt: _step(ckpt.peek()),
}


def _step(found: holdfast.RestorePoint | None) -> int | None:
    return None if found is None else found.step


@pytest.mark.fault("A restore finds no process that writes to the folder, and the script goes on")
@pytest.mark.parametrize("rolls_back", [False, True], ids=["first", "rolls back"])
@pytest.mark.parametrize("failing", CALLS)
def test_a_restore_that_could_not_connect_is_repeated(
    tmp_path: Path, failing: str, rolls_back: bool
) -> None:
    with holdfast.Checkpointer(tmp_path) as ckpt:
        save(ckpt, 1)
    state = state_of(0)
    with holdfast.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(state) == 1
        if rolls_back:
            save(ckpt, 2)
        with no_process_can_start(tmp_path):
            with pytest.raises(UnavailableError, match="cannot allocate memory"):
                CALLS[failing](ckpt)
        step = 2 if rolls_back else 1
        assert ckpt.restore(state) == step
        assert torch.equal(state["t"], state_of(step)["t"])
        save(ckpt, 3)
    assert committed_step(tmp_path) == 3


@pytest.mark.fault("A process cannot be started for a rollback, and the script goes on")
def test_a_restore_does_not_ask_for_the_step_of_one_that_could_not_start(tmp_path: Path) -> None:
    folder = holdfast.Folder(tmp_path, keep_last=9)
    state = state_of(0)
    with holdfast.Checkpointer(folder) as ckpt:
        save(ckpt, 1, 2, 3)
    with holdfast.Checkpointer(folder) as ckpt:
        assert ckpt.restore(state, step=1) == 1
        with no_process_can_start(tmp_path):
            with pytest.raises(UnavailableError, match="has not replied"):
                ckpt.restore(state, step=2)
        assert ckpt.restore(state) == 3
        assert torch.equal(state["t"], state_of(3)["t"])


@pytest.mark.fault("The folder's writer is killed during a restore")
@pytest.mark.parametrize("call", CALLS)
def test_a_restore_is_repeated_when_the_persister_ends(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = iter([kill_persister, kill_persister])

    def then_killed(session: Session, place: Place, *args: Any) -> RestartRound:
        round_ = wait_connected(session, place, *args)
        for kill in kills:
            kill(tmp_path)
            until(lambda: not session.is_connected, "the loss of the connection")
            break
        return round_

    with holdfast.Checkpointer(tmp_path) as ckpt:
        save(ckpt, 1)
    with holdfast.Checkpointer(tmp_path) as ckpt:
        monkeypatch.setattr("holdfast.checkpoint.restoring.wait_connected", then_killed)
        assert CALLS[call](ckpt) == 1
        assert next(kills, None) is None


@pytest.mark.fault("The folder's writer ends at every read of a restore")
def test_a_restore_fails_if_each_persister_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def then_killed(session: Session, place: Place, *args: Any) -> RestartRound:
        round_ = wait_connected(session, place, *args)
        kill_persister(tmp_path)
        until(lambda: not session.is_connected, "the loss of the connection")
        return round_

    with holdfast.Checkpointer(tmp_path) as ckpt:
        save(ckpt, 1)
    with holdfast.Checkpointer(tmp_path) as ckpt:
        with monkeypatch.context() as patched:
            patched.setattr("holdfast.checkpoint.restoring.wait_connected", then_killed)
            with pytest.raises(UnavailableError, match="connection"):
                ckpt.restore(state_of(0))
        assert ckpt.restore(state_of(0)) == 1


@pytest.mark.fault("No checkpoint can be read, and a person moves them away while the script waits")
def test_saves_succeed_after_damaged_checkpoints_were_moved_away(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, when_busy="wait") as ckpt:
        save(ckpt, 1)
        damage(tmp_path, 1)
        with pytest.raises(CorruptionError, match="move them away"):
            ckpt.restore(state_of(0))
        shutil.rmtree(tmp_path / "tier")
        assert ckpt.restore(state_of(0)) is None
        save(ckpt, 3)
        assert ckpt.restore(state_of(0)) == 3


@pytest.mark.fault('Two ranks go on after the error of on_damage="raise"')
def test_ranks_save_after_the_error_of_on_damage(tmp_path: Path) -> None:
    program = (
        "import sys, torch, holdfast\n"
        "import torch.distributed as dist\n"
        "from pathlib import Path\n"
        "dist.init_process_group('gloo')\n"
        "folder = holdfast.Folder(sys.argv[1], keep_last=9, on_damage='raise')\n"
        "t = torch.full((4,), 1.0)\n"
        "with holdfast.Checkpointer(folder) as ckpt:\n"
        "    for step in (1, 2):\n"
        "        ckpt.save(step, {'t': t}).wait()\n"
        "    dist.barrier()\n"
        "    if dist.get_rank() == 0:\n"
        "        for shard in Path(sys.argv[1]).rglob('s000000000002-*/*.shard'):\n"
        "            shard.write_bytes(shard.read_bytes()[:-100])\n"
        "    dist.barrier()\n"
        "    for _ in range(2):\n"
        "        try:\n"
        "            ckpt.restore({'t': t})\n"
        "        except holdfast.CorruptionError as error:\n"
        "            assert 'newer checkpoints than step 1' in str(error), error\n"
        "        else:\n"
        "            raise AssertionError('it was restored')\n"
        "    ckpt.save(3, {'t': t + 2}).wait()\n"
        "    assert ckpt.restore({'t': t}) == 3 and t[0] == 3, t\n"
    )
    run_two_ranks(program, tmp_path)
    assert committed_step(tmp_path / "ckpt") == 3


@pytest.mark.fault("Another run saves meanwhile, and a restore of the first one fails")
def test_a_restore_that_failed_gives_no_right_to_save_over_another_run(tmp_path: Path) -> None:
    """Its state is older than what the other run has saved, although its round is newer."""
    folder = holdfast.Folder(tmp_path, keep_last=9)
    with holdfast.Checkpointer(folder) as ckpt:
        save(ckpt, 4, 5)
    with holdfast.Checkpointer(folder) as ckpt:
        assert ckpt.restore(state_of(0)) == 5
        with holdfast.Checkpointer(folder) as other:
            save(other, 6, 7)
        damage(tmp_path, 4)
        with pytest.raises(CorruptionError, match="no copy"):
            ckpt.restore(state_of(0), step=4)
        with pytest.raises(ConfigError, match="another run has saved step 7"):
            ckpt.save(6, state_of(6))
        assert ckpt.restore(state_of(0)) == 7
        save(ckpt, 8)
    assert committed_step(tmp_path) == 8


@pytest.mark.fault("Two ranks may not save in a folder that is in use, and save after its release")
def test_ranks_save_when_the_other_run_has_ended(tmp_path: Path) -> None:
    program = (
        "import os, sys, time, torch, holdfast\n"
        "import torch.distributed as dist\n"
        "from pathlib import Path\n"
        "dist.init_process_group('gloo')\n"
        "t = torch.full((4,), 1.0)\n"
        "with holdfast.Checkpointer(sys.argv[1], when_busy='wait') as ckpt:\n"
        "    assert ckpt.restore({'t': t}) is None\n"
        "    if dist.get_rank() == 0:\n"
        "        from holdfast.directory.processes import TrainingLock\n"
        "        lock = TrainingLock(Path(sys.argv[1]), lambda: None)\n"
        "        lock.take()\n"
        "    dist.barrier()\n"
        "    try:\n"
        "        ckpt.save(1, {'t': t})\n"
        "    except holdfast.ConfigError as error:\n"
        "        assert 'is in use' in str(error), error\n"
        "    else:\n"
        "        raise AssertionError('it was saved')\n"
        "    if dist.get_rank() == 0:\n"
        "        lock.release()\n"
        "    dist.barrier()\n"
        "    ckpt.save(1, {'t': t}).wait()\n"
    )
    run_two_ranks(program, tmp_path)
    assert committed_step(tmp_path / "ckpt") == 1


@pytest.mark.fault("Rank 0 cannot take the object store, and all ranks try again")
def test_no_rank_waits_for_the_answer_of_a_rank_0_that_failed(tmp_path: Path) -> None:
    program = (
        "import sys, torch, holdfast\n"
        "import torch.distributed as dist\n"
        "from holdfast.places.folder import FolderPlace\n"
        "from holdfast_core.errors import ConfigError, UnavailableError\n"
        "dist.init_process_group('gloo')\n"
        "def fail(place):\n"
        "    raise UnavailableError('nothing answers')\n"
        "take, FolderPlace._take_object_store = FolderPlace._take_object_store, fail\n"
        "t = torch.full((4,), 1.0)\n"
        "with holdfast.Checkpointer(sys.argv[1], when_busy='wait') as ckpt:\n"
        "    try:\n"
        "        ckpt.save(1, {'t': t})\n"
        "    except (ConfigError, UnavailableError) as error:\n"
        "        assert str(error) == 'nothing answers', error\n"
        "    else:\n"
        "        raise AssertionError('it was saved')\n"
        "    FolderPlace._take_object_store = take\n"
        "    ckpt.save(2, {'t': t}).wait()\n"
    )
    run_two_ranks(program, tmp_path)
    assert committed_step(tmp_path / "ckpt") == 2


@pytest.mark.fault("A folder is moved away while a process trains in it, and the script restores")
def test_a_folder_that_was_moved_away_is_no_beginning_at_step_0(tmp_path: Path) -> None:
    folder, away = tmp_path / "ckpt", tmp_path / "away"
    state = state_of(0)
    with holdfast.Checkpointer(folder) as ckpt:
        save(ckpt, 1, 2)
        folder.rename(away)
        for restore in (ckpt.restore, ckpt.restore, lambda _: ckpt.peek()):
            with pytest.raises(CorruptionError, match="not the folder that this process opened"):
                restore(state)
        shutil.rmtree(folder)
        away.rename(folder)
        assert ckpt.restore(state) == 2
        assert torch.equal(state["t"], state_of(2)["t"])
