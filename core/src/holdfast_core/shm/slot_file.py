"""A shared-memory slot: a file in the pod's tmpfs, with a header of HEADER_BYTES before the payload.

The rank allocates and prefaults it, so its pages are charged to the trainer container. The sidecar uses
pread and pwrite and never mmap, because a truncated file must cause an error in the sidecar and not SIGBUS.
The trainer may change the file at any time (see shared_files), and its bytes are verified after they are
read.

The header says who may write to the slot, and which shard is in it. These processes set its states. The
state word is written last, in a 4-byte aligned write of its own.

  FREE -> FILLING (rank, before the copy) -> FULL (rank, after the copy) -> OWNED (sidecar, on Stage)
  -> FREE (sidecar, when the shard is durable on the node tier, or dropped for a newer one).

After a restore the sidecar leaves the slot FREE with its identity set, so that it can serve the same
restore again.

A sidecar and a folder's persister put a payload into a rank's slot by the same steps:

1. `kept_slot`: a slot whose header names the shard may still hold it. The bytes are verified, here or by the
   rank.
2. `first_fitting`: otherwise a slot is chosen that is large enough.
3. `begin_shard` or `begin_assembly` marks the slot. `reading.Reader.fill` puts a saved shard, or a
   payload that is assembled from ranges of several shards, into it. The header that was returned is written
   at the end.

While a slot is written, it is FILLING and names no shard, so that a slot that was filled in part is never
taken for the shard. All calls block.
"""

from __future__ import annotations

import logging
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import Protocol

from holdfast_core.errors import (
    CapacityError,
    CorruptionError,
    FormatError,
    NotFoundError,
    TierError,
    UnavailableError,
)
from holdfast_core.format.rank_layout import RankLayout
from holdfast_core.ids import Digest, Rank, RestartRound, ShardRef, Step
from holdfast_core.reshard.plan import payload_plan
from holdfast_core.shards.file import CHUNK_BYTES
from holdfast_core.shards.stream import ChunkCrcs, TableDigester
from holdfast_core.shm.shared_files import open_regular, opened_directory
from holdfast_core.tiers.base import NodeTier, PayloadSource, ShardReader

_LOG = logging.getLogger(__name__)

HEADER_BYTES = 4096
MAGIC = b"HFSLOT01"
_LAYOUT = struct.Struct("<8sIIqqqqq")
"""magic, state, reserved, round, step, rank, payload bytes, capacity bytes"""
STATE_OFFSET = 8
_STATE = struct.Struct("<I")
_NONE = -1


class SlotState(IntEnum):
    """State of a slot. The module's docstring lists who sets which state."""

    FREE = 0
    FILLING = 1
    FULL = 2
    OWNED = 3


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """Decoded header. Without `round` and `step` the slot names no shard of a checkpoint."""

    state: SlotState
    rank: Rank
    capacity_bytes: int
    round: RestartRound | None = None
    step: Step | None = None
    payload_bytes: int = 0

    def pack(self) -> bytes:
        """Return the header's bytes, which are fewer than HEADER_BYTES."""
        return _LAYOUT.pack(
            MAGIC,
            self.state,
            0,
            _NONE if self.round is None else self.round,
            _NONE if self.step is None else self.step,
            self.rank,
            self.payload_bytes,
            self.capacity_bytes,
        )

    @classmethod
    def unpack(cls, data: bytes) -> SlotHeader:
        """Parse a header. Raises FormatError if the bytes are not a slot header or are inconsistent."""
        if len(data) < _LAYOUT.size:
            raise FormatError(f"slot header: {len(data)} bytes, expected {_LAYOUT.size}")
        magic, state, _, round_, step, rank, payload, capacity = _LAYOUT.unpack_from(data)
        if magic != MAGIC:
            raise FormatError(f"slot header: magic {magic!r}, expected {MAGIC!r}")
        if not 0 <= payload <= capacity:
            raise FormatError(f"slot header: payload of {payload} bytes in a slot of {capacity}")
        try:
            known = SlotState(state)
        except ValueError as error:
            raise FormatError(f"slot header: unknown state {state}") from error
        return cls(
            known,
            Rank(rank),
            capacity,
            None if round_ == _NONE else RestartRound(round_),
            None if step == _NONE else Step(step),
            payload,
        )


def pack_state(state: SlotState) -> bytes:
    """Return the state word, for a write at STATE_OFFSET."""
    return _STATE.pack(state)


def slot_name(rank: Rank, index: int) -> str:
    return f"rank{rank:06d}.{index}.slot"


MAX_SLOTS = 1024
"""Largest number of slots in one volume. A pod has a few ranks with a few slots each."""
_MAX_ENTRIES = 16 * MAX_SLOTS
_READ_BYTES = 4 << 20
_NAME = re.compile(r"rank(\d{6})\.(\d{1,3})\.slot")


def rank_of_slot(name: str) -> Rank | None:
    """Return the rank in a slot's file name. None if it is not a slot name."""
    match = _NAME.fullmatch(name)
    return Rank(int(match.group(1))) if match else None


