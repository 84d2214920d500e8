"""The node tier: shards of this pod's ranks and copies of other pods' shards on the node's disk.

This module owns the order of every durable change (docs/guarantees.md R1, R16): temporary file,
preallocation, data, fsync, read-back, rename, fsync of the directory. A manifest is written after its
shards and deleted before them. The module does not decide about rounds or about what may be pruned.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.errors import (
    AlreadyExistsError,
    CapacityError,
    ConfigError,
    CorruptionError,
    NotFoundError,
    TierError,
    UnreadableError,
)
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.keys import (
    LAYOUTS,
    layout_key,
)
from holdfast_core.format.manifest import misnamed
from holdfast_core.ids import (
    CheckpointId,
    Digest,
    JobUid,
    Rank,
    ShardRef,
)
from holdfast_core.node.documents import (
    LOCK_FILE,
    PodRecords,
    UnusedLayouts,
    list_manifests,
    manifest_path,
    mark,
    read_document,
    read_shard,
    shard_path,
    stored_bytes,
    write_document,
)
from holdfast_core.node.files import (
    BufferPool,
    PoisonedError,
    TempFile,
    disk_errors,
    fsync_directory,
    locked,
)
from holdfast_core.node.scan import scan
from holdfast_core.node.shard_file import (
    READ_BACK_EVERY,
    WRITE_BYTES,
    DiskCopyWriter,
    DiskShardReader,
    read_back,
    to_read_back,
    write_payload,
)
from holdfast_core.node.volume import (
    QUARANTINE,
    SPARE,
    VOLUME_ADVICE,
    NodeIndex,
    UnreadableShards,
    Volume,
)
from holdfast_core.shards.file import (
    ShardHeader,
    ShardRecord,
    Trailer,
    check_header,
    chunk_count,
    file_bytes,
)
from holdfast_core.shards.stream import PayloadDigester
from holdfast_core.tiers.base import PayloadSource

_KEPT_BUFFERS = 6
BUFFER_LIMIT_BYTES = 512 << 20
"""Half of the memory that a sidecar may use. Further incoming copies are refused; their senders retry."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenReport:
    """Result of `DiskNodeTier.open`."""

    shards: int
    removed_temporaries: int
    quarantined: tuple[str, ...]
    """The reason for each torn or misplaced file. With `read_only` the files are not moved."""
    skipped: tuple[str, ...]
    """Files that cannot be read, have a newer format version or an unknown name. They stay in place and are
    not indexed."""


