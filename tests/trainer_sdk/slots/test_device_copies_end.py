"""How the copies of a save end: with a full slot, a failure, a restore or the end of the process."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest
import torch
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.device_training import (
    WEIGHT,
    Training,
    catch_up_when_blocked,
    until_blocked,
    write,
    write_unseen,
)
from tests.support.trainer.launched import until
from tests.support.trainer.watched_sidecar import WatchedSidecar

import holdfast
from holdfast.slots.staging import Copier, SlotRing
from holdfast_core.errors import ConfigError, SaveFailedError
from holdfast_core.ids import Rank, RestartRound
from holdfast_core.messages.schema import Progress, Restore, Stage
from holdfast_core.shm.slot_file import HEADER_BYTES, SlotState


def test_a_slot_is_full_when_the_copies_are_done(training: Training) -> None:
    handle = training.ckpt.save(1, training.state)
    header = training.header(1)
    assert header.state is SlotState.FILLING
    assert (training.staged, handle.settled) == ([], False)
    training.device.catch_up()
    handle.wait(timeout=HANG_SECONDS)
    assert training.staged == [1]


def test_two_saves_in_a_row_have_the_bytes_of_their_step(training: Training) -> None:
    first = training.ckpt.save(1, training.state)
    second = training.ckpt.save(2, training.state)
    training.step()
    for handle in (first, second):
        handle.wait(timeout=HANG_SECONDS)
    assert training.staged == [1, 2]
    assert torch.equal(training.saved(1).weight, WEIGHT)
    assert torch.equal(training.saved(2).weight, WEIGHT)


def test_slots_are_not_replaced_while_copies_run(training: Training) -> None:
    training.ckpt.save(1, training.state)
    training.state["more"] = torch.ones(100_000)
    growing = Thread(target=training.ckpt.save, args=(2, training.state))
    growing.start()
    until_blocked(growing, training)
    assert all(slot.header.capacity_bytes < 400_000 for slot in training.slots)
    training.device.catch_up()
    growing.join()
    assert all(slot.header.capacity_bytes >= 400_000 for slot in training.slots)
    until(lambda: training.staged == [1, 2], "both saves")


def test_a_copy_that_fails_is_a_failed_save(training: Training) -> None:
    training.device.fails = "CUDA error: an illegal memory access was encountered"
    handle = training.ckpt.save(1, training.state)
    training.step()
    with pytest.raises(SaveFailedError, match="illegal memory access"):
        handle.wait(timeout=HANG_SECONDS)
    assert training.header(1) is None
    training.device.fails = None
    handle = training.ckpt.save(2, training.state)
    training.step()
    handle.wait(timeout=HANG_SECONDS)
    assert training.ckpt.saves_failed == 1
    assert training.staged == [2]


def test_a_device_that_refuses_a_copy_is_a_failed_save(training: Training) -> None:
    training.device.refuses = "out of resources"
    for step in range(1, 4):  # more saves than slots
        handle = training.ckpt.save(step, training.state)
        assert handle.failure == "DeviceError: out of resources"
    assert training.ckpt.saves_failed == 3
    training.device.refuses = None
    handle = training.ckpt.save(4, training.state)
    training.device.catch_up()
    handle.wait(timeout=HANG_SECONDS)


def test_a_device_that_cannot_be_waited_for_does_not_stop_the_step(training: Training) -> None:
    handle = training.ckpt.save(1, training.state)
    training.device.refuses_to_block = "CUDA error: device-side assert triggered"
    training.step()
    training.device.catch_up()
    with pytest.raises(SaveFailedError, match="device-side assert"):
        handle.wait(timeout=HANG_SECONDS)


def test_a_failed_save_frees_its_slot_only_after_the_device_is_done(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(copier: Copier, jobs: object) -> None:
        raise OSError("the host's copy failed")

    monkeypatch.setattr(Copier, "run", fail)
    training.device.is_lagging = False
    handle = training.ckpt.save(1, training.state)
    assert handle.failure == "OSError: the host's copy failed"
    assert training.device.is_idle
    assert [slot.header.state for slot in training.slots] == [SlotState.FREE] * 2


def test_a_crash_before_the_copies_are_done_leaves_no_valid_slot(training: Training) -> None:
    training.ckpt.save(1, training.state)
    slots = training.slots
    assert {slot.header.state for slot in slots} == {SlotState.FILLING, SlotState.FREE}
    next_life = SlotRing(slots[0].path.parent, Rank(0), len(slots))
    next_life.ensure(slots[0].header.capacity_bytes, RestartRound(0))
    headers = [slot.header() for slot in next_life.slots]
    assert [(header.state, header.step) for header in headers] == [(SlotState.FREE, None)] * 2
    next_life.close()


def test_a_restore_waits_for_the_copies(training: Training) -> None:
    """A restore would write into tensors that are still being copied. In a pod, the first restore may
    follow a save of step 0; a later one is refused."""
    training.ckpt.save(0, training.state)
    loop = training.ckpt.steps(1, training.state)
    restoring = Thread(target=next, args=(loop,))
    restoring.start()
    until_blocked(restoring, training)
    training.device.catch_up()
    restoring.join()
    assert [type(m) for m in training.sidecar.received if isinstance(m, Stage | Restore)] == [
        Stage,
        Restore,
    ]


def test_a_restore_after_a_save_is_refused_in_a_pod(training: Training) -> None:
    training.ckpt.save(1, training.state)
    training.device.catch_up()
    with pytest.raises(ConfigError, match="in a worker pod all ranks of a round start from"):
        training.ckpt.restore(training.state)
    assert training.sidecar.messages(Restore) == []
    assert torch.equal(training.net.weight, WEIGHT)


def test_a_roll_back_waits_for_the_copies(tmp_path: Path) -> None:
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        unused = WatchedSidecar(
            tmp_path / "shared", tmp_path / "node"
        )  # not started, because a folder needs no sidecar
        training = Training(unused, ckpt)
        ckpt.save(1, training.state)
        restoring = Thread(target=ckpt.restore, args=(training.state,))
        restoring.start()
        until_blocked(restoring, training)
        assert not training.device.is_idle
        training.device.catch_up()
        restoring.join()
        assert torch.equal(training.net.weight, WEIGHT)
    assert ckpt.last_committed_step == 1


def test_the_end_waits_for_the_copies(training: Training) -> None:
    handle = training.ckpt.save(1, training.state)
    catching_up = Thread(target=catch_up_when_blocked, args=(training,))
    catching_up.start()
    training.ckpt.close()
    catching_up.join()
    assert training.staged == [1]
    assert training.device.pinned == {}
    assert handle.failure is None


def test_slots_of_copies_that_never_end_stay_mapped(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("holdfast.checkpoint.opened._COPIES_AFTER_ERROR_SECONDS", 0.0)
    training.ckpt.save(1, training.state)
    training.ckpt.close(wait=False)
    assert len(training.device.pinned) == 2
    assert "a save is lost" in caplog.text


def test_copies_beside_training_are_not_blocked_time(training: Training) -> None:
    handle = training.ckpt.save(1, training.state)
    spent = training.ckpt.blocked_seconds
    training.device.catch_up()
    handle.wait(timeout=HANG_SECONDS)
    assert training.ckpt.blocked_seconds == spent > 0
    training.ckpt.close()
    training.sidecar.wait_for(Progress)
    assert training.sidecar.messages(Progress)[-1].blocked_seconds == spent


def test_slots_are_page_locked_while_they_exist(training: Training) -> None:
    training.ckpt.allocate(training.state)
    size = training.slots[0].header.capacity_bytes + HEADER_BYTES
    assert list(training.device.pinned.values()) == [size, size]
    training.ckpt.allocate({"more": torch.ones(100_000)})
    assert len(training.device.pinned) == 2
    assert min(training.device.pinned.values()) > 400_000
    training.ckpt.close()
    assert training.device.pinned == {}


def test_slots_that_cannot_be_page_locked_are_logged_once_and_copied_synchronously(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    training.device.refuses_pins = "cudaHostRegister answered 801"
    handles = []
    for step in (1, 2):
        write(training.net.weight, step)
        handles.append(training.ckpt.save(step, training.state))
        write_unseen(training.net.weight, -1)
    for handle in handles:
        handle.wait(timeout=HANG_SECONDS)
    assert caplog.text.count("cudaHostRegister answered 801") == 1
    for step in (1, 2):
        assert torch.equal(training.saved(step).weight, torch.full_like(WEIGHT, step))


def test_close_removes_the_hook(training: Training) -> None:
    training.ckpt.save(1, training.state)
    training.device.catch_up()
    training.ckpt.close()
    asked = training.device.capture_checks
    training.step()
    assert training.device.capture_checks == asked
