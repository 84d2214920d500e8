"""Wrappers that inject faults into any tier. For tests only.

A Fault names an operation, when it applies, and its effect: an error, a delay, or a flipped bit in the
bytes that pass. An operation is a method of the tier, or `copy.write`, `copy.commit`, `read` or `verify` of
its writers and readers.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from holdfast_core.closing import Closing
from holdfast_core.errors import CorruptionError, HoldfastError, UnavailableError
from holdfast_core.ids import ByteRange, CheckpointId, Digest, JobUid, ShardRef
from holdfast_core.shards.file import ChunkTable, ShardHeader, ShardRecord, Trailer
from holdfast_core.tiers.base import (
    CopyWriter,
    NodeTier,
    PayloadSource,
    ShardReader,
    ShardSource,
)
from holdfast_core.tiers.objects import ObjectSource, ObjectStore, Page


class FaultKind(StrEnum):
    ERR = "err"
    DELAY = "delay"
    FLIP = "flip"


@dataclass(frozen=True, slots=True)
class Fault:
    operation: str
    kind: FaultKind
    first: int = 1
    """Number of the first call that the fault hits, counted per operation from 1."""
    times: int | None = None
    """Number of calls that the fault hits; None for all from `first` on."""
    error: HoldfastError | None = None
    """Error that ERR raises; None for an UnavailableError."""
    seconds: float = 0.0


class Faults:
    """Set of faults that counts calls and applies the faults that are due.

    It is thread-safe; faults may be added and cleared at any time.
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._faults = list(faults)
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> None:
        """Add a fault. Its `first` counts all calls of the operation, including earlier ones."""
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()

    def calls(self, operation: str) -> int:
        with self._lock:
            return self._calls[operation]

    def strike(self, operation: str) -> bool:
        """Count a call and raise or wait as the faults require. Returns whether to flip a bit."""
        with self._lock:
            self._calls[operation] += 1
            call = self._calls[operation]
            struck = [f for f in self._faults if f.operation == operation and _due(f, call)]
        flip = False
        for fault in struck:
            match fault.kind:
                case FaultKind.DELAY:
                    time.sleep(fault.seconds)
                case FaultKind.FLIP:
                    flip = True
                case FaultKind.ERR:
                    raise fault.error or UnavailableError(f"fault: {operation} call {call}")
        return flip


