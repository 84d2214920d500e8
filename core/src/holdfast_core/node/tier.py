"""The node tier: shards of this pod's ranks and copies of other pods' shards on the node's disk.

This module owns the order of every durable change (docs/guarantees.md R1, R16): temporary file,
preallocation, data, fsync, read-back, rename, fsync of the directory. A manifest is written after its
shards and deleted before them. The module does not decide about rounds or about what may be pruned.
"""

from __future__ import annotations

import logging
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
    HoldfastError,
    NotFoundError,
    TierError,
    UnreadableError,
)
from holdfast_core.failpoint import failpoint
from holdfast_core.format.digest import digest_of
from holdfast_core.format.keys import (
    LAYOUTS,
    checked_job_uid,
    layout_key,
    manifest_key,
    shard_key,
)
from holdfast_core.format.manifest import misnamed
from holdfast_core.ids import (
    CheckpointId,
    Digest,
    JobUid,
    Rank,
    RestartRound,
    ShardRef,
    Worker,
)
from holdfast_core.node.copy import DiskCopyWriter
from holdfast_core.node.documents import (
    read_document,
    read_round,
    read_worker,
    stored_bytes,
    write_document,
    write_round,
    write_worker,
)
from holdfast_core.node.files import (
    BufferPool,
    PoisonedError,
    TempFile,
    disk_errors,
    fsync_directory,
)
from holdfast_core.node.index import VOLUME_ADVICE, IndexEntry, NodeIndex
from holdfast_core.node.layouts import LOCK_FILE, UnusedLayouts, locked, mark
from holdfast_core.node.scan import list_manifests, read_shard, scan
from holdfast_core.node.shard_file import (
    READ_BACK_EVERY,
    WRITE_BYTES,
    DiskShardReader,
    read_back,
    to_read_back,
    write_payload,
)
from holdfast_core.node.spares import SPARE
from holdfast_core.node.volume import QUARANTINE, Volume
from holdfast_core.shards.file import Trailer, check_header, chunk_count, file_bytes
from holdfast_core.shards.record import ShardHeader, ShardRecord
from holdfast_core.shards.stream import PayloadDigester
from holdfast_core.tiers.base import PayloadSource

