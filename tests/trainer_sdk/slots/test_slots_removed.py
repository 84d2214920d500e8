"""Slots that another program removes from shared memory are created again, and saves continue."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.crash.failpoints import in_every_python
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.launched import persisters_of, stop, until
from tests.support.trainer.slot_files import all_taken, slot_of, states_below
from tests.support.trainer.watched_sidecar import WatchedSidecar

import holdfast
from holdfast_core.errors import SaveFailedError
from holdfast_core.messages.schema import Stage
from holdfast_core.shm.slot_file import SlotState

pytestmark = pytest.mark.usefixtures("memory")


def state(value: float) -> dict[str, Any]:
    return {"t": np.full(1 << 17, value)}


def restored(folder: Path) -> tuple[int | None, float]:
    found = state(0)
    with holdfast.Checkpointer(dir=folder) as ckpt:
        step = ckpt.restore(found)
    assert (found["t"] == found["t"][0]).all()
    return step, float(found["t"][0])


def the_slots(memory: Path) -> None:
    for path in memory.rglob("*.slot"):
        path.unlink()


def everything(memory: Path) -> None:
    for path in memory.iterdir():
        shutil.rmtree(path)


def replaced(memory: Path) -> None:
    for path in memory.rglob("*.slot"):
        path.unlink()
        path.write_bytes(b"not a slot")


REMOVALS = [the_slots, everything, replaced]


@pytest.mark.fault("Another program removes slots between saves")
@pytest.mark.parametrize("remove", REMOVALS)
def test_slots_removed_between_two_saves_are_created_again(
    tmp_path: Path, memory: Path, remove: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "ckpt"
    with holdfast.Checkpointer(dir=folder, on_save_error="raise") as ckpt:
        for step in range(1, 6):
            ckpt.save(step, state(step)).wait(timeout=HANG_SECONDS)
            remove(memory)
        assert ckpt.saves_failed == 0
    assert restored(folder) == (5, 5.0)
    assert "were removed from" in caplog.text


@pytest.mark.fault("Another program removes slots while they are written")
@pytest.mark.parametrize("remove", REMOVALS)
def test_slots_removed_while_they_are_persisted_are_replaced_by_new_ones(
    tmp_path: Path, memory: Path, remove: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer has the slots open and all of them are busy. The next save gets new slots."""
    folder, go = tmp_path / "ckpt", tmp_path / "go"
    for name, value in in_every_python(tmp_path, f"directory.write_shard=wait:{go}").items():
        monkeypatch.setenv(name, value)
    with holdfast.Checkpointer(dir=folder, on_save_error="raise", interval_steps=1) as ckpt:
        handles = [ckpt.save(step, state(step)) for step in (1, 2)]
        until(lambda: states_below(memory) == [SlotState.OWNED] * 2, "the writer has both")
        remove(memory)
        handles.append(ckpt.save(3, state(3)))
        go.touch()
        for handle in handles:
            handle.wait(timeout=HANG_SECONDS)
    assert restored(folder) == (3, 3.0)


@pytest.mark.fault("Another program removes slots before the writer has opened them")
@pytest.mark.parametrize("remove", REMOVALS)
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_slots_removed_before_the_persister_opened_them_are_created_again(
    tmp_path: Path,
    memory: Path,
    remove: Callable[[Path], None],
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bytes of the save are lost: it fails and is counted. Later saves succeed."""
    folder, go = tmp_path / "ckpt", tmp_path / "go"
    go.touch()
    for name, value in in_every_python(tmp_path, f"directory.write_shard=wait:{go}").items():
        monkeypatch.setenv(name, value)
    with holdfast.Checkpointer(dir=folder) as ckpt:
        ckpt.save(1, state(1)).wait(timeout=HANG_SECONDS)
        (writer,) = persisters_of(os.getpid(), folder)
        if how == "stopped":
            stop(writer)
            lost = ckpt.save(2, state(2))
        else:
            go.unlink()
            lost = ckpt.save(2, state(2))
            until(lambda: all_taken(memory), "the writer has it")
        remove(memory)
        os.kill(writer, signal.SIGCONT if how == "stopped" else signal.SIGKILL)
        go.touch()
        with pytest.raises(SaveFailedError):
            lost.wait(timeout=HANG_SECONDS)
        for step in (3, 4, 5):
            ckpt.save(step, state(step)).wait(timeout=HANG_SECONDS)
        assert ckpt.saves_failed == 1
    assert restored(folder) == (5, 5.0)


@pytest.mark.fault(
    "Another program removes slots and their lock, and another process takes the directory"
)
def test_a_slot_directory_that_another_process_took_over_is_not_used(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise both would write into the same slots, and a commit would contain bytes of both."""
    folder = tmp_path / "ckpt"
    with holdfast.Checkpointer(dir=folder, on_save_error="raise") as training:
        training.save(1, state(1)).wait(timeout=HANG_SECONDS)
        everything(memory)
        with holdfast.Checkpointer(dir=folder) as looking:
            seen = {"t": np.zeros(1 << 17), "more": np.zeros(1)}
            with pytest.raises(holdfast.HoldfastError):
                looking.restore(seen)
            files = {path: path.stat().st_ino for path in memory.rglob("*.slot")}
            assert files
            training.save(2, state(2)).wait(timeout=HANG_SECONDS)
            assert {path: path.stat().st_ino for path in memory.rglob("*.slot")} == files
        training.save(3, state(3)).wait(timeout=HANG_SECONDS)
    assert "now used by another process" in caplog.text
    assert restored(folder) == (3, 3.0)


@pytest.fixture
def interval_steps() -> int:
    return 1


@pytest.mark.fault("Another program removes slots in a pod")
@pytest.mark.parametrize("remove", REMOVALS)
def test_slots_removed_in_a_pod_are_created_again(
    tmp_path: Path, sidecar: WatchedSidecar, remove: Callable[[Path], None]
) -> None:
    slots = tmp_path / "shared" / "slots"
    with holdfast.Checkpointer(on_save_error="raise") as ckpt:
        for step in range(1, 6):
            ckpt.save(step, state(step)).wait(timeout=HANG_SECONDS)
            if remove is everything:
                shutil.rmtree(slots)
            else:
                remove(slots)
    assert ckpt.saves_failed == 0


@pytest.mark.fault("Another program removes slots in a pod whose sidecar restarts")
def test_a_save_in_a_removed_slot_fails_when_the_sidecar_has_restarted(
    tmp_path: Path, sidecar: WatchedSidecar
) -> None:
    with holdfast.Checkpointer() as ckpt:
        ckpt.save(1, state(1)).wait(timeout=HANG_SECONDS)
        sidecar.faults.delay_seconds["Stage"] = 3600
        lost = ckpt.save(2, state(2))
        slot = slot_of(tmp_path / "shared", 2)
        sidecar.wait_for(Stage, 2)
        the_slots(tmp_path / "shared")
        sidecar.die()
        sidecar.faults.delay_seconds.clear()
        sidecar.start(0)
        with pytest.raises(SaveFailedError, match=slot.path.name):
            lost.wait(timeout=HANG_SECONDS)
        ckpt.save(3, state(3)).wait(timeout=HANG_SECONDS)
        assert ckpt.saves_failed == 1