@dataclass(slots=True)
class SlotFile:
    """An open slot. The caller must close it, because its descriptor keeps the trainer's memory in use."""

    name: str
    fd: int
    throttle: Callable[[int], object] | None = None
    """Called with the number of bytes before each read of the payload. It limits the rate of a write."""
    bytes_read: int = 0
    """Payload bytes read so far. It shows whether a slow write still makes progress."""
    bytes_verified: int = 0
    """Payload bytes that a write has read back from its file so far."""

    @classmethod
    def open(cls, directory: Path, name: str) -> SlotFile:
        """Open a slot for reading and writing.

        Raises:
            FormatError: The name is not a slot name, or is not a regular file with one hard link.
            NotFoundError: The slot does not exist.
            UnavailableError: It cannot be opened.
        """
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

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode. A rank may replace the file of a name while the old one is still open."""
        found = os.fstat(self.fd)
        return found.st_dev, found.st_ino

    def duplicate(self) -> SlotFile:
        """Return another open slot of the same file."""
        return SlotFile(self.name, os.dup(self.fd))

    def header(self) -> SlotHeader:
        """Read the header.

        Raises:
            FormatError: The header is torn, names another rank than the file name, or claims more bytes
                than the file or its volume has.
            UnavailableError: It cannot be read.
        """
        header = SlotHeader.unpack(self._read_head())
        file_payload_bytes = os.fstat(self.fd).st_size - HEADER_BYTES
        volume = os.fstatvfs(self.fd)
        volume_bytes = volume.f_blocks * volume.f_frsize
        if 0 < volume_bytes < header.capacity_bytes:
            # A sparse file needs no memory, but its reader would read every byte that it claims.
            raise FormatError(
                f"slot {self.name}: the header has a capacity of {header.capacity_bytes} bytes, "
                f"but the volume has {volume_bytes}"
            )
        if header.capacity_bytes > file_payload_bytes or header.rank != rank_of_slot(self.name):
            raise FormatError(
                f"slot {self.name}: the header names rank {header.rank} and "
                f"{header.capacity_bytes} bytes, but the file has {file_payload_bytes}"
            )
        return header

    def _read_head(self) -> bytes:
        try:
            return os.pread(self.fd, HEADER_BYTES, 0)
        except OSError as error:
            raise UnavailableError(f"reading the header of slot {self.name}: {error}") from error

    def set_state(self, state: SlotState) -> None:
        """Write the state word.

        Raises UnavailableError if the write fails: after the trainer has truncated the file, the
        write needs memory, and the volume may be full.
        """
        self._write(STATE_OFFSET, pack_state(state))

    def write_header(self, header: SlotHeader) -> None:
        """Write the header, and its state last in a write of its own (see the module's docstring).

        Until then the state is FILLING. Raises what `set_state` raises.
        """
        packed = bytearray(header.pack())
        state = pack_state(header.state)
        packed[STATE_OFFSET : STATE_OFFSET + len(state)] = pack_state(SlotState.FILLING)
        self._write(0, packed)
        self._write(STATE_OFFSET, state)

    def write_payload(self, offset: int, data: memoryview) -> None:
        """Write `data` at byte `offset` of the payload. Raises what `set_state` raises."""
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
        """Fill `buffer` from byte `offset` of the payload, after the throttle has allowed it.

        Raises:
            FormatError: The file ends too early.
            UnavailableError: It cannot be read.
        """
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

    def verified(self, byte_count: int) -> None:
        """Count bytes of the written file that were read back, for those who watch a write's progress."""
        self.bytes_verified += byte_count

    def pieces(self, start: int, stop: int, piece_bytes: int = _READ_BYTES) -> Iterator[memoryview]:
        """Return `payload_pieces` of the slot."""
        return payload_pieces(self, start, stop, piece_bytes)

    def payload_digest(self, payload_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Digest:
        """Return the digest that a shard with the first `payload_bytes` of the payload has.

        Raises what `read_into` raises.
        """
        digest = TableDigester(chunk_bytes)
        for piece in self.pieces(0, payload_bytes):
            digest.update(piece)
        return digest.finish()[0]

    def free(self) -> None:
        """Set the slot FREE and close it. Raises what `set_state` raises, after the slot is closed."""
        try:
            self.set_state(SlotState.FREE)
        finally:
            self.close()

    def close(self) -> None:
        os.close(self.fd)


def payload_pieces(
    source: PayloadSource, start: int, stop: int, piece_bytes: int = _READ_BYTES
) -> Iterator[memoryview]:
    """Yield the payload from byte `start` to `stop` in order.

    All pieces share one buffer, so a piece is valid only until the next one is requested. Raises what
    `source.read_into` raises.
    """
    buffer = memoryview(bytearray(min(piece_bytes, max(stop - start, 1))))
    for position in range(start, stop, len(buffer)):
        piece = buffer[: min(len(buffer), stop - position)]
        source.read_into(position, piece)
        yield piece


def list_slots(directory: Path) -> tuple[str, ...]:
    """Return the sorted names of slot files. Other entries are ignored.

    A directory that is missing or cannot be listed counts as empty: its owner may replace it or remove its
    permissions at any time, and a seal must not fail because of that. At most `MAX_SLOTS` names are
    returned, because callers open each of them.
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


class SlotTarget(Protocol):
    """The slot that a fill writes: a `SlotFile`, or a guard around one."""

    def header(self) -> SlotHeader: ...

    def write_header(self, header: SlotHeader) -> None: ...

    def write_payload(self, offset: int, data: memoryview) -> None: ...


def kept_slot(
    offered: Iterable[str],
    ref: ShardRef,
    payload_bytes: int,
    open_slot: Callable[[str], SlotFile],
    take: Callable[[SlotFile], bool],
    node: NodeTier | None = None,
) -> str | None:
    """Return the first offered slot that holds a shard, or None. A slot that cannot be used is passed over.

    Args:
        offered: Names of the offered slots.
        ref, payload_bytes: The shard.
        open_slot: Opens a slot.
        take: Makes a slot that holds the shard FREE, or returns False if it is in use.
        node: The tier with the shard, against which every byte is verified. None: only the header is read.
    """
    for name in offered:
        try:
            with closing(open_slot(name)) as slot:
                header = slot.header()
                found = (header.round, header.step, header.payload_bytes)
                if (
                    header.state is not SlotState.FILLING
                    and found == (ref.round, ref.step, payload_bytes)
                    and (node is None or slot_holds(slot, node, ref, payload_bytes))
                    and take(slot)
                ):
                    return name
        except (FormatError, TierError) as error:
            _LOG.warning("slot %s cannot be used: %s", name, error)
    return None


def first_fitting(
    names: Iterable[str], payload_bytes: int, capacity_of: Callable[[str], int | None]
) -> str:
    """Return the first offered slot that is large enough.

    Args:
        names: Names of the offered slots.
        payload_bytes: Bytes that the slot must hold.
        capacity_of: Returns the capacity of a slot in bytes, or None if the slot is in use.

    Raises:
        CapacityError: No offered slot is free and large enough.
    """
    found: list[str] = []
    for name in names:
        capacity_bytes = capacity_of(name)
        if capacity_bytes is not None and capacity_bytes >= payload_bytes:
            return name
        found.append(f"{name}: {'in use' if capacity_bytes is None else f'{capacity_bytes} bytes'}")
    raise CapacityError(
        f"no slot for a shard of {payload_bytes} bytes: {', '.join(found) or 'none offered'}"
    )


def begin_shard(target: SlotTarget, ref: ShardRef, payload_bytes: int) -> SlotHeader:
    """Mark the slot as incomplete. Return the slot header to write at the end, which names the shard."""
    free = _begin(target)
    return replace(free, round=ref.round, step=ref.step, payload_bytes=payload_bytes)


def begin_assembly(target: SlotTarget, wanted: RankLayout) -> SlotHeader:
    """Mark the slot as incomplete and write the header of the wanted payload.

    Returns:
        The slot header to write at the end. It makes the slot FREE and names no shard, because an
        assembled payload is not a shard of any step.

    Raises:
        FormatError: `wanted` is not a valid layout of a payload.
    """
    plan = payload_plan(wanted)
    free = _begin(target)
    target.write_payload(0, memoryview(plan.header))
    return free


def _begin(target: SlotTarget) -> SlotHeader:
    """Set the slot FILLING without an identity. Return the header that makes it FREE again."""
    header = target.header()
    target.write_header(SlotHeader(SlotState.FILLING, header.rank, header.capacity_bytes))
    return SlotHeader(SlotState.FREE, header.rank, header.capacity_bytes)


_CACHED_BYTES = 512 << 10
"""Bytes of one read. They fit into the processor's cache, where the checksum reads them again."""
_TWO_THREADS_FROM_CHUNKS = 4
"""Number of chunks from which two threads verify a slot."""


def slot_holds(slot: SlotFile, node: NodeTier, ref: ShardRef, payload_bytes: int) -> bool:
    """Return whether the slot's payload is that of the shard `ref`.

    Every byte is verified: against the shard's chunk table where the node tier has the shard (four times
    as fast), otherwise with BLAKE3. Raises what `SlotFile.read_into` raises.
    """
    try:
        with node.open_shard(ref) as reader:
            return _agrees(slot, reader)
    except (NotFoundError, CorruptionError):
        return slot.payload_digest(payload_bytes) == ref.blake3


def _agrees(slot: SlotFile, reader: ShardReader) -> bool:
    header, crcs = reader.record.header, reader.table.crcs

    def agree(chunks: range) -> bool:
        found = ChunkCrcs(header.chunk_bytes)
        stop = min(chunks.stop * header.chunk_bytes, header.payload_bytes)
        for piece in slot.pieces(chunks.start * header.chunk_bytes, stop, _CACHED_BYTES):
            found.update(piece)
        return found.finish() == crcs[chunks.start : chunks.stop]

    half = len(crcs) // 2
    if len(crcs) < _TWO_THREADS_FROM_CHUNKS:
        return agree(range(len(crcs)))
    with ThreadPoolExecutor(1, "holdfast-slot-check") as helper:
        other = helper.submit(agree, range(half, len(crcs)))
        return agree(range(half)) and other.result()
