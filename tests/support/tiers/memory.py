"""A node tier in memory for tests, with the same contract and the same bytes, but without durability."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterable

from holdfast_core.closing import Closing
from holdfast_core.errors import (
    AlreadyExistsError,
    CapacityError,
    CorruptionError,
    NotFoundError,
    StaleRoundError,
)
from holdfast_core.format.digest import crc32c, digest_of
from holdfast_core.ids import ByteRange, CheckpointId, Digest, JobUid, RestartRound, ShardRef
from holdfast_core.shards.file import (
    ChunkTable,
    ShardHeader,
    ShardRecord,
    Trailer,
    align,
    check_header,
    check_trailer,
    file_bytes,
    head_bytes,
    pack_head,
    pack_trailer,
    trailer_offset,
    unpack_head,
    unpack_trailer,
)
from holdfast_core.shards.stream import PayloadDigester, ShardStream, check_ref
from holdfast_core.tiers.base import PayloadSource


class MemoryTier:
    """NodeTier over dicts. With `capacity_bytes` None its capacity is unlimited."""

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = threading.RLock()
        self._files: dict[ShardRef, tuple[ShardRecord, bytes]] = {}
        self._manifests: dict[tuple[JobUid, CheckpointId], bytes] = {}
        self._layouts: dict[Digest, bytes] = {}
        self._reserved = 0
        self._round: tuple[RestartRound, int] | None = None
        self.quarantined: list[tuple[ShardRef, str]] = []

    def write_shard(self, header: ShardHeader, source: PayloadSource) -> ShardRecord:
        check_header(header)
        data = bytearray(header.payload_bytes)
        with self._lock:
            self._expect_room(file_bytes(header), f"shard of rank {header.rank}")
            source.read_into(0, memoryview(data))
            digester = PayloadDigester(header)
            digester.update(memoryview(data))
            record, table = digester.finish()
            if record.ref in self._files:
                return record
            for other, _ in self._files.values():
                if _identity(other.header) == _identity(header):
                    raise AlreadyExistsError(
                        f"shard of rank {header.rank} step {header.step}: holds {other.blake3}, "
                        f"refused {record.blake3}"
                    )
            body = bytes(data).ljust(align(len(data)), b"\0")
            trailer = pack_trailer(header, record.blake3, table)
            self._files[record.ref] = (record, pack_head(header) + body + trailer)
            return record

    def begin_copy(self, ref: ShardRef, file_bytes: int) -> MemoryCopyWriter:
        with self._lock:
            self._expect_room(file_bytes, f"copy of rank {ref.rank}")
            self._reserved += file_bytes
        return MemoryCopyWriter(self, ref, file_bytes)

    def find(self, ref: ShardRef) -> ShardRecord | None:
        with self._lock:
            found = self._files.get(ref)
        return None if found is None else found[0]

    def list_shards(self) -> tuple[ShardRecord, ...]:
        with self._lock:
            records = [record for record, _ in self._files.values()]
        return tuple(
            sorted(records, key=lambda r: (r.header.job_uid, r.checkpoint, r.header.rank, r.blake3))
        )

    def open_shard(self, ref: ShardRef) -> MemoryShardReader:
        with self._lock:
            found = self._files.get(ref)
        if found is None:
            raise NotFoundError(f"shard of {ref}: not in memory")
        return MemoryShardReader(ref, found[1])

    def put_manifest(self, job_uid: JobUid, checkpoint: CheckpointId, document: bytes) -> Digest:
        with self._lock:
            held = self._manifests.setdefault((job_uid, checkpoint), document)
        if held != document:
            raise AlreadyExistsError(f"manifest {checkpoint}: holds {digest_of(held)}")
        return digest_of(document)

    def get_manifest(self, job_uid: JobUid, checkpoint: CheckpointId) -> bytes:
        with self._lock:
            document = self._manifests.get((job_uid, checkpoint))
        if document is None:
            raise NotFoundError(f"manifest {checkpoint} of {job_uid}: not in memory")
        return document

    def list_manifests(self) -> tuple[tuple[JobUid, CheckpointId], ...]:
        with self._lock:
            return tuple(sorted(self._manifests))

    def put_layout(self, document: bytes) -> Digest:
        digest = digest_of(document)
        with self._lock:
            self._layouts[digest] = document
        return digest

    def keep_layout(self, digest: Digest) -> bool:
        with self._lock:
            return digest in self._layouts

    def get_layout(self, digest: Digest) -> bytes:
        with self._lock:
            document = self._layouts.get(digest)
        if document is None:
            raise NotFoundError(f"layout {digest}: not in memory")
        return document

    def delete_checkpoint(self, job_uid: JobUid, checkpoint: CheckpointId) -> None:
        with self._lock:
            self._manifests.pop((job_uid, checkpoint), None)
            for ref, (record, _) in list(self._files.items()):
                if ref.job_uid == job_uid and record.checkpoint == checkpoint:
                    del self._files[ref]

    def delete_shard(self, ref: ShardRef) -> None:
        with self._lock:
            self._files.pop(ref, None)

    def quarantine(self, ref: ShardRef, damage: CorruptionError) -> None:
        with self._lock:
            if self._files.pop(ref, None) is not None:
                self.quarantined.append((ref, str(damage)))

    def quarantine_manifest(
        self, job_uid: JobUid, checkpoint: CheckpointId, damage: CorruptionError
    ) -> None:
        with self._lock:
            self._manifests.pop((job_uid, checkpoint), None)

    def quarantine_layout(self, digest: Digest, damage: CorruptionError) -> None:
        with self._lock:
            self._layouts.pop(digest, None)

    def read_round(self) -> tuple[RestartRound, int] | None:
        return self._round

    def write_round(self, round: RestartRound, version: int) -> None:
        with self._lock:
            if self._round is not None and self._round > (round, version):
                raise StaleRoundError(
                    f"holds round {self._round}, refused ({round}, {version})",
                    own_round=self._round[0],
                    own_version=self._round[1],
                )
            self._round = (round, version)

    def free_bytes(self) -> int:
        with self._lock:
            if self._capacity_bytes is None:
                return 1 << 50
            used = sum(record.file_bytes for record, _ in self._files.values())
            return max(0, self._capacity_bytes - used - self._reserved)

    def damage(self, ref: ShardRef, position: int) -> None:
        """Invert one bit of a stored file, as a failing disk would."""
        with self._lock:
            record, data = self._files[ref]
            changed = bytearray(data)
            changed[position] ^= 1
            self._files[ref] = (record, bytes(changed))

    def _keep(self, ref: ShardRef, trailer: Trailer, data: bytes) -> None:
        with self._lock:
            self._files[ref] = (trailer.record, data)

    def _give_back(self, size: int) -> None:
        with self._lock:
            self._reserved -= size

    def _expect_room(self, size: int, what: str) -> None:
        free = self.free_bytes()
        if size > free:
            raise CapacityError(f"{what}: needs {size} bytes, {free} available")


class MemoryCopyWriter:
    def __init__(self, tier: MemoryTier, ref: ShardRef, file_bytes: int) -> None:
        self._tier = tier
        self._ref = ref
        self._file_bytes = file_bytes
        self._data = bytearray()
        self._room = memoryview(b"")
        self._stream = ShardStream(ref, file_bytes)
        self._open = True

    @property
    def offset(self) -> int:
        return self._stream.position

    def room(self, length: int) -> memoryview:
        self._room = memoryview(bytearray(length))
        return self._room

    def advance(self, length: int) -> None:
        self.write(self._room[:length])

    def write(self, data: memoryview | bytes) -> None:
        if not self._open:
            raise CorruptionError(f"copy of {self._ref}: was aborted or committed before")
        view = memoryview(data).cast("B")
        try:
            self._stream.feed(view)
        except BaseException:
            self.abort()
            raise
        self._data += view

    def commit(self) -> ShardRecord:
        if not self._open:
            raise CorruptionError(f"copy of {self._ref}: was aborted or committed before")
        try:
            trailer = self._stream.finish()
            self._tier._keep(self._ref, trailer, bytes(self._data))
            return trailer.record
        finally:
            self.abort()

    def abort(self) -> None:
        if self._open:
            self._open = False
            self._tier._give_back(self._file_bytes)


class MemoryShardReader(Closing):
    """ShardReader over the bytes of a file. Its `fd` is a memfd with the same content."""

    def __init__(self, ref: ShardRef, data: bytes) -> None:
        self._ref = ref
        self._data = data
        self._trailer = self._checked()
        self._start = head_bytes(self._trailer.record.header)
        self._fd = os.memfd_create("holdfast-shard", os.MFD_CLOEXEC)
        with open(os.dup(self._fd), "wb") as file:
            file.write(data)
        self._closed = False

    @property
    def size_bytes(self) -> int:
        return self.record.file_bytes

    @property
    def record(self) -> ShardRecord:
        return self._trailer.record

    @property
    def table(self) -> ChunkTable:
        return self._trailer.table

    @property
    def fd(self) -> int:
        return self._fd

    def read_payload_into(self, offset: int, buffer: memoryview) -> None:
        header = self.record.header
        stop = offset + len(buffer)
        whole = stop == header.payload_bytes or stop % header.chunk_bytes == 0
        if offset % header.chunk_bytes or not whole or stop > header.payload_bytes:
            raise ValueError(f"read of [{offset}, {stop}) is not on chunk boundaries")
        for position in range(offset, stop, header.chunk_bytes):
            end = min(position + header.chunk_bytes, stop)
            chunk = self._data[self._start + position : self._start + end]
            if crc32c(chunk) != self.table.crcs[position // header.chunk_bytes]:
                raise CorruptionError(f"shard of {self._ref}: chunk at {position} does not match")
            buffer[position - offset : end - offset] = chunk

    def read_payload(self) -> Generator[memoryview]:
        header = self.record.header
        for start in range(0, header.payload_bytes, header.chunk_bytes):
            length = min(header.chunk_bytes, header.payload_bytes - start)
            view = memoryview(bytearray(length))
            self.read_payload_into(start, view)
            yield view
        self.verify()

    def read_file(self, ranges: Iterable[ByteRange]) -> Generator[memoryview]:
        for wanted in ranges:
            yield memoryview(self._data)[wanted.start : wanted.stop]

    def verify(self) -> None:
        stream = ShardStream(self._ref, len(self._data))
        stream.feed(memoryview(self._data))
        stream.finish()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._fd)

    def _checked(self) -> Trailer:
        """Check head, trailer and identity, but not the payload, as the disk tier's reader does."""
        header = unpack_head(self._data)
        trailer = unpack_trailer(self._data[trailer_offset(header) :])
        check_trailer(header, trailer, len(self._data))
        check_ref(trailer.record, self._ref)
        return trailer


def _identity(header: ShardHeader) -> tuple[object, ...]:
    return (header.job_uid, header.step, header.round, header.rank)
