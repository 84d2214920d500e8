"""The contract of the tiers: what the sidecar and the standalone SDK program against.

All calls block (disk or network); callers in asyncio use a bounded executor. Methods raise only
errors of holdfast_core.errors. Every method that writes is durable when it returns and idempotent:
after an unknown outcome the caller repeats it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self

from holdfast_core.ids import ByteRange, CheckpointId, Digest, JobUid, ShardRef
from holdfast_core.shards.chunk_table import ChunkTable
from holdfast_core.shards.file import Trailer
from holdfast_core.shards.record import CHUNK_BYTES, ShardHeader, ShardRecord

__all__ = [
    "CHUNK_BYTES",
    "CopyWriter",
    "NodeTier",
    "ObjectTier",
    "OpenWriter",
    "PayloadSource",
    "ShardHeader",
    "ShardReader",
    "ShardRecord",
    "ShardSource",
]


class PayloadSource(Protocol):
    """Random access to payload bytes that do not change while they are read."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` wholly from payload offset `offset`."""
        ...


class ShardReader(Protocol):
    """An open shard. Reads are verified against the chunk table as they go."""

    @property
    def record(self) -> ShardRecord: ...

    @property
    def table(self) -> ChunkTable: ...

    @property
    def fd(self) -> int:
        """Descriptor of the whole shard file (file_bytes long), to sendfile or send in slices."""
        ...

    def read_payload_into(self, offset: int, buffer: memoryview) -> None:
        """Chunk-verified read; offset on a chunk boundary, length whole chunks or up to the end.
        Raises CorruptionError."""
        ...

    def read_payload(self) -> Generator[memoryview]:
        """The payload in order, in pieces of some MiB. A piece is valid until the next one is asked
        for; meanwhile it is digested and the next one is read. Each chunk's CRC is compared with the
        table when it has passed, and the payload's BLAKE3 after the last one.
        Raises CorruptionError: nothing that came before is to be used. Close it, if not read to
        its end."""
        ...

    def read_file(self, ranges: Iterable[ByteRange]) -> Generator[memoryview]:
        """Like `read_payload`, for ranges of the whole file of at most 4 MiB each, unverified. A
        view is shorter where the file ends."""
        ...

    def verify(self) -> None:
        """Read everything: chunk CRCs and the BLAKE3 of the payload. Raises CorruptionError."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class ShardSource(Protocol):
    """A shard that is read in ranges of whole chunks, wherever it lies. One thread at a time."""

    @property
    def trailer(self) -> Trailer:
        """Identity and chunk table. Bound to the digest in the ref that was opened; in shards of
        version 1 it is not: compare `chunk_table` with the manifest's."""
        ...

    def read(self, wanted: Iterable[range]) -> Generator[memoryview]:
        """The bytes of each run of chunks, in order; every chunk is what the table says. A view is
        valid until the next one is asked for. Runs are taken from `wanted` some ahead, and what is
        read ahead is bounded: in runs, so ask for runs of some MiB. Close it, if not read to its
        end. Raises CorruptionError (the copy is bad), NotFoundError, UnavailableError."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class CopyWriter(Protocol):
    """Receives the bytes of a whole shard file, in order, into a temporary file."""

    @property
    def offset(self) -> int:
        """Bytes received so far."""
        ...

    def room(self, length: int) -> memoryview:
        """Where the next `length` bytes (at most 4 MiB) may be received into, without a copy. They
        count only after `advance(length)`; until then the room may be asked for again."""
        ...

    def advance(self, length: int) -> None:
        """The room that was given last, of this length, is filled. Raises what `write` raises."""
        ...

    def write(self, data: memoryview | bytes) -> None:
        """Raises CorruptionError as soon as the bytes cannot be the shard; the copy is gone."""
        ...

    def commit(self) -> ShardRecord:
        """Verify identity, chunk CRCs and BLAKE3 against the ref that was asked for, then make it
        durable under its name. Raises CorruptionError (and leaves nothing behind)."""
        ...

    def abort(self) -> None: ...


class NodeTier(Protocol):
    """Shards of this pod's ranks and peers' copies on the node's disk."""

    def write_shard(self, header: ShardHeader, source: PayloadSource) -> ShardRecord:
        """One pass over the payload: chunk CRC32C, BLAKE3, write, fsync, rename, fsync directory.
        Raises CapacityError before any byte is written when it would not fit."""
        ...

    def begin_copy(self, ref: ShardRef, file_bytes: int) -> CopyWriter:
        """Raises CapacityError. A shard that is there already: see `find` first."""
        ...

    def find(self, ref: ShardRef) -> ShardRecord | None: ...

    def list_shards(self) -> tuple[ShardRecord, ...]: ...

    def open_shard(self, ref: ShardRef) -> ShardReader:
        """Raises NotFoundError, CorruptionError (identity in the file is not that of the ref)."""
        ...

    def put_manifest(self, job_uid: JobUid, checkpoint: CheckpointId, document: bytes) -> Digest:
        """put-if-absent. Raises AlreadyExistsError if another document is there."""
        ...

    def get_manifest(self, job_uid: JobUid, checkpoint: CheckpointId) -> bytes:
        """Raises NotFoundError."""
        ...

    def list_manifests(self) -> tuple[tuple[JobUid, CheckpointId], ...]: ...

    def put_layout(self, document: bytes) -> Digest: ...

    def get_layout(self, digest: Digest) -> bytes: ...

    def delete_checkpoint(self, job_uid: JobUid, checkpoint: CheckpointId) -> None:
        """Manifest first (tombstone), then shards. Tolerates absence."""
        ...

    def delete_shard(self, ref: ShardRef) -> None: ...

    def quarantine(self, ref: ShardRef, reason: str) -> None:
        """Rename the bad copy away: kept for people, never read again."""
        ...

    def quarantine_manifest(self, job_uid: JobUid, checkpoint: CheckpointId, reason: str) -> None:
        """The same for a manifest: the checkpoint does not exist here until it is put again. Tolerates
        absence."""
        ...

    def quarantine_layout(self, digest: Digest, reason: str) -> None:
        """The same for a layout."""
        ...

    def free_bytes(self) -> int:
        """What may still be written within the budget."""
        ...