class DiskNodeTier:
    """NodeTier in a directory. Thread-safe.

    Files lie under `<root>/<job_uid>/` with the names of holdfast_core.format.keys, and layouts, which
    belong to no job, under `<root>/layouts/`. `open` must be called first.
    """

    def __init__(
        self,
        root: Path,
        *,
        capacity_bytes: int = 0,
        fill_limit: float = 0.85,
        read_only: bool = False,
        name: str = "node tier",
        advice: str = VOLUME_ADVICE,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a closed tier.

        Args:
            root: Directory of the tier. `open` creates it.
            capacity_bytes: Size of the volume; 0 means the size of the file system.
            fill_limit: Share of the capacity that the tier may use.
            read_only: The volume cannot or must not be written: `open` and `quarantine` create, remove
                and move no file.
            name: Name of the tier in messages.
            advice: What the user can do when the tier is full, for messages.
            monotonic: Returns the seconds since any moment.
        """
        if not 0 < fill_limit <= 1 or capacity_bytes < 0:
            raise ConfigError(
                f"{name} {root}: fill limit {fill_limit} of {capacity_bytes} bytes; expected "
                "a limit within (0, 1] and a capacity that is not negative"
            )
        self._root = root
        self._name = name
        self.volume = Volume(root, capacity_bytes, fill_limit, advice)
        self._index = NodeIndex(self.volume.budget)
        self.buffers = BufferPool(WRITE_BYTES, _KEPT_BUFFERS, BUFFER_LIMIT_BYTES)
        self.records = PodRecords(root, self.volume.directories)
        self._unreadable = UnreadableShards(monotonic)
        self._writes = ShardWrites(self.volume, self._index, self.buffers, self._unreadable)
        self._unused_layouts = UnusedLayouts(root, self.buffers)
        self._opened = False
        self._read_only = read_only

    def open(self) -> OpenReport:
        """Create the directories and index the shards that the disk holds. Call it once, first.

        Temporary files of dead processes are removed, and torn shards are quarantined.
        """
        if self._opened:
            raise TierError(f"{self._name} {self._root}: is already open")
        volume = self.volume
        with disk_errors(f"opening the {self._name} {self._root}"):
            if not self._read_only:
                volume.create((QUARANTINE, LAYOUTS, SPARE))
            found = scan(self._root, self.buffers, read_only=self._read_only)
            spare_bytes = volume.spares.count()
        for shard in found.shards:
            self._index.add(shard)
        volume.budget.add(found.other_bytes - spare_bytes)
        for bad in found.torn:
            volume.budget.add(bad.path.lstat().st_size)
            if not self._read_only:
                volume.try_quarantine(bad.path, bad.reason)
        for reason in found.skipped:
            _LOG.warning("%s %s: a file is skipped: %s", self._name, self._root, reason)
        self._opened = True
        return OpenReport(
            shards=len(found.shards),
            removed_temporaries=found.removed_temporaries,
            quarantined=tuple(bad.reason for bad in found.torn),
            skipped=found.skipped,
        )

    # ------------------------------------------------------------------ shards

    def write_shard(self, header: ShardHeader, source: PayloadSource) -> ShardRecord:
        """See NodeTier.

        A write that fails in fsync or read-back is repeated once, to a new file.

        Raises:
            CapacityError: There is no room for the shard.
            AlreadyExistsError: The tier holds another payload with this identity.
            TierError: The disk failed.
        """
        self._expect_open()
        check_header(header)
        return self._writes.write(header, source)

    def begin_copy(self, ref: ShardRef, file_bytes: int) -> DiskCopyWriter:
        """See NodeTier. The bytes stay reserved until commit or abort.

        Raises UnavailableError if too many copies are being received at the same time.
        """
        self._expect_open()
        return self._writes.begin_copy(ref, file_bytes)

    def find(self, ref: ShardRef) -> ShardRecord | None:
        """See NodeTier. A shard that cannot be read is not found for a minute, so that others are used."""
        return None if self._unreadable.why(ref) else self._index.find(ref)

    def look_up(self, ref: ShardRef) -> ShardRecord | None:
        """Like `find`, but also look on the disk for a shard that another process wrote since `open`.

        Raises UnreadableError also for a shard whose payload this process could not read before.
        Raises CorruptionError, FormatError.
        """
        self._expect_open()
        if (unreadable := self._unreadable.why(ref)) is not None:
            raise unreadable
        return _indexed(ref, self._index, self.volume, self.buffers)

    def shard_path(self, ref: ShardRef) -> Path:
        return shard_path(self._root, ref)

    def list_shards(self) -> tuple[ShardRecord, ...]:
        return self._index.records()

    def open_shard(self, ref: ShardRef) -> DiskShardReader:
        self._expect_open()
        if _indexed(ref, self._index, self.volume, self.buffers) is None:
            raise NotFoundError(f"shard of {ref}: not in the {self._name} {self._root}")
        try:
            return DiskShardReader.open(self.shard_path(ref), ref, self.buffers)
        except NotFoundError:
            self._index.forget(ref)
            raise

    def delete_shard(self, ref: ShardRef) -> None:
        """Delete the shard durably, and keep its file for a later write. An absent shard is not an error."""
        self._expect_open()
        if self._index.find(ref) is None:
            return
        volume, path = self.volume, self.shard_path(ref)
        # FileNotFoundError: another program removed the directory.
        with disk_errors(f"deleting shard {path}"), suppress(FileNotFoundError):
            volume.spares.put_aside(path)
        self._index.forget(ref)
        volume.directories.remove_if_empty(path.parent)
        # A rank writes one shard at a time, so that more spare files than ranks would never be taken.
        with disk_errors(f"listing the spare files of {self._root}"):
            volume.spares.trim(len(self._index.ranks()))

    def quarantine(self, ref: ShardRef, damage: CorruptionError) -> None:
        """See NodeTier. An absent shard is not an error. With `read_only` the file stays in place."""
        self._expect_open()
        if isinstance(damage, UnreadableError):
            self._unreadable.note(ref, damage)
            return
        if self._index.remove(ref) is not None and not self._read_only:
            self.volume.try_quarantine(self.shard_path(ref), str(damage))

    def quarantine_manifest(
        self, job_uid: JobUid, checkpoint: CheckpointId, damage: CorruptionError
    ) -> None:
        self._expect_open()
        self.volume.quarantine_document(manifest_path(self._root, job_uid, checkpoint), damage)

    def quarantine_layout(self, digest: Digest, damage: CorruptionError) -> None:
        self._expect_open()
        self.volume.quarantine_document(self._root / layout_key(digest), damage)

    def why_missing(self, ref: ShardRef) -> str:
        """Return why a shard that `look_up` does not find is missing, as far as the disk shows it."""
        why = self.volume.why_quarantined(self.shard_path(ref))
        return why or f"{self.shard_path(ref)} does not exist"

    # ------------------------------------------------------------------ documents

    def put_manifest(self, job_uid: JobUid, checkpoint: CheckpointId, document: bytes) -> Digest:
        """See NodeTier.

        A document at this place that is damaged or belongs to another checkpoint is quarantined first.
        """
        self._expect_open()
        path = manifest_path(self._root, job_uid, checkpoint)
        try:
            self._put(path, document)
        except AlreadyExistsError:
            if (reason := misnamed(read_document(path), job_uid, checkpoint)) is None:
                raise
            self.volume.quarantine(path, reason)
            self._put(path, document)
        return digest_of(document)

    def get_manifest(self, job_uid: JobUid, checkpoint: CheckpointId) -> bytes:
        """Return the document. Raises NotFoundError; CorruptionError if it is damaged on the disk."""
        return read_document(manifest_path(self._root, job_uid, checkpoint))

    def list_manifests(self) -> tuple[tuple[JobUid, CheckpointId], ...]:
        self._expect_open()
        return tuple(list_manifests(self._root))

    def checkpoints(self, job_uid: JobUid) -> frozenset[CheckpointId]:
        """See NodeTier."""
        self._expect_open()
        return checkpoints_in(self._root, job_uid)

    def put_layout(self, document: bytes) -> Digest:
        self._expect_open()
        digest = digest_of(document)
        path = self._root / layout_key(digest)
        with disk_errors(f"writing {path}"), locked(self._root / LOCK_FILE):
            mark(path)
            try:
                self._put(path, document)
            except AlreadyExistsError as error:
                # Its name is a digest, so that another document at this place is a damaged one.
                self.volume.quarantine(path, str(error))
                self._put(path, document)
        return digest

    def keep_layout(self, digest: Digest) -> bool:
        """See NodeTier. The document is read: all later checkpoints would depend on a damaged one."""
        path = self._root / layout_key(digest)
        try:
            self.get_layout(digest)
        except (NotFoundError, CorruptionError):
            return False
        with disk_errors(f"marking {path}"), locked(self._root / LOCK_FILE):
            return mark(path)

    def get_layout(self, digest: Digest) -> bytes:
        """Return the document. Raises NotFoundError; CorruptionError if it does not match its name."""
        path = self._root / layout_key(digest)
        document = read_document(path)
        if digest_of(document) != digest:
            raise CorruptionError(
                f"{path}: the digest of the document is {digest_of(document)}, "
                "which is not its name"
            )
        return document

    def delete_checkpoint(self, job_uid: JobUid, checkpoint: CheckpointId) -> None:
        """Delete the manifest durably, then the shards, then empty directories. See NodeTier."""
        self._expect_open()
        path = manifest_path(self._root, job_uid, checkpoint)
        with disk_errors(f"deleting checkpoint {checkpoint} from {self._root}"):
            if path.is_dir() and not path.is_symlink():
                # It counts as a manifest that cannot be read, and must not stop retention.
                self.volume.quarantine(path, f"{path}: expected a file, found a directory")
            try:
                size = path.lstat().st_size
                sys.audit("holdfast.node.before_tombstone")
                path.unlink()
                fsync_directory(path.parent)
                self.volume.budget.add(-size)
            except FileNotFoundError:
                pass  # an earlier delete may have been interrupted after the manifest
            sys.audit("holdfast.node.after_tombstone")
            for ref in self._index.of_checkpoint(job_uid, checkpoint):
                sys.audit("holdfast.node.before_delete")
                self.delete_shard(ref)
            if path.parent.is_dir():
                self.volume.directories.remove_if_empty(path.parent)
        known = {record.header.layout for record in self._index.records()}
        self.volume.budget.add(-self._unused_layouts.checkpoint_deleted(known))

    # ------------------------------------------------------------------ space

    def free_bytes(self) -> int:
        return self.volume.budget.free_bytes()

    # ------------------------------------------------------------------ inside

    def _put(self, path: Path, document: bytes) -> None:
        size = stored_bytes(document)
        with self.volume.reserve(size, f"document {path.name}"):
            try:
                written = write_document(path, document, self.volume.directories)
            except CorruptionError as error:
                self.volume.quarantine(path, str(error))
                written = write_document(path, document, self.volume.directories)
            if written:
                self.volume.budget.add(size)

    def _expect_open(self) -> None:
        if not self._opened:
            raise TierError(f"{self._name} {self._root}: not open yet; call open() first")


def _indexed(
    ref: ShardRef, index: NodeIndex, volume: Volume, buffers: BufferPool
) -> ShardRecord | None:
    """Return a shard of the index, or one that another process wrote since the tier was opened.

    Raises UnreadableError, CorruptionError, FormatError.
    """
    if (known := index.find(ref)) is not None:
        return known
    path = shard_path(volume.root, ref)
    try:
        record = read_shard(volume.root, path, buffers)
    except FileNotFoundError:
        return None
    if record.ref != ref:
        raise CorruptionError(f"{path}: expected {ref}, found {record.ref}")
    index.add(record)
    return record


def checkpoints_in(root: Path, job_uid: JobUid) -> frozenset[CheckpointId]:
    """Return `NodeTier.checkpoints` of a tier that another process may have opened. Reads names only."""
    return frozenset(checkpoint for uid, checkpoint in list_manifests(root) if uid == job_uid)


_WRITE_ATTEMPTS = 2


_WRITE_LOCKS = 64


class ShardWrites:
    """The writes of one node tier. Thread-safe."""

    def __init__(
        self, volume: Volume, index: NodeIndex, buffers: BufferPool, unreadable: UnreadableShards
    ) -> None:
        self._volume = volume
        self._index = index
        self._buffers = buffers
        self._unreadable = unreadable
        self._lock = threading.Lock()
        self._write_locks = tuple(threading.Lock() for _ in range(_WRITE_LOCKS))
        self._chunks_copied = 0
        self._written: dict[Rank, int] = {}
        """Number of shards that this process has written for each rank."""

    def write(self, header: ShardHeader, source: PayloadSource) -> ShardRecord:
        """See NodeTier.write_shard."""
        # Two writers of one identity run one after the other; the second finds the first one's shard.
        with self._write_locks[header.rank % _WRITE_LOCKS]:
            existing = self._existing(header, source)
            if existing is not None:
                return existing
            return self._twice(header, source)

    def begin_copy(self, ref: ShardRef, file_bytes: int) -> DiskCopyWriter:
        """See NodeTier."""
        directory, volume = shard_path(self._volume.root, ref).parent, self._volume
        what = f"copy of rank {ref.rank} step {ref.step}"
        with ExitStack() as stack:
            spare = volume.take_spare(directory, file_bytes, stack)
            new_bytes = _new_bytes(file_bytes, spare)
            stack.enter_context(volume.reserve(file_bytes, what, new_bytes))
            with disk_errors(f"creating the {what} in {directory}"):
                temp = spare or TempFile.create(directory, volume.directories)
                stack.callback(temp.discard)
                temp.preallocate(file_bytes)
                temp.use_direct_io()
            buffer = stack.enter_context(self._buffers.take_if_room())
            return DiskCopyWriter(
                ref, file_bytes, temp, self._publish_copy, buffer, stack.pop_all()
            )

    def _existing(self, header: ShardHeader, source: PayloadSource) -> ShardRecord | None:
        """Return the record of an earlier write of the same shard, or None.

        The source is digested and compared, not written again. Raises AlreadyExistsError if the tier
        holds only other payloads with this identity.
        """
        known = self._index.same_identity(header)
        if not known:
            return None
        digester = PayloadDigester(header)
        with self._buffers.take() as buffer:
            for offset in range(0, header.payload_bytes, len(buffer)):
                view = buffer[: min(len(buffer), header.payload_bytes - offset)]
                source.read_into(offset, view)
                digester.update(view)
        record, _ = digester.finish()
        if record in known:
            return record
        raise AlreadyExistsError(
            f"shard of rank {header.rank} step {header.step} round {header.round}: the tier has "
            f"payload {known[0].blake3}, refused to write another payload {record.blake3}"
        )

    def _twice(self, header: ShardHeader, source: PayloadSource) -> ShardRecord:
        """Write a shard. The second attempt writes all of it to a new file."""
        size, what = file_bytes(header), f"shard of rank {header.rank} step {header.step}"
        directory, volume = _directory(self._volume.root, header), self._volume
        for attempt in range(_WRITE_ATTEMPTS):
            with ExitStack() as stack:
                spare = volume.take_spare(directory, size, stack) if attempt == 0 else None
                stack.enter_context(volume.reserve(size, what, _new_bytes(size, spare)))
                try:
                    with disk_errors(f"writing the {what}"):
                        temp = spare or TempFile.create(directory, volume.directories)
                        stack.callback(temp.discard)
                        return self._once(temp, header, source)
                except PoisonedError as error:
                    if attempt + 1 == _WRITE_ATTEMPTS:
                        raise
                    _LOG.warning("%s: writing the whole shard again, to a new file", error)
                except CapacityError as error:
                    # The budget does not cover quotas and files of other programs.
                    if attempt + 1 < _WRITE_ATTEMPTS and volume.make_room():
                        continue
                    raise CapacityError(
                        f"{error}: needed {size} bytes, {volume.budget.free_bytes()} available"
                    ) from error
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _once(self, temp: TempFile, header: ShardHeader, source: PayloadSource) -> ShardRecord:
        written = self._written.get(header.rank, 0)
        temp.preallocate(file_bytes(header))
        temp.use_direct_io()
        record, table = write_payload(temp.fd, header, source, self._buffers)
        temp.sync()
        chunks = to_read_back(written, chunk_count(header))
        read_back(temp.fd, record, table, chunks, self._buffers, source.verified)
        self._publish(temp, record)
        self._written[header.rank] = written + 1
        return record

    def _publish_copy(self, temp: TempFile, trailer: Trailer) -> ShardRecord:
        record = trailer.record
        with disk_errors(f"committing the copy of {record.ref}"):
            temp.sync()
            with self._lock:
                start = -self._chunks_copied % READ_BACK_EVERY
                self._chunks_copied += len(trailer.table)
            chunks = range(start, len(trailer.table), READ_BACK_EVERY)
            read_back(temp.fd, record, trailer.table, chunks, self._buffers)
            self._publish(temp, record)
        return record

    def _publish(self, temp: TempFile, record: ShardRecord) -> None:
        path, volume = shard_path(self._volume.root, record.ref), self._volume
        if path.is_dir():  # a rename replaces any file, but no directory
            volume.quarantine(path, f"{path}: expected a file, found a directory")
        temp.publish(path)
        self._unreadable.forget(record.ref)
        self._index.add(record)


def _directory(root: Path, header: ShardHeader) -> Path:
    any_digest = digest_of(b"")
    ref = ShardRef(header.job_uid, header.step, header.round, header.rank, any_digest)
    return shard_path(root, ref).parent


def _new_bytes(size: int, spare: TempFile | None) -> int:
    """Return the bytes that a file of `size` takes from the file system beyond those of the spare file."""
    return size if spare is None else max(0, size - spare.size_bytes)
