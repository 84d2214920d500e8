"""The object tier in a directory: on a shared file system, or on a local disk (`make demo-local`).

Keys and bytes are those of an S3 store, but shards are always stored whole. put-if-absent is link(2),
which fails if the name exists. A file is complete and has been read back before it gets its name. A file
whose content does not match its name is replaced by a good one and kept beside it as `<name>.bad`.
`StoreConfig.endpoint` names the directory as `file:///path`.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from holdfast_core.clock import SystemClock
from holdfast_core.errors import AlreadyExistsError, CorruptionError, FormatError, NotFoundError
from holdfast_core.format.digest import digest_of
from holdfast_core.format.keys import (
    LAYOUTS,
    MANIFESTS,
    Key,
    LayoutKey,
    ManifestKey,
    job_prefix,
    layout_key,
    manifest_key,
    parse_key,
    shard_key,
    shards_prefix,
)
from holdfast_core.format.manifest import misnamed
from holdfast_core.ids import CheckpointId, Digest, JobUid, ShardRef
from holdfast_core.node.files import (
    TEMP_PREFIX,
    BufferPool,
    Directories,
    disk_errors,
    fsync_directory,
)
from holdfast_core.node.shard_file import DiskShardReader
from holdfast_core.tiers.base import OpenWriter, ShardReader, ShardRecord, ShardSource
from holdfast_core.tiers.sources import ReaderSource

SCHEME = "file://"
SLICE_BYTES = 4 << 20
"""Longest read of a file, and the size of the buffer that verifies it."""
_BAD = ".bad"
_LOG = logging.getLogger(__name__)
_numbers = itertools.count()


def directory_of(endpoint: str) -> Path | None:
    """Return the directory that an endpoint names, or None if the endpoint is a server."""
    return Path(endpoint.removeprefix(SCHEME)) if endpoint.startswith(SCHEME) else None


class DirectoryObjectTier:
    """Implementation of tiers.base.ObjectTier in a directory. Safe for many threads and processes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._directories = Directories(root, 0o777)
        self._buffers = BufferPool(SLICE_BYTES, keep=1)

    def upload_shard(self, namespace: str, reader: ShardReader) -> None:
        """Copy a shard into the directory unless a good copy is there. Replace a damaged copy.

        Raises CorruptionError if the bytes that were read from `reader` are not the shard.
        """
        record = reader.record
        path = self._path(namespace, record.header.job_uid, shard_key(record.ref))
        with disk_errors(f"store of {path}"):
            there = self._damage(path, record.ref)
            if there is None:
                # The process that wrote the file may have died before it made the name durable.
                self._directories.ensure(path.parent)
                fsync_directory(path.parent)
                return

            def check(temp: Path) -> None:
                damage = self._damage(temp, record.ref)
                if damage is not None:
                    raise CorruptionError(
                        f"upload of {record.ref} to {path}: what was written does not verify: {damage}"
                    ) from damage

            data = _slices(reader.fd, record.file_bytes)
            self._publish(path, data, check, replaces=isinstance(there, CorruptionError))

    def _damage(self, path: Path, ref: ShardRef) -> CorruptionError | NotFoundError | None:
        """Read the whole file and return why it is not the shard; None if it is."""
        try:
            with DiskShardReader.open(path, ref, self._buffers) as reader:
                reader.verify()
        except (CorruptionError, NotFoundError) as error:
            return error
        return None

    def download_shard(self, namespace: str, ref: ShardRef, open_writer: OpenWriter) -> ShardRecord:
        path = self._path(namespace, ref.job_uid, shard_key(ref))
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFoundError(f"{path}: not in the store") from error
        try:
            with disk_errors(f"read of {path}"):
                size = os.fstat(fd).st_size
                writer = open_writer(ref, size)
                try:
                    for data in _slices(fd, size):
                        writer.write(data)
                    return writer.commit()
                except BaseException:
                    writer.abort()
                    raise
        finally:
            os.close(fd)

    def open_shard(self, namespace: str, ref: ShardRef) -> ShardSource:
        path = self._path(namespace, ref.job_uid, shard_key(ref))
        with disk_errors(f"read of {path}"):
            return ReaderSource(DiskShardReader.open(path, ref, self._buffers))

    def put_manifest(
        self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId, document: bytes
    ) -> Digest:
        key = manifest_key(checkpoint)
        return self._put(
            namespace, job_uid, key, document, lambda found: misnamed(found, job_uid, checkpoint)
        )

    def get_manifest(self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> bytes:
        return self._get(namespace, job_uid, manifest_key(checkpoint))

    def list_manifests(self, namespace: str, job_uid: JobUid) -> tuple[CheckpointId, ...]:
        root = self._root / job_prefix(namespace, job_uid)
        keys = (key for _, key in _keys(root, f"{MANIFESTS}/*/*.json"))
        return tuple(sorted(key.checkpoint for key in keys if isinstance(key, ManifestKey)))

    def put_layout(self, namespace: str, job_uid: JobUid, document: bytes) -> Digest:
        digest = digest_of(document)
        return self._put(
            namespace,
            job_uid,
            layout_key(digest),
            document,
            lambda found: None if digest_of(found) == digest else f"holds {digest_of(found)}",
        )

    def get_layout(self, namespace: str, job_uid: JobUid, digest: Digest) -> bytes:
        """Return a layout. Raises NotFoundError; CorruptionError if its bytes do not match the digest."""
        document = self._get(namespace, job_uid, layout_key(digest))
        if (found := digest_of(document)) != digest:
            path = self._path(namespace, job_uid, layout_key(digest))
            raise CorruptionError(f"layout {path}: expected digest {digest}, found {found}")
        return document

    def list_layouts(
        self, namespace: str, job_uid: JobUid, older_than: timedelta
    ) -> frozenset[Digest]:
        """Return the layouts whose file was last written at least `older_than` ago.

        The age is the difference between this machine's clock and the file's mtime.
        """
        root = self._root / job_prefix(namespace, job_uid)
        before = (SystemClock().utc_now() - older_than).timestamp()
        found = set[Digest]()
        with disk_errors(f"listing the layouts in {root}"):
            for path, key in _keys(root, f"{LAYOUTS}/*.json"):
                if isinstance(key, LayoutKey) and path.stat().st_mtime <= before:
                    found.add(key.digest)
        return frozenset(found)

    def delete_layout(self, namespace: str, job_uid: JobUid, digest: Digest) -> None:
        path = self._path(namespace, job_uid, layout_key(digest))
        with disk_errors(f"delete of {path}"):
            path.unlink(missing_ok=True)
            Path(f"{path}{_BAD}").unlink(missing_ok=True)

    def delete_checkpoint(self, namespace: str, job_uid: JobUid, checkpoint: CheckpointId) -> None:
        manifest = self._path(namespace, job_uid, manifest_key(checkpoint))
        shards = self._path(namespace, job_uid, shards_prefix(checkpoint))
        with disk_errors(f"delete of {manifest}"):
            manifest.unlink(missing_ok=True)
            Path(f"{manifest}{_BAD}").unlink(missing_ok=True)
            if manifest.parent.is_dir():
                # The manifest must be durably gone before its first shard is deleted.
                fsync_directory(manifest.parent)
            # This includes the temporary files of writers that were killed.
            for path in shards.glob("*"):
                path.unlink(missing_ok=True)
            if shards.is_dir():
                fsync_directory(shards)

    # ------------------------------------------------------------------ files

    def _path(self, namespace: str, job_uid: JobUid, key: str) -> Path:
        return self._root / job_prefix(namespace, job_uid) / key

    def _get(self, namespace: str, job_uid: JobUid, key: str) -> bytes:
        path = self._path(namespace, job_uid, key)
        try:
            return path.read_bytes()
        except FileNotFoundError as error:
            raise NotFoundError(f"{path}: not in the store") from error

    def _put(
        self,
        namespace: str,
        job_uid: JobUid,
        key: str,
        document: bytes,
        wrong: Callable[[bytes], str | None],
    ) -> Digest:
        """Put a document if absent and return its digest.

        Args:
            namespace: Namespace of the job.
            job_uid: UID of the job.
            key: Key of the document below the job's prefix.
            document: The bytes.
            wrong: Receives the stored document if it differs. It returns why that document cannot belong
                to this key, in which case it is replaced; or None.

        Raises:
            AlreadyExistsError: Another document, which may belong to this key, is stored.
        """
        path = self._path(namespace, job_uid, key)

        def check(temp: Path) -> None:
            if temp.read_bytes() != document:
                raise CorruptionError(f"{temp}: what was written for {path} reads back otherwise")

        with disk_errors(f"store of {path}"):
            self._publish(path, iter((memoryview(document),)), check)
            found = path.read_bytes()
            if found != document and wrong(found) is not None:
                self._publish(path, iter((memoryview(document),)), check, replaces=True)
                found = path.read_bytes()
        if found != document:
            raise AlreadyExistsError(f"{path}: another document is there")
        return digest_of(document)

    def _publish(
        self,
        path: Path,
        data: Iterator[memoryview],
        check: Callable[[Path], None],
        *,
        replaces: bool = False,
    ) -> None:
        """Write a temporary file, fsync it, check it, and give it its final name if that is free.

        The directory is fsynced also if another process created the name first.

        Args:
            path: The final name.
            data: The content.
            check: Reads the temporary file; it raises if the content is wrong.
            replaces: Whether the file that has the name is damaged. It is kept as `<name>.bad` and
                replaced atomically, so the name exists at every moment.
        """
        self._directories.ensure(path.parent)
        temp = path.parent / f"{TEMP_PREFIX}{os.getpid()}-{next(_numbers)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temp, flags, 0o600)
        try:
            for part in data:
                _write_all(lambda rest: os.write(fd, rest), part)
            os.fsync(fd)
            check(temp)
            if replaces:
                bad = Path(f"{path}{_BAD}")
                bad.unlink(missing_ok=True)
                with suppress(FileNotFoundError):
                    os.link(path, bad)
                temp.replace(path)
                _LOG.warning("%s was damaged: replaced, kept as %s", path, bad)
            else:
                with suppress(FileExistsError):
                    os.link(temp, path)
                temp.unlink()
            fsync_directory(path.parent)
        finally:
            os.close(fd)
            temp.unlink(missing_ok=True)


def _keys(root: Path, pattern: str) -> Iterator[tuple[Path, Key]]:
    """Yield the files below `root` whose name is a key of the store. Other files are ignored."""
    for path in root.glob(pattern):
        with suppress(FormatError):
            yield path, parse_key(str(path.relative_to(root)))


def _slices(fd: int, size: int) -> Iterator[memoryview]:
    offset = 0
    while offset < size:
        data = os.pread(fd, min(SLICE_BYTES, size - offset), offset)
        if not data:
            raise OSError(f"file ends at {offset}, expected {size} bytes")
        offset += len(data)
        yield memoryview(data)


def _write_all(write: Callable[[memoryview], int], data: memoryview) -> None:
    while data:
        data = data[write(data) :]
