"""Interfaces of the tiers that the sidecar and the standalone SDK use.

All calls block on disk or network; asyncio code calls them in a bounded executor. Methods raise errors
of holdfast_core.errors only, except where an argument violates the method's contract. What a method
wrote is durable when it returns. Writes are idempotent: after an unknown outcome the caller repeats
the call.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Protocol

from holdfast_core.errors import CorruptionError
from holdfast_core.ids import ByteRange, CheckpointId, Digest, JobUid, ShardRef
from holdfast_core.shards.file import CHUNK_BYTES, ChunkTable, ShardHeader, ShardRecord, Trailer
from holdfast_core.tasks import Closing

__all__ = [
    "CHUNK_BYTES",
    "CopyWriter",
    "NodeTier",
    "OpenWriter",
    "PayloadSource",
    "ShardHeader",
    "ShardReader",
    "ShardRecord",
    "ShardSource",
]


class PayloadSource(Protocol):
    """Random access to a payload. Its bytes must not change while they are read."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` with the payload's bytes from `offset` on."""
        ...

    def verified(self, byte_count: int) -> None:
        """Note that so many more bytes of the written file were read back."""
        ...


class ShardReader(Closing, Protocol):
    """An open shard. Payload reads are verified against the chunk table."""

    @property
    def record(self) -> ShardRecord: ...

    @property
    def table(self) -> ChunkTable: ...

    @property
    def fd(self) -> int:
        """Descriptor of the whole shard file, for sendfile or pread."""
        ...

    @property
    def size_bytes(self) -> int:
        """Length of the whole shard file."""
        ...

    def read_payload_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from payload offset `offset` and verify the CRC32C of each chunk.

        Args:
            offset: Payload offset in bytes, on a chunk boundary.
            buffer: As long as whole chunks, or as the rest of the payload.

        Raises:
            CorruptionError: A chunk does not match the chunk table. The buffer must not be used.
            ValueError: `offset` or the length is not on a chunk boundary.
        """
        ...

    def read_payload(self) -> Generator[memoryview]:
        """Yield the payload in order, in pieces of some MiB.

        A piece is valid until the next one is requested. Meanwhile it is digested and the next one is
        read. All digests are compared after the last piece. The caller closes the generator if it does
        not read to the end.

        Raises:
            CorruptionError: A digest does not match. No piece that was yielded may be used.
        """
        ...

    def read_file(self, ranges: Iterable[ByteRange]) -> Generator[memoryview]:
        """Yield the bytes of each range of the shard file, in order and unverified.

        A range is at most 4 MiB long. A view is shorter if the file ends within its range, and it is
        valid until the next one is requested. The caller closes the generator if it does not read to
        the end.
        """
        ...

    def verify(self) -> None:
        """Read the whole shard and compare chunk CRCs and the payload's BLAKE3.

        Raises CorruptionError.
        """
        ...


class ShardSource(Closing, Protocol):
    """A shard in any tier that is read in ranges of whole chunks. Not thread-safe."""

    @property
    def trailer(self) -> Trailer:
        """Identity and chunk table of the shard.

        The chunks' BLAKE3 digests are verified against the ref that was opened. The CRCs of the table
        are not part of that digest: compare `record.chunk_table` with the manifest's.
        """
        ...

    def read(self, wanted: Iterable[range]) -> Generator[memoryview]:
        """Yield the bytes of each run of chunks, in order, verified against the chunk table.

        A view is valid until the next one is requested. The source reads ahead: it takes later runs
        from `wanted` before they are requested. The caller closes the generator if it does not read
        to the end.

        Args:
            wanted: Runs of consecutive chunks, of some MiB each, because whole runs are read ahead.

        Raises:
            CorruptionError: This copy is bad.
            NotFoundError: The copy does not exist any more.
            UnavailableError: The tier cannot be reached now.
        """
        ...


class CopyWriter(Protocol):
    """Writer of a copy: takes the bytes of a whole shard file, in order, into a temporary file."""

    @property
    def offset(self) -> int:
        """Number of bytes of the file written so far."""
        ...

    def room(self, length: int) -> memoryview:
        """Return a buffer into which the caller can receive the next `length` bytes, at most 4 MiB.

        The bytes are taken over by `advance(length)`. Before that, `room` may be called again.
        """
        ...

    def advance(self, length: int) -> None:
        """Take over the buffer of the last `room(length)`, which the caller has filled.

        Raises the errors of `write`.
        """
        ...

    def write(self, data: memoryview | bytes) -> None:
        """Append the next bytes of the file.

        Raises CorruptionError as soon as the bytes cannot belong to the shard. After any error the copy
        is aborted.
        """
        ...

    def commit(self) -> ShardRecord:
        """Verify identity, chunk CRCs and BLAKE3 against the ref, then publish the file durably.

        Raises CorruptionError. After any error the temporary file is removed.
        """
        ...

    def abort(self) -> None:
        """Remove the temporary file. Has no effect after commit or abort."""
        ...


class NodeTier(Protocol):
    """Tier on the node's disk: the shards of this pod's ranks and copies of other pods' shards."""

    def write_shard(self, header: ShardHeader, source: PayloadSource) -> ShardRecord:
        """Digest and write the payload in one pass, and publish the shard durably.

        If the same shard exists already, it is digested and compared, not written again.

        Raises:
            CapacityError: The budget or the volume has no room for the shard. It is not published.
            AlreadyExistsError: The tier holds another payload with this identity.
        """
        ...

    def begin_copy(self, ref: ShardRef, file_bytes: int) -> CopyWriter:
        """Reserve `file_bytes` and return the writer of a copy.

        The caller checks with `find` first: a copy that exists already is replaced. Raises
        CapacityError.
        """
        ...

    def find(self, ref: ShardRef) -> ShardRecord | None:
        """Return the record of the shard, or None if the tier does not hold it."""
        ...

    def list_shards(self) -> tuple[ShardRecord, ...]: ...

    def open_shard(self, ref: ShardRef) -> ShardReader:
        """Open a shard. The payload is verified when it is read.

        Raises:
            NotFoundError: The tier does not hold the shard.
            CorruptionError: Head or trailer is damaged or has another identity than `ref`.
        """
        ...

    def put_manifest(self, job_uid: JobUid, checkpoint: CheckpointId, document: bytes) -> Digest:
        """Write the manifest, put-if-absent, and return its digest.

        Raises AlreadyExistsError if a different manifest of this checkpoint exists.
        """
        ...

    def get_manifest(self, job_uid: JobUid, checkpoint: CheckpointId) -> bytes:
        """Return the document. Raises NotFoundError, CorruptionError."""
        ...

    def list_manifests(self) -> tuple[tuple[JobUid, CheckpointId], ...]: ...

    def checkpoints(self, job_uid: JobUid) -> frozenset[CheckpointId]:
        """Return the checkpoints of a job whose manifest is here."""
        ...

    def put_layout(self, document: bytes) -> Digest:
        """Write the layout unless it exists, keep it, and return its digest."""
        ...

    def keep_layout(self, digest: Digest) -> bool:
        """Return whether the tier has the layout, verified, and keep it for a shard that is stored next.

        A process calls this or `put_layout` before it stores a shard that names the layout. The tier may
        delete a layout that no shard and no manifest names, and that was not kept for a long time.
        """
        ...

    def get_layout(self, digest: Digest) -> bytes:
        """Return the document. Raises NotFoundError, CorruptionError."""
        ...

    def delete_checkpoint(self, job_uid: JobUid, checkpoint: CheckpointId) -> None:
        """Delete the manifest durably, then the shards. Absent files are not an error."""
        ...

    def delete_shard(self, ref: ShardRef) -> None:
        """Delete the shard durably. An absent shard is not an error."""
        ...

    def quarantine(self, ref: ShardRef, damage: CorruptionError) -> None:
        """Move a bad copy to quarantine. It is kept for inspection and is not read again.

        A disk that refuses the move is no error: the file stays in place until the next start finds it.
        A copy that cannot be read (UnreadableError) stays where it is and in the list. `find` does not return
        it for a minute.
        """
        ...

    def quarantine_manifest(
        self, job_uid: JobUid, checkpoint: CheckpointId, damage: CorruptionError
    ) -> None:
        """Move a bad manifest to quarantine. Its checkpoint does not exist here until it is put again.

        An absent manifest is not an error, and one that cannot be read (UnreadableError) stays in place.
        """
        ...

    def quarantine_layout(self, digest: Digest, damage: CorruptionError) -> None:
        """Move a bad layout to quarantine, as `quarantine_manifest` does."""
        ...

    def free_bytes(self) -> int:
        """Return how many bytes may still be written within the budget."""
        ...


class OpenWriter(Protocol):
    """Function that opens the writer of a download."""

    def __call__(self, ref: ShardRef, file_bytes: int) -> CopyWriter: ...
