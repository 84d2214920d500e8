"""Background transfers wait for the copies of ranks: until the copies end, at most a second for each."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.hang import HANG_SECONDS

import holdfast_core.pacing
from holdfast_core.ids import Rank, RestartRound, Step
from holdfast_core.pacing import LONGEST_SECONDS, ForegroundCopyGate
from holdfast_core.shm.slot_file import HEADER_BYTES, SlotHeader, SlotState, slot_name


def put(directory: Path, state: SlotState, *, step: int = 1, rank: int = 0, index: int = 0) -> Path:
    path = directory / slot_name(Rank(rank), index)
    header = SlotHeader(state, Rank(rank), 0, RestartRound(0), Step(step))
    path.write_bytes(header.pack().ljust(HEADER_BYTES, b"\0"))
    return path


class Clock:
    """A clock that advances only in sleeps and calls `meanwhile` in each of them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.meanwhile: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


def copy_gate(directory: Path, clock: Clock) -> ForegroundCopyGate:
    return ForegroundCopyGate(directory, lambda: clock.now, clock.sleep)


@pytest.mark.parametrize("state", [SlotState.FREE, SlotState.FULL, SlotState.OWNED])
def test_nothing_waits_while_no_rank_copies(tmp_path: Path, state: SlotState) -> None:
    put(tmp_path, state)
    clock = Clock()
    assert copy_gate(tmp_path, clock).wait_for_copies() == 0.0
    assert clock.now == 0.0


def test_the_gate_waits_until_the_copy_ends(tmp_path: Path) -> None:
    put(tmp_path, SlotState.FILLING)
    clock = Clock()

    def end() -> None:
        if clock.now > 0.1:
            put(tmp_path, SlotState.FULL)

    clock.meanwhile = end
    assert copy_gate(tmp_path, clock).wait_for_copies() == pytest.approx(0.1, abs=0.01)


def test_a_copy_that_never_ends_is_waited_for_once(tmp_path: Path) -> None:
    put(tmp_path, SlotState.FILLING)  # its rank was killed
    clock = Clock()
    way = copy_gate(tmp_path, clock)
    assert way.wait_for_copies() == pytest.approx(LONGEST_SECONDS, abs=0.01)
    assert way.wait_for_copies() == 0.0
    put(tmp_path, SlotState.FILLING, step=2)
    assert way.wait_for_copies() == pytest.approx(LONGEST_SECONDS, abs=0.01)


def test_a_copy_that_never_ends_does_not_hide_another_one(tmp_path: Path) -> None:
    put(tmp_path, SlotState.FILLING)
    clock = Clock()
    way = copy_gate(tmp_path, clock)
    way.wait_for_copies()
    put(tmp_path, SlotState.FILLING, rank=1)
    assert way.wait_for_copies() > 0.0


def test_copies_of_several_ranks(tmp_path: Path) -> None:
    put(tmp_path, SlotState.FILLING)
    put(tmp_path, SlotState.FILLING, rank=1)
    clock = Clock()

    def end() -> None:
        if clock.now > 0.1:
            put(tmp_path, SlotState.FULL)
        if clock.now > 0.2:
            put(tmp_path, SlotState.FULL, rank=1)

    clock.meanwhile = end
    assert copy_gate(tmp_path, clock).wait_for_copies() == pytest.approx(0.2, abs=0.01)


def test_files_that_are_no_slots_are_not_waited_for(tmp_path: Path) -> None:
    path = put(tmp_path, SlotState.FILLING)
    os.truncate(path, 20)
    (tmp_path / slot_name(Rank(1), 0)).write_bytes(b"")
    (tmp_path / slot_name(Rank(2), 0)).symlink_to(path)
    (tmp_path / "core.1234").write_bytes(SlotHeader(SlotState.FILLING, Rank(3), 0).pack())
    assert copy_gate(tmp_path, Clock()).wait_for_copies() == 0.0
    assert copy_gate(tmp_path / "absent", Clock()).wait_for_copies() == 0.0


def test_a_restore_is_not_stood_aside_for(tmp_path: Path) -> None:
    """A restore fills a slot without an identity, and no rank trains meanwhile."""
    header = SlotHeader(SlotState.FILLING, Rank(0), 0).pack().ljust(HEADER_BYTES, b"\0")
    (tmp_path / slot_name(Rank(0), 0)).write_bytes(header)
    assert copy_gate(tmp_path, Clock()).wait_for_copies() == 0.0


def test_slots_that_cannot_be_listed_fail_no_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptors(_: Path) -> tuple[str, ...]:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(holdfast_core.pacing, "list_slots", no_descriptors)
    assert copy_gate(tmp_path, Clock()).wait_for_copies() == 0.0


def test_a_slot_that_is_taken_away_is_waited_for_no_longer(tmp_path: Path) -> None:
    path = put(tmp_path, SlotState.FILLING)
    clock = Clock()
    clock.meanwhile = lambda: path.unlink(missing_ok=True)
    assert copy_gate(tmp_path, clock).wait_for_copies() < LONGEST_SECONDS / 2


def test_threads_wait_together(tmp_path: Path) -> None:
    """Each thread returns, and the maximum of a second for a copy is counted once for all of them."""
    put(tmp_path, SlotState.FILLING)
    clock = Clock()
    way = copy_gate(tmp_path, clock)
    threads = [threading.Thread(target=way.wait_for_copies, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    assert clock.now == pytest.approx(LONGEST_SECONDS, abs=0.05)