class FaultyNodeTier:
    """NodeTier that fails by the rules of `faults`."""

    def __init__(self, inner: NodeTier, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def write_shard(self, header: ShardHeader, source: PayloadSource) -> ShardRecord:
        self._faults.strike("write_shard")
        return self._inner.write_shard(header, source)

    def begin_copy(self, ref: ShardRef, file_bytes: int) -> CopyWriter:
        self._faults.strike("begin_copy")
        return FaultyCopyWriter(self._inner.begin_copy(ref, file_bytes), self._faults)

    def find(self, ref: ShardRef) -> ShardRecord | None:
        self._faults.strike("find")
        return self._inner.find(ref)

    def list_shards(self) -> tuple[ShardRecord, ...]:
        self._faults.strike("list_shards")
        return self._inner.list_shards()

    def open_shard(self, ref: ShardRef) -> ShardReader:
        self._faults.strike("open_shard")
        return FaultyShardReader(self._inner.open_shard(ref), self._faults)

    def put_manifest(self, job_uid: JobUid, checkpoint: CheckpointId, document: bytes) -> Digest:
        self._faults.strike("put_manifest")
        return self._inner.put_manifest(job_uid, checkpoint, document)

    def get_manifest(self, job_uid: JobUid, checkpoint: CheckpointId) -> bytes:
        flip = self._faults.strike("get_manifest")
        return _flipped(self._inner.get_manifest(job_uid, checkpoint), flip)

    def list_manifests(self) -> tuple[tuple[JobUid, CheckpointId], ...]:
        self._faults.strike("list_manifests")
        return self._inner.list_manifests()

    def keep_layout(self, digest: Digest) -> bool:
        self._faults.strike("keep_layout")
        return self._inner.keep_layout(digest)

    def put_layout(self, document: bytes) -> Digest:
        self._faults.strike("put_layout")
        return self._inner.put_layout(document)

    def get_layout(self, digest: Digest) -> bytes:
        flip = self._faults.strike("get_layout")
        return _flipped(self._inner.get_layout(digest), flip)

    def delete_checkpoint(self, job_uid: JobUid, checkpoint: CheckpointId) -> None:
        self._faults.strike("delete_checkpoint")
        self._inner.delete_checkpoint(job_uid, checkpoint)

    def delete_shard(self, ref: ShardRef) -> None:
        self._faults.strike("delete_shard")
        self._inner.delete_shard(ref)

    def quarantine(self, ref: ShardRef, damage: CorruptionError) -> None:
        self._faults.strike("quarantine")
        self._inner.quarantine(ref, damage)

    def quarantine_manifest(
        self, job_uid: JobUid, checkpoint: CheckpointId, damage: CorruptionError
    ) -> None:
        self._faults.strike("quarantine_manifest")
        self._inner.quarantine_manifest(job_uid, checkpoint, damage)

    def quarantine_layout(self, digest: Digest, damage: CorruptionError) -> None:
        self._faults.strike("quarantine_layout")
        self._inner.quarantine_layout(digest, damage)

    def free_bytes(self) -> int:
        self._faults.strike("free_bytes")
        return self._inner.free_bytes()


class FaultyObjectStore:
    """ObjectStore that fails by the rules of `faults`. The operation of `read_into` is `read`."""

    def __init__(self, inner: ObjectStore, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    @property
    def name(self) -> str:
        return self._inner.name

    def write(self, key: str, source: ObjectSource, *, replace: bool = False) -> None:
        self._faults.strike("write")
        self._inner.write(key, source, replace=replace)

    def get(self, key: str) -> bytes:
        flip = self._faults.strike("get")
        return _flipped(self._inner.get(key), flip)

    def read_into(
        self, key: str, start: int, buffer: memoryview, stopped: threading.Event | None = None
    ) -> None:
        flip = self._faults.strike("read")
        self._inner.read_into(key, start, buffer, stopped)
        if flip and len(buffer):
            buffer[len(buffer) // 2] ^= 1

    def size(self, key: str, *, sure: bool = False) -> int | None:
        self._faults.strike("size")
        return self._inner.size(key, sure=sure)

    def list(self, prefix: str, page: str = "", *, folders: bool = False) -> Page:
        self._faults.strike("list")
        return self._inner.list(prefix, page, folders=folders)

    def delete(self, keys: Sequence[str]) -> None:
        self._faults.strike("delete")
        self._inner.delete(keys)

    def abort_stale(self, prefixes: Collection[str], older_than: timedelta) -> int:
        self._faults.strike("abort_stale")
        return self._inner.abort_stale(prefixes, older_than)

    def close(self) -> None:
        self._inner.close()


class FaultyCopyWriter:
    def __init__(self, inner: CopyWriter, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._room = memoryview(b"")

    @property
    def offset(self) -> int:
        return self._inner.offset

    def room(self, length: int) -> memoryview:
        self._room = self._inner.room(length)
        return self._room

    def advance(self, length: int) -> None:
        if self._faults.strike("copy.write") and length:
            self._room[length // 2] ^= 1
        self._inner.advance(length)

    def write(self, data: memoryview | bytes) -> None:
        flip = self._faults.strike("copy.write")
        self._inner.write(_flipped(bytes(data), True) if flip else data)

    def commit(self) -> ShardRecord:
        self._faults.strike("copy.commit")
        return self._inner.commit()

    def abort(self) -> None:
        self._inner.abort()


class FaultySource(Closing):
    """Shard source with faults.

    A fault hits after a piece was read and verified: an error replaces the piece, and a flip changes its
    bytes.
    """

    def __init__(self, inner: ShardSource, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    @property
    def trailer(self) -> Trailer:
        return self._inner.trailer

    def read(self, wanted: Iterable[range]) -> Generator[memoryview]:
        for view in self._inner.read(wanted):
            flip = self._faults.strike("read")
            yield memoryview(_flipped(bytes(view), True)) if flip else view

    def close(self) -> None:
        self._inner.close()


class FaultyShardReader(Closing):
    """Shard reader with faults.

    A flip changes bytes after the inner tier has verified them, as a memory fault would.
    """

    def __init__(self, inner: ShardReader, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    @property
    def size_bytes(self) -> int:
        return self.record.file_bytes

    @property
    def record(self) -> ShardRecord:
        return self._inner.record

    @property
    def table(self) -> ChunkTable:
        return self._inner.table

    @property
    def fd(self) -> int:
        return self._inner.fd

    def read_payload_into(self, offset: int, buffer: memoryview) -> None:
        flip = self._faults.strike("read")
        self._inner.read_payload_into(offset, buffer)
        if flip and len(buffer):
            buffer[len(buffer) // 2] ^= 1

    def read_payload(self) -> Generator[memoryview]:
        for view in self._inner.read_payload():
            yield self._struck(view)

    def read_file(self, ranges: Iterable[ByteRange]) -> Generator[memoryview]:
        for view in self._inner.read_file(ranges):
            yield self._struck(view)

    def _struck(self, view: memoryview) -> memoryview:
        flip = self._faults.strike("read")
        return memoryview(_flipped(bytes(view), True)) if flip else view

    def verify(self) -> None:
        self._faults.strike("verify")
        self._inner.verify()

    def close(self) -> None:
        self._inner.close()


def _due(fault: Fault, call: int) -> bool:
    return call >= fault.first and (fault.times is None or call < fault.first + fault.times)


def _flipped(data: bytes, flip: bool) -> bytes:
    if not flip or not data:
        return data
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)
