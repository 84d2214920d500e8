"""Slots are pre-faulted, handed over by their header, and never written while another process reads them."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.support.hang import HANG_SECONDS

from holdfast.slots.staging import Copier, Slot, SlotRing
from holdfast_core.errors import CapacityError
from holdfast_core.ids import Rank, RestartRound, Step
from holdfast_core.shm.slot_file import (
    HEADER_BYTES,
    STATE_OFFSET,
    SlotHeader,
    SlotState,
    pack_state,
)

ROUND = RestartRound(3)
MIB = 1 << 20


def ring(path: Path, count: int = 2) -> SlotRing:
    return SlotRing(path, Rank(5), count)


def set_state(path: Path, state: SlotState) -> None:
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), pack_state(state), STATE_OFFSET)


def read_header(path: Path) -> SlotHeader:
    return SlotHeader.unpack(path.read_bytes()[:HEADER_BYTES])


def test_files_are_whole_before_the_first_step(tmp_path: Path) -> None:
    slots = ring(tmp_path)
    slots.ensure(MIB + 1, ROUND)
    paths = sorted(tmp_path.glob("*.slot"))
    assert [path.name for path in paths] == ["rank000005.0.slot", "rank000005.1.slot"]
    for path in paths:
        stat = path.stat()
        assert stat.st_blocks * 512 >= stat.st_size == HEADER_BYTES + MIB + 4096
        assert stat.st_mode & 0o777 == 0o660
        assert read_header(path) == SlotHeader(SlotState.FREE, Rank(5), MIB + 4096)


def test_a_slot_is_filled_and_then_full(tmp_path: Path) -> None:
    slots = ring(tmp_path)
    slots.ensure(MIB, ROUND)
    slot = slots.acquire()
    slot.begin(ROUND, Step(7), 100)
    assert read_header(slot.path).state is SlotState.FILLING
    slot.payload[:100] = 42
    slot.complete()
    assert read_header(slot.path) == SlotHeader(SlotState.FULL, Rank(5), MIB, ROUND, Step(7), 100)
    assert slot.path.read_bytes()[HEADER_BYTES : HEADER_BYTES + 101] == b"\x2a" * 100 + b"\0"


def test_slots_are_used_in_turn_and_busy_ones_are_skipped(tmp_path: Path) -> None:
    slots = ring(tmp_path)
    slots.ensure(MIB, ROUND)
    taken = []
    for step in (1, 2):
        slot = slots.acquire()
        slot.begin(ROUND, Step(step), 1)
        slot.complete()
        taken.append(slot)
    assert slots.acquire() is None
    set_state(taken[0].path, SlotState.OWNED)
    assert slots.acquire() is None
    set_state(taken[0].path, SlotState.FREE)
    assert slots.acquire() is taken[0]


@pytest.mark.parametrize(
    ("state", "round_", "kept"),
    [
        pytest.param(SlotState.FREE, 2, True, id="restored-from-again"),
        pytest.param(SlotState.FULL, 3, True, id="staged-in-this-round"),
        pytest.param(SlotState.OWNED, 2, False, id="an-older-round-is-still-read"),
    ],
)
def test_a_slot_of_an_earlier_process_is_kept_or_freed_by_its_state(
    tmp_path: Path, state: SlotState, round_: int, kept: bool
) -> None:
    before = ring(tmp_path, 1)
    before.ensure(MIB, ROUND)
    before.slots[0].begin(RestartRound(round_), Step(7), 3)
    before.slots[0].payload[:3] = [1, 2, 3]
    before.slots[0].complete()
    set_state(before.slots[0].path, state)
    inode = before.slots[0].path.stat().st_ino

    after = ring(tmp_path, 1)
    after.ensure(MIB, ROUND)
    assert (after.slots[0].path.stat().st_ino == inode) is kept
    if kept:
        assert after.slots[0].header().step == 7
        assert after.slots[0].payload[:3].tolist() == [1, 2, 3]
    else:
        # A late reader still sees these bytes.
        assert before.slots[0].payload[:3].tolist() == [1, 2, 3]
        assert after.slots[0].header().state is SlotState.FREE


def test_a_copy_that_a_kill_interrupted_is_not_valid(tmp_path: Path) -> None:
    before = ring(tmp_path, 1)
    before.ensure(MIB, ROUND)
    before.slots[0].begin(ROUND, Step(7), 3)
    after = ring(tmp_path, 1)
    after.ensure(MIB, ROUND)
    assert after.slots[0].header() == SlotHeader(SlotState.FREE, Rank(5), MIB)


def test_slots_grow_and_never_shrink(tmp_path: Path) -> None:
    slots = ring(tmp_path)
    slots.ensure(MIB, ROUND)
    slots.ensure(MIB // 2, ROUND)
    assert slots.capacity_bytes == MIB
    slots.ensure(3 * MIB, ROUND)
    assert slots.capacity_bytes == 3 * MIB


def test_a_size_without_room_is_an_error_before_memory_is_allocated(tmp_path: Path) -> None:
    slots = ring(tmp_path)
    with pytest.raises(CapacityError, match=r"needs \d+ more bytes for 2 slots"):
        slots.ensure(1 << 50, ROUND)
    assert list(tmp_path.glob("*.slot")) == []


def test_a_slot_can_be_filled_before_all_are_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    real = Slot.prefault

    def prefault(slot: Slot) -> None:
        assert gate.wait(HANG_SECONDS)
        real(slot)

    monkeypatch.setattr(Slot, "prefault", prefault)
    slots = ring(tmp_path)
    slots.ensure(MIB, ROUND, to_fill=True)
    path = slots.slots[0].path
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"filled", HEADER_BYTES)
    assert [slot.header().capacity_bytes for slot in slots.slots] == [MIB, MIB]
    assert not any(slot.is_touched for slot in slots.slots)
    slots.touch_meanwhile()
    slots.ensure(MIB, ROUND)  # as before the first step, when the call does not wait
    assert not any(slot.is_touched for slot in slots.slots)
    gate.set()
    slot = slots.acquire()
    assert slot is not None
    assert all(slot.is_touched for slot in slots.slots)
    assert path.stat().st_blocks * 512 >= HEADER_BYTES + MIB
    assert bytes(slots.slots[0].payload[:6]) == b"filled"


def test_pages_that_a_killed_process_did_not_touch_are_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Slot, "prefault", lambda slot: None)
        ring(tmp_path).ensure(MIB, ROUND, to_fill=True)
    path = tmp_path / "rank000005.1.slot"
    assert path.stat().st_blocks * 512 < MIB
    ring(tmp_path).ensure(MIB, ROUND)
    assert path.stat().st_blocks * 512 >= HEADER_BYTES + MIB


def test_a_volume_that_fills_up_fails_the_next_call_and_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Slot.prefault

    def prefault(slot: Slot) -> None:
        if slot.index == 1:
            raise CapacityError("the volume filled up meanwhile")
        real(slot)

    slots = ring(tmp_path, 3)
    with monkeypatch.context() as patched:
        patched.setattr(Slot, "prefault", prefault)
        slots.ensure(MIB, ROUND, to_fill=True)
        with pytest.raises(CapacityError, match="meanwhile"):
            slots.acquire()
    assert [slot.index for slot in slots.slots] == [0]
    assert [path.name for path in tmp_path.glob("*.slot")] == ["rank000005.0.slot"]
    slots.ensure(MIB, ROUND)
    assert [slot.index for slot in slots.slots] == [0, 1, 2]
    assert all(slot.is_touched for slot in slots.slots)


def test_copies_by_two_threads_copy_every_byte() -> None:
    source = np.random.default_rng(0).integers(0, 255, 40 * MIB, dtype=np.uint8)
    target = np.zeros_like(source)
    size = 3 * MIB
    jobs = [
        (size, partial(np.copyto, target[at : at + size], source[at : at + size]))
        for at in range(0, len(source), size)
    ]
    copier = Copier()
    copier.run(jobs)
    copier.close()
    assert np.array_equal(source, target)


def test_an_error_in_the_helper_reaches_the_caller() -> None:
    def fail() -> None:
        raise ValueError("no")

    jobs = [(32 * MIB, lambda: None), (32 * MIB, fail)]
    copier = Copier()
    with pytest.raises(ValueError, match="no"):
        copier.run(jobs)
    copier.close()


@pytest.mark.fault("Another process has replaced a busy slot")
def test_a_busy_slot_whose_file_another_process_has_replaced_is_left_alone(tmp_path: Path) -> None:
    slots = SlotRing(tmp_path, Rank(5), 1, is_ours=lambda: False)
    slots.ensure(MIB, ROUND)
    (slot,) = slots.slots
    slot.begin(ROUND, Step(7), 100)
    slot.path.unlink()
    slot.path.write_bytes(b"another process's")
    with pytest.raises(CapacityError, match="another process"):
        slots.ensure(MIB, ROUND)
    assert slot.path.read_bytes() == b"another process's"
