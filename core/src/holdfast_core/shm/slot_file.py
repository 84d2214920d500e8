"""Slots of shared memory as their reader sees them: files read by pread and written by pwrite.

Never mmap: the trainer may truncate a file at any moment, which must be an error here and not a
SIGBUS. Names come from the trainer and are hostile until they match the pattern; files are opened as
`shared_files` does it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from holdfast_core.errors import FormatError, NotFoundError, UnavailableError
from holdfast_core.ids import Digest, Rank
from holdfast_core.shards.record import CHUNK_BYTES
from holdfast_core.shards.stream import TableDigester
from holdfast_core.shm.shared_files import open_regular, opened_directory
from holdfast_core.shm.slot_header import (
    HEADER_BYTES,
    STATE_OFFSET,
    SlotHeader,
    SlotState,
    pack_state,
)

MAX_SLOTS = 1024
"""Of one volume. A pod has a few ranks with a few slots each."""
_MAX_ENTRIES = 16 * MAX_SLOTS
_READ_BYTES = 4 << 20
_NAME = re.compile(r"rank(\d{6})\.(\d{1,3})\.slot")


def rank_of_slot(name: str) -> Rank | None:
    """The rank a slot's name speaks of; None when it is no slot name at all."""
    match = _NAME.fullmatch(name)
    return Rank(int(match.group(1))) if match else None


@dataclass(slots=True)
class SlotFile:
    """An open slot. Close it; it holds a descriptor of the trainer's memory."""

    name: str
    fd: int
    throttle: Callable[[int], object] | None = None
    """Asked before the payload is read for the node tier: it paces the write."""
    bytes_read: int = 0
    """How far a reader got: whether a write that takes long still moves."""

    @classmethod
    def open(cls, directory: Path, name: str) -> SlotFile:
        """Raises FormatError for a bad name, NotFoundError, UnavailableError."""
        if rank_of_slot(name) is None:
            raise FormatError(f"slot name {name!r}: expected rank<6 digits>.<index>.slot")
        try:
            with opened_directory(directory) as above:
                fd = open_regular(above, name, os.O_RDWR)
        except FileNotFoundError as error:
            raise NotFoundError(f"slot {name} is not in {directory}") from error
        except OSError as error:
            raise UnavailableError(f"opening slot {name} in {directory}: {error}") from error
        return cls(name, fd)

    def header(self) -> SlotHeader:
        """Raises FormatError when it is torn, or promises more than the file holds."""
        header = SlotHeader.unpack(self._read_head())
        held_bytes = os.fstat(self.fd).st_size - HEADER_BYTES
        volume = os.fstatvfs(self.fd)
        volume_bytes = volume.f_blocks * volume.f_frsize
        if 0 < volume_bytes < header.capacity_bytes:
            # A sparse file costs its writer nothing and its reader every byte that it claims.
            raise FormatError(
                f"slot {self.name}: header says {header.capacity_bytes} bytes, the volume has "
                f"{volume_bytes}"
            )
        if header.capacity_bytes > held_bytes or header.rank != rank_of_slot(self.name):
            raise FormatError(
                f"slot {self.name}: header says rank {header.rank} and "
                f"{header.capacity_bytes} bytes, the file holds {held_bytes}"
            )
        return header

    def _read_head(self) -> bytes:
        try:
            return os.pread(self.fd, HEADER_BYTES, 0)
        except OSError as error:
            raise UnavailableError(f"reading the header of slot {self.name}: {error}") from error

    def set_state(self, state: SlotState) -> None:
        """Raises UnavailableError: the trainer truncated the file, and its volume is full."""
        self._write(STATE_OFFSET, pack_state(state))

    def write_header(self, header: SlotHeader) -> None:
        """State last and alone, as the slot's contract wants it. Raises as `set_state` does."""
        packed = bytearray(header.pack())
        state = pack_state(header.state)
        packed[STATE_OFFSET : STATE_OFFSET + len(state)] = pack_state(SlotState.FILLING)
        self._write(0, packed)
        self._write(STATE_OFFSET, state)

    def write_payload(self, offset: int, data: memoryview) -> None:
        """Raises as `set_state` does."""
        self._write(HEADER_BYTES + offset, data)

    def _write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(self.fd, view[done:], offset + done)
        except OSError as error:
            raise UnavailableError(f"writing into slot {self.name}: {error}") from error

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """PayloadSource: raises FormatError when the file ends too early."""
        if self.throttle is not None:
            self.throttle(len(buffer))
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self.fd, [buffer[done:]], HEADER_BYTES + offset + done)
            except OSError as error:
                raise UnavailableError(f"reading slot {self.name}: {error}") from error
            if count == 0:
                raise FormatError(
                    f"slot {self.name}: ends at payload byte {offset + done}, "
                    f"{offset + len(buffer)} expected (was it truncated?)"
                )
            done += count
        self.bytes_read += done

    def pieces(self, start: int, stop: int, piece_bytes: int = _READ_BYTES) -> Iterator[memoryview]:
        """The payload from byte `start` to `stop`, in order. A piece is valid until the next one is asked
        for. Raises what `read_into` raises."""
        buffer = memoryview(bytearray(min(piece_bytes, max(stop - start, 1))))
        for position in range(start, stop, len(buffer)):
            piece = buffer[: min(len(buffer), stop - position)]
            self.read_into(position, piece)
            yield piece

    def payload_digest(self, payload_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Digest:
        """What identifies the payload's first bytes as a shard's. Raises what `read_into` raises."""
        digest = TableDigester(chunk_bytes)
        for piece in self.pieces(0, payload_bytes):
            digest.update(piece)
        return digest.finish()[0]

    def close(self) -> None:
        os.close(self.fd)


def list_slots(directory: Path) -> tuple[str, ...]:
    """Names of slot files, sorted; other entries are left out.

    A directory that is missing or cannot be listed (its owner may replace it or take its rights away
    at any time) holds no slots: a seal must not fail because of it. At most `MAX_SLOTS` names are
    returned, since every one of them is opened.
    """
    names: list[str] = []
    try:
        with opened_directory(directory) as above, os.scandir(above) as entries:
            for entry in islice(entries, _MAX_ENTRIES):
                if rank_of_slot(entry.name) is not None and len(names) < MAX_SLOTS:
                    names.append(entry.name)
    except OSError:
        return ()
    return tuple(sorted(names))