class ObjectTier(Protocol):
    """The object store. Keys: format.keys. `namespace` and `job_uid`: whose checkpoint it is."""

    def upload_shard(self, namespace: str, reader: ShardReader) -> None:
        """Multipart or single PUT with signed CRC32C, HEAD after. Idempotent. Retries inside."""
        ...

    def download_shard(self, namespace: str, ref: ShardRef, open_writer: OpenWriter) -> ShardRecord:
        """Ranged, resumed GETs into the writer of `open_writer(ref, file_bytes)`; commits it."""
        ...

    def open_shard(self, namespace: str, ref: ShardRef) -> ShardSource:
        """Its chunk table is here when this returns; ranges are fetched as they are read. Raises
        NotFoundError, CorruptionError, UnavailableError."""
        ...

    def put_manifest(
        self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId, document: bytes
    ) -> Digest:
        """put-if-absent; AlreadyExistsError if another document is there."""
        ...

    def get_manifest(self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> bytes: ...

    def list_manifests(self, namespace: str, job_uid: JobUid) -> tuple[CheckpointId, ...]: ...

    def put_layout(self, namespace: str, job_uid: JobUid, document: bytes) -> Digest: ...

    def get_layout(self, namespace: str, job_uid: JobUid, digest: Digest) -> bytes: ...

    def list_layouts(
        self, namespace: str, job_uid: JobUid, older_than: timedelta
    ) -> frozenset[Digest]:
        """Layouts that were written so long ago by the store's own clock."""
        ...

    def delete_layout(self, namespace: str, job_uid: JobUid, digest: Digest) -> None:
        """Tolerates absence."""
        ...

    def delete_checkpoint(self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> None:
        """Manifest first, then its shards."""
        ...


class OpenWriter(Protocol):
    def __call__(self, ref: ShardRef, file_bytes: int) -> CopyWriter: ...