ROUND_FILE = "round.json"
WORKER_FILE = "worker.json"
_RESERVED = frozenset({QUARANTINE, LAYOUTS, SPARE, ROUND_FILE, LOCK_FILE})
_LOOK_EVERY = 16
"""Unused layouts are looked for each time that so many checkpoints were deleted. A state whose structure
changes at each save leaves a layout for each of them."""
_WRITE_ATTEMPTS = 2
_UNREADABLE_SECONDS = 60.0
"""Time for which other copies are used instead of a shard that could not be read."""
_KEPT_BUFFERS = 6
_BUFFER_LIMIT_BYTES = 512 << 20
"""Half of the memory that a sidecar may use. Further incoming copies are refused; their senders retry."""
_WRITE_LOCKS = 64
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
        self._index = NodeIndex()
        self._name = name
        self._volume = Volume(root, capacity_bytes, fill_limit, advice)
        self._buffers = BufferPool(WRITE_BYTES, _KEPT_BUFFERS, _BUFFER_LIMIT_BYTES)
        self._lock = threading.Lock()
        self._round_lock = threading.Lock()
        self._write_locks = tuple(threading.Lock() for _ in range(_WRITE_LOCKS))
        self._chunks_copied = 0
        self._deleted_checkpoints = 0
        self._unused_layouts = UnusedLayouts(root, _RESERVED, self._buffers)
        self._look_lock = threading.Lock()
        self._written: dict[Rank, int] = {}
        """Number of shards that this process has written for each rank."""
        self._monotonic = monotonic
        self._unreadable: dict[ShardRef, tuple[UnreadableError, float]] = {}
        """Shards whose files this process could not read, why, and when they are tried again. They stay in
        place and in the index: their bytes may be intact, and a listing must not show them as lost."""
        self._opened = False
        self._read_only = read_only

    def open(self) -> OpenReport:
        """Create the directories and index the shards that the disk holds. Call it once, first.

        Temporary files of dead processes are removed, and torn shards are quarantined.
        """
        if self._opened:
            raise TierError(f"{self._name} {self._root}: is already open")
        volume = self._volume
        with disk_errors(f"opening the {self._name} {self._root}"):
            if not self._read_only:
                volume.create((QUARANTINE, LAYOUTS, SPARE))
            found = scan(self._root, _RESERVED, self._buffers, read_only=self._read_only)
            spare_bytes = volume.spares.count()
        for shard in found.shards:
            self._index.add(IndexEntry(shard.record, shard.path))
            volume.budget.add(shard.record.file_bytes)
        volume.budget.add(found.other_bytes - spare_bytes)
        for bad in found.torn:
            volume.budget.add(bad.path.lstat().st_size)
            if not self._read_only:
                volume.quarantine(bad.path, bad.reason)
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
        # Two writers of one identity run one after the other; the second finds the first one's shard.
        with self._write_locks[header.rank % _WRITE_LOCKS]:
            existing = self._existing(header, source)
            if existing is not None:
                return existing
            return self._write_twice(header, source)

    def begin_copy(self, ref: ShardRef, file_bytes: int) -> DiskCopyWriter:
        """See NodeTier. The bytes stay reserved until commit or abort.

        Raises UnavailableError if too many copies are being received at the same time.
        """
        self._expect_open()
        directory, volume = self.shard_path(ref).parent, self._volume
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

    def find(self, ref: ShardRef) -> ShardRecord | None:
        """See NodeTier. A shard that cannot be read is not found for a minute, so that others are used."""
        entry = self._index.find(ref)
        return None if entry is None or self._why_unreadable(ref) else entry.record

    def look_up(self, ref: ShardRef) -> ShardRecord | None:
        """Like `find`, but also look on the disk for a shard that another process wrote since `open`.

        Raises UnreadableError also for a shard whose payload this process could not read before.
        Raises CorruptionError, FormatError.
        """
        self._expect_open()
        found = self.find(ref)
        if found is not None:
            return found
        if (unreadable := self._why_unreadable(ref)) is not None:
            raise unreadable
        path = self.shard_path(ref)
        try:
            record = read_shard(self._root, path, self._buffers)
        except FileNotFoundError:
            return None
        if record.ref != ref:
            raise CorruptionError(f"{path}: expected {ref}, found {record.ref}")
        if self._index.add(IndexEntry(record, path)):
            self._volume.budget.add(record.file_bytes)
        return record

    def list_shards(self) -> tuple[ShardRecord, ...]:
        return self._index.records()

    def open_shard(self, ref: ShardRef) -> DiskShardReader:
        self._expect_open()
        entry = self._index.find(ref)
        if entry is None:
            raise NotFoundError(f"shard of {ref}: not in the {self._name} {self._root}")
        try:
            return DiskShardReader.open(entry.path, ref, self._buffers)
        except NotFoundError:
            self._forget(ref)
            raise

    def delete_shard(self, ref: ShardRef) -> None:
        """Delete the shard durably, and keep its file for a later write. An absent shard is not an error."""
        self._expect_open()
        entry = self._index.find(ref)
        if entry is None:
            return
        volume = self._volume
        # FileNotFoundError: another program removed the directory.
        with disk_errors(f"deleting shard {entry.path}"), suppress(FileNotFoundError):
            volume.spares.put_aside(entry.path)
        self._forget(ref)
        volume.directories.remove_if_empty(entry.path.parent)
        # A rank writes one shard at a time, so that more spare files than ranks would never be taken.
        with disk_errors(f"listing the spare files of {self._root}"):
            volume.spares.trim(len(self._index.ranks()))

    def quarantine(self, ref: ShardRef, damage: CorruptionError) -> None:
        """See NodeTier. An absent shard is not an error. With `read_only` the file stays in place."""
        self._expect_open()
        if isinstance(damage, UnreadableError):
            self._unreadable[ref] = damage, self._monotonic() + _UNREADABLE_SECONDS
            return
        entry = self._index.remove(ref)
        if entry is not None and not self._read_only:
            self._volume.quarantine(entry.path, str(damage))

    def quarantine_manifest(
        self, job_uid: JobUid, checkpoint: CheckpointId, damage: CorruptionError
    ) -> None:
        self._quarantine_document(self._manifest_path(job_uid, checkpoint), damage)

    def quarantine_layout(self, digest: Digest, damage: CorruptionError) -> None:
        self._quarantine_document(self._root / layout_key(digest), damage)

    def why_missing(self, ref: ShardRef) -> str:
        """Return why a shard that `look_up` does not find is missing, as far as the disk shows it."""
        why = self._volume.why_quarantined(self.shard_path(ref))
        return why or f"{self.shard_path(ref)} does not exist"

    # ------------------------------------------------------------------ documents

    def put_manifest(self, job_uid: JobUid, checkpoint: CheckpointId, document: bytes) -> Digest:
        """See NodeTier.

        A document at this place that is damaged or belongs to another checkpoint is quarantined first.
        """
        self._expect_open()
        path = self._manifest_path(job_uid, checkpoint)
        try:
            self._put(path, document)
        except AlreadyExistsError:
            if (reason := misnamed(read_document(path), job_uid, checkpoint)) is None:
                raise
            self._volume.quarantine(path, reason)
            self._put(path, document)
        return digest_of(document)

    def get_manifest(self, job_uid: JobUid, checkpoint: CheckpointId) -> bytes:
        """Return the document. Raises NotFoundError; CorruptionError if it is damaged on the disk."""
        return read_document(self._manifest_path(job_uid, checkpoint))

    def list_manifests(self) -> tuple[tuple[JobUid, CheckpointId], ...]:
        self._expect_open()
        return tuple(list_manifests(self._root, _RESERVED))

    def put_layout(self, document: bytes) -> Digest:
        self._expect_open()
        digest = digest_of(document)
        path = self._root / layout_key(digest)
        with disk_errors(f"writing {path}"), locked(self._root):
            mark(path)
            try:
                self._put(path, document)
            except AlreadyExistsError as error:
                # Its name is a digest, so that another document at this place is a damaged one.
                self._volume.quarantine(path, str(error))
                self._put(path, document)
        return digest

    def keep_layout(self, digest: Digest) -> bool:
        """See NodeTier. The document is read: all later checkpoints would depend on a damaged one."""
        path = self._root / layout_key(digest)
        try:
            self.get_layout(digest)
        except (NotFoundError, CorruptionError):
            return False
        with disk_errors(f"marking {path}"), locked(self._root):
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
        path = self._manifest_path(job_uid, checkpoint)
        with disk_errors(f"deleting checkpoint {checkpoint} from {self._root}"):
            if path.is_dir() and not path.is_symlink():
                # It counts as a manifest that cannot be read, and must not stop retention.
                self._volume.quarantine(path, f"{path}: expected a file, found a directory")
            try:
                size = path.lstat().st_size
                failpoint("node.before_tombstone")
                path.unlink()
                fsync_directory(path.parent)
                self._volume.budget.add(-size)
            except FileNotFoundError:
                pass  # an earlier delete may have been interrupted after the manifest
            failpoint("node.after_tombstone")
            for entry in self._index.of_checkpoint(job_uid, checkpoint):
                failpoint("node.before_delete")
                self.delete_shard(entry.record.ref)
            if path.parent.is_dir():
                self._volume.directories.remove_if_empty(path.parent)
        with self._look_lock:
            self._deleted_checkpoints += 1
            if self._deleted_checkpoints % _LOOK_EVERY == 0:
                self._delete_unused_layouts()

    def read_round(self) -> tuple[RestartRound, int] | None:
        """Return the newest (round, version) that was written, or None if none was."""
        return read_round(self._root / ROUND_FILE)

    def write_round(self, round: RestartRound, version: int) -> None:
        """Write (round, version) durably. Raises StaleRoundError if a newer pair is stored."""
        self._expect_open()
        with self._round_lock:
            write_round(self._root / ROUND_FILE, round, version, self._volume.directories)

    def read_worker(self) -> Worker | None:
        """Return the worker that this spare pod has become, or None."""
        return read_worker(self._root / WORKER_FILE)

    def write_worker(self, worker: Worker) -> None:
        """Write the worker that this spare pod becomes durably."""
        self._expect_open()
        with self._round_lock:
            write_worker(self._root / WORKER_FILE, worker, self._volume.directories)

    # ------------------------------------------------------------------ space

    def free_bytes(self) -> int:
        return self._volume.budget.free_bytes()

    def limit_bytes(self) -> int:
        """Return the bytes of the volume that the tier may use."""
        return self._volume.budget.limit_bytes

    def buffer_bytes(self) -> tuple[int, int]:
        """Return the memory of the payload buffers and its limit, in bytes."""
        return self._buffers.allocated_bytes, _BUFFER_LIMIT_BYTES

    def used_bytes(self) -> int:
        """Return the size of all files, of quarantined ones too, and of the reservations of writes.

        Spare files do not count: they are removed when a write needs their room.
        """
        return self._volume.budget.used_bytes

    def remove_spare_files(self) -> bool:
        """Remove the spare files, when no further write is expected or when other files need their room.

        Return False if there were none.
        """
        return self._volume.remove_spare_files()

    # ------------------------------------------------------------------ inside

    def _existing(self, header: ShardHeader, source: PayloadSource) -> ShardRecord | None:
        """Return the record of an earlier write of the same shard, or None.

        The source is digested and compared, not written again. Raises AlreadyExistsError if the tier
        holds only other payloads with this identity.
        """
        entries = self._index.same_identity(header)
        if not entries:
            return None
        digester = PayloadDigester(header)
        with self._buffers.take() as buffer:
            for offset in range(0, header.payload_bytes, len(buffer)):
                view = buffer[: min(len(buffer), header.payload_bytes - offset)]
                source.read_into(offset, view)
                digester.update(view)
        record, _ = digester.finish()
        for entry in entries:
            if entry.record == record:
                return record
        raise AlreadyExistsError(
            f"shard of rank {header.rank} step {header.step} round {header.round}: the tier has "
            f"payload {entries[0].record.blake3}, refused to write another payload {record.blake3}"
        )

    def _write_twice(self, header: ShardHeader, source: PayloadSource) -> ShardRecord:
        """Write a shard. The second attempt writes all of it to a new file."""
        size, what = file_bytes(header), f"shard of rank {header.rank} step {header.step}"
        directory, volume = self._shard_directory(header), self._volume
        for attempt in range(_WRITE_ATTEMPTS):
            with ExitStack() as stack:
                spare = volume.take_spare(directory, size, stack) if attempt == 0 else None
                stack.enter_context(volume.reserve(size, what, _new_bytes(size, spare)))
                try:
                    with disk_errors(f"writing the {what}"):
                        temp = spare or TempFile.create(directory, volume.directories)
                        stack.callback(temp.discard)
                        return self._write_once(temp, header, source)
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

    def _write_once(
        self, temp: TempFile, header: ShardHeader, source: PayloadSource
    ) -> ShardRecord:
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
        path, volume = self.shard_path(record.ref), self._volume
        if path.is_dir():  # a rename replaces any file, but no directory
            volume.quarantine(path, f"{path}: expected a file, found a directory")
        temp.publish(path)
        self._unreadable.pop(record.ref, None)
        if self._index.add(IndexEntry(record, path)):
            volume.budget.add(record.file_bytes)

    def _why_unreadable(self, ref: ShardRef) -> UnreadableError | None:
        """Return why the shard could not be read in the last minute, or None. Then it is tried again."""
        found = self._unreadable.get(ref)
        if found is not None and self._monotonic() < found[1]:
            return UnreadableError(str(found[0]), may_pass=found[0].may_pass)
        self._unreadable.pop(ref, None)
        return None

    def _quarantine_document(self, path: Path, damage: CorruptionError) -> None:
        self._expect_open()
        if not isinstance(damage, UnreadableError):
            self._volume.quarantine(path, str(damage))

    def _delete_unused_layouts(self) -> None:
        """Delete the layouts that nothing names any more. A failure only costs their room."""
        known = {record.header.layout for record in self._index.records()}
        try:
            with disk_errors(f"deleting unused layouts of {self._root}"):
                freed = self._unused_layouts.look(known)
        except HoldfastError as error:
            _LOG.warning("unused layouts are kept for now: %s", error)
            return
        self._volume.budget.add(-freed)

    def _put(self, path: Path, document: bytes) -> None:
        size = stored_bytes(document)
        with self._volume.reserve(size, f"document {path.name}"):
            try:
                written = write_document(path, document, self._volume.directories)
            except CorruptionError as error:
                self._volume.quarantine(path, str(error))
                written = write_document(path, document, self._volume.directories)
            if written:
                self._volume.budget.add(size)

    def _forget(self, ref: ShardRef) -> None:
        entry = self._index.remove(ref)
        if entry is not None:
            self._volume.budget.add(-entry.record.file_bytes)

    def shard_path(self, ref: ShardRef) -> Path:
        return _job_directory(self._root, ref.job_uid) / shard_key(ref)

    def _shard_directory(self, header: ShardHeader) -> Path:
        any_digest = digest_of(b"")
        ref = ShardRef(header.job_uid, header.step, header.round, header.rank, any_digest)
        return self.shard_path(ref).parent

    def _manifest_path(self, job_uid: JobUid, checkpoint: CheckpointId) -> Path:
        return _job_directory(self._root, job_uid) / manifest_key(checkpoint)

    def _expect_open(self) -> None:
        if not self._opened:
            raise TierError(f"{self._name} {self._root}: not open yet; call open() first")


def _job_directory(root: Path, job_uid: JobUid) -> Path:
    if job_uid in _RESERVED:
        raise TierError(f"job uid {job_uid!r} is reserved by the node tier")
    return root / checked_job_uid(job_uid)


def _new_bytes(size: int, spare: TempFile | None) -> int:
    """Return the bytes that a file of `size` takes from the file system beyond those of the spare file."""
    return size if spare is None else max(0, size - spare.size_bytes)


def manifests_in(root: Path) -> tuple[tuple[JobUid, CheckpointId], ...]:
    """Return the manifests of a node tier that another process may have opened. Reads names only."""
    return tuple(list_manifests(root, _RESERVED))
