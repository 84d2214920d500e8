"""How the sidecar reads slot files: hostile names, torn headers, truncation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast_core.errors import FormatError, HoldfastError, NotFoundError
from holdfast_core.format.canonical import chunk_digest, digest_of
from holdfast_core.ids import Rank, RestartRound, Step
from holdfast_core.shm.slot_file import (
    HEADER_BYTES,
    SlotFile,
    SlotHeader,
    SlotState,
    list_slots,
    rank_of_slot,
)

NAME = "rank000003.0.slot"


def make(directory: Path, *, capacity: int = 1000, promised: int | None = None) -> Path:
    path = directory / NAME
    header = SlotHeader(
        SlotState.FULL,
        Rank(3),
        capacity if promised is None else promised,
        RestartRound(1),
        Step(9),
        500,
    )
    path.write_bytes(header.pack().ljust(HEADER_BYTES, b"\0") + bytes(range(250)) * 4)
    return path


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        (NAME, 3),
        ("rank000003.12.slot", 3),
        ("rank3.0.slot", None),
        ("../rank000003.0.slot", None),
        ("rank000003.0.slot\n", None),
        ("rank000003.0.slot/x", None),
        ("", None),
    ],
)
def test_names(name: str, rank: int | None) -> None:
    assert rank_of_slot(name) == rank


def test_header_and_bytes(tmp_path: Path) -> None:
    make(tmp_path)
    slot = SlotFile.open(tmp_path, NAME)
    assert (slot.header().step, slot.header().state) == (9, SlotState.FULL)
    buffer = memoryview(bytearray(10))
    slot.read_into(248, buffer)
    assert bytes(buffer) == bytes([248, 249, 0, 1, 2, 3, 4, 5, 6, 7])
    slot.set_state(SlotState.FREE)
    assert slot.header().state is SlotState.FREE
    slot.close()


@pytest.mark.parametrize("length", [0, 1, 500])
def test_the_digest_is_of_the_payload_alone(tmp_path: Path, length: int) -> None:
    make(tmp_path)
    slot = SlotFile.open(tmp_path, NAME)
    payload = (bytes(range(250)) * 4)[:length]
    chunks = [payload[start : start + 200] for start in range(0, length, 200)]
    expected = digest_of(b"".join(chunk_digest(chunk) for chunk in chunks))
    assert slot.payload_digest(length, chunk_bytes=200) == expected
    slot.close()


def test_a_paced_slot_asks_before_it_reads(tmp_path: Path) -> None:
    make(tmp_path)
    slot = SlotFile.open(tmp_path, NAME)
    asked: list[int] = []
    slot.throttle = asked.append
    slot.read_into(0, memoryview(bytearray(300)))
    slot.read_into(300, memoryview(bytearray(200)))
    slot.close()
    assert asked == [300, 200]


def test_a_header_that_promises_more_than_the_file_holds(tmp_path: Path) -> None:
    make(tmp_path, promised=5000)
    slot = SlotFile.open(tmp_path, NAME)
    with pytest.raises(FormatError, match="the file has 1000"):
        slot.header()
    slot.close()


def test_a_slot_that_is_truncated_while_it_is_read(tmp_path: Path) -> None:
    path = make(tmp_path)
    slot = SlotFile.open(tmp_path, NAME)
    os.truncate(path, HEADER_BYTES + 100)
    with pytest.raises(FormatError, match="ends at payload byte 100"):
        slot.read_into(0, memoryview(bytearray(500)))
    slot.close()


@pytest.mark.fault("A name or a link leads out of the cache")
@pytest.mark.parametrize("name", ["../secret", "rank000004.0.slot"], ids=["path", "absent"])
def test_a_name_that_is_no_slot_is_not_opened(tmp_path: Path, name: str) -> None:
    with pytest.raises((FormatError, NotFoundError)):
        SlotFile.open(tmp_path, name)


def test_a_symlink_is_not_followed(tmp_path: Path) -> None:
    target = make(tmp_path)
    target.rename(tmp_path / "target")
    (tmp_path / NAME).symlink_to(tmp_path / "target")
    with pytest.raises(HoldfastError):
        SlotFile.open(tmp_path, NAME)


def test_list_ignores_everything_else(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "core.1234").touch()
    assert list_slots(tmp_path) == (NAME,)
    assert list_slots(tmp_path / "absent") == ()
