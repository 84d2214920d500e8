"""Holdfast as the benchmarks use it. The one module here that calls the product, so that a change of
the product changes one file; what is internal is named where it is used."""

from __future__ import annotations

import logging
import mmap
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.shards.builders import shard_header

import holdfast
from benchmarks.datapath import files
from benchmarks.datapath.processes import child_named
from benchmarks.datapath.saver import MakeSaver, Started
from holdfast_core.contract import StoreConfig
from holdfast_core.format.digest import Buffer, digest_of
from holdfast_core.ids import Digest, RestartRound, ShardRef
from holdfast_core.node import shard_file
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards import stream
from holdfast_core.shards.chunk_table import ChunkTable
from holdfast_core.shards.record import ShardHeader, ShardRecord
from holdfast_core.shards.stream import PayloadDigester, ShardStream
from holdfast_core.tiers.base import ShardReader

_COMMIT_SECONDS = 300.0
_CONNECT_SECONDS = 60.0
_ROUND = RestartRound(0)
_PYTHON = sys.executable


# ------------------------------------------------------------------ saving and restoring


class HoldfastSaver:
    """A Checkpointer over a directory, allocated before its first save as `steps` does it."""

    def __init__(self, state: dict[str, Any], directory: Path) -> None:
        self._state = {"model": state}
        self._root = directory / "holdfast"
        self._open = holdfast.Checkpointer(
            dir=self._root, interval_steps=1, keep_last=1, on_save_error="raise", when_busy="wait"
        )
        self._open.restore(self._state)
        self._open.allocate(self._state)

    def start(self, step: int) -> Started:
        handle = self._open.save(step, self._state)
        return Started(
            self._root,
            lambda: handle.wait("local", _COMMIT_SECONDS),
            disposable=False,
            is_complete=lambda: handle.level is not None,
        )

    def load(self, path: Path, into: dict[str, Any]) -> None:
        with Restoring(path) as restoring:
            restoring.restore(into)

    def close(self) -> None:
        self._open.close()


class Restoring:
    """A second life of the training: connected, nothing fetched yet."""

    def __init__(self, root: Path) -> None:
        self._checkpointer = holdfast.Checkpointer(dir=root, interval_steps=1, keep_last=1)
        self._step = 0

    def __enter__(self) -> Restoring:
        self._checkpointer.open()
        # In a pod the sidecar runs already, so its start is no part of a restore.
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()

    def restore(self, into: dict[str, Any]) -> str:
        """Load in place; the tier that the bytes came from."""
        heard = _Heard()
        logger = logging.getLogger("holdfast.checkpoint.restoring")
        logger.addHandler(heard)
        logger.setLevel(logging.INFO)
        try:
            step = self._checkpointer.restore({"model": into})
            if step is None:
                raise FileNotFoundError("found no checkpoint to restore")
            self._step = step
        finally:
            logger.removeHandler(heard)
        return heard.tier

    def leave_in_memory(self, state: dict[str, Any]) -> None:
        """Save once more, and leave the slots behind as a process that is killed does."""
        self._checkpointer.save(self._step + 1, {"model": state}).wait("local", _COMMIT_SECONDS)
        # Internal: a place with a launcher keeps them, too.
        self._checkpointer._place._memory._is_removed = False  # type: ignore[attr-defined]


class _Heard(logging.Handler):
    """The tier is told to the log only."""

    tier = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("rank %d restored step") and isinstance(record.args, tuple):
            self.tier = str(record.args[2])


def _with_persister(digests: bool) -> MakeSaver:
    """Both sides of A8 start their persister the same way, so that only the digests differ."""

    def make(state: dict[str, Any], directory: Path) -> HoldfastSaver:
        starter = directory / "persister"
        code = (
            "import sys; from benchmarks.datapath.ours import persist; "
            f"sys.exit(persist(sys.argv[3:], digests={digests}))"
        )
        starter.write_text(f'#!/bin/sh\nexec {shlex.quote(_PYTHON)} -c "{code}" "$@"\n')
        starter.chmod(0o700)
        # Internal: the SDK starts `sys.executable -m holdfast.directory.persister FD OPTIONS`.
        sys.executable = str(starter)
        return HoldfastSaver(state, directory)

    return make


def persist(arguments: Sequence[str], *, digests: bool) -> int:
    """`holdfast.directory.persister`, with constants for the payload's digests if not `digests`: the files
    it writes then cannot be read, which is why no product has this switch."""
    import holdfast.directory.persister

    if not digests:
        for module, name, instead in (
            (stream, "Blake3", _NoBlake3),
            (stream, "crc32c", _no_crc),
            (shard_file, "crc32c", _no_crc),
        ):
            if not hasattr(module, name):
                raise AttributeError(f"{module.__name__} no longer has {name}: adapt A8")
            setattr(module, name, instead)
    return holdfast.directory.persister.main(arguments)


class _NoBlake3:
    def update(self, data: memoryview) -> None:
        pass

    def digest(self) -> Digest:
        return digest_of(b"")

    def raw(self) -> bytes:
        return bytes(32)


def _no_crc(data: Buffer, value: int = 0) -> int:
    return 0


SAVERS: dict[str, MakeSaver] = {
    "holdfast": HoldfastSaver,
    "holdfast-digests-on": _with_persister(True),
    "holdfast-digests-off": _with_persister(False),
}


# ------------------------------------------------------------------ shards


class _Source:
    """PayloadSource over touched memory."""

    def __init__(self, size_bytes: int) -> None:
        self._data = memoryview(os.urandom(1 << 20) * (size_bytes >> 20))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self._data[offset : offset + len(buffer)]

    def verified(self, byte_count: int) -> None:
        return


class _Shards:
    """One shard at a time in a node tier of its own."""

    def __init__(self, root: Path, mib: int) -> None:
        self._tier = DiskNodeTier(root, fill_limit=1.0)
        self._tier.open()
        self._root = root
        self._bytes = mib << 20
        self._source = _Source(self._bytes)
        self._record: ShardRecord | None = None

    def write(self, step: int) -> ShardReader:
        if self._record is not None:
            self._tier.delete_shard(self._record.ref)
        header = shard_header(self._bytes, step=step, world_size=1)
        self._record = self._tier.write_shard(header, self._source)
        return self._tier.open_shard(self._record.ref)

    @property
    def path(self) -> Path:
        (path,) = self._root.rglob("rank*.shard")
        return path


# ------------------------------------------------------------------ the object store


class HoldfastUploader:
    """The object tier, with the defaults of a store's configuration."""

    def __init__(self, store: dict[str, str], directory: Path, mib: int) -> None:
        from holdfast_core.store.s3.client import S3Client
        from holdfast_core.store.s3.credentials import Keys, StaticCredentials
        from holdfast_core.store.s3.store import S3ObjectStore
        from holdfast_core.store.tier import ObjectTier

        config = StoreConfig(
            endpoint=store["endpoint"],
            secure=False,
            bucket=store["bucket"],
            prefix="ours",
            region=store["region"],
        )
        keys = StaticCredentials(Keys(store["access_key"], store["secret_key"]))
        self._tier = ObjectTier(S3ObjectStore(S3Client(config, keys)), config.prefix)
        self._shards = _Shards(directory / "node", mib)
        self._reader: ShardReader | None = None

    def prepare(self, step: int) -> Path:
        if self._reader is not None:
            self._reader.close()
        self._reader = self._shards.write(step)
        return self._shards.path

    def upload(self, step: int) -> None:
        assert self._reader is not None
        self._tier.upload_shard("bench", self._reader)

    def remove(self, step: int) -> None:
        assert self._reader is not None
        record = self._reader.record
        self._tier.delete_checkpoint("bench", record.ref.job_uid, record.checkpoint)


UPLOADERS: dict[str, Callable[[dict[str, str], Path, int], Any]] = {"holdfast": HoldfastUploader}


class NoStoreError(Exception):
    """MinIO is not there or does not start; the words go into the results."""


class Store:
    """A real MinIO server of its own, gone at the end."""

    def __init__(self) -> None:
        from tests.support.servers.minio_server import MinioServer

        self._server = MinioServer("bench")

    def __enter__(self) -> dict[str, str]:
        """Raises NoStoreError."""
        from tests.support.servers.store_server import (
            ACCESS_KEY,
            REGION,
            SECRET_KEY,
            ServerUnavailableError,
        )

        try:
            self._server.start()
        except ServerUnavailableError as error:
            self._server.stop()
            raise NoStoreError(str(error)) from error
        return {
            "endpoint": self._server.endpoint,
            "bucket": self._server.bucket,
            "region": REGION,
            "access_key": ACCESS_KEY,
            "secret_key": SECRET_KEY,
            "server_pid": str(child_named("minio", os.getpid())),
        }

    def __exit__(self, *_: object) -> None:
        self._server.stop()


class DrainingStore:
    """What takes uploads and drops them, in a process of its own; for what a client can do."""

    def __enter__(self) -> dict[str, str]:
        """Raises NoStoreError."""
        self._process = subprocess.Popen(
            [_PYTHON, "-m", "benchmarks.datapath.drain"], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        if not port:
            raise NoStoreError("the draining server ended before it listened")
        return {
            "endpoint": f"127.0.0.1:{port}",
            "bucket": "drain",
            "region": "us-east-1",
            "access_key": "drain",
            "secret_key": "nobody-checks-it",
            "server_pid": str(self._process.pid),
        }

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


STORES: dict[str, Callable[[], AbstractContextManager[dict[str, str]]]] = {
    "upload": Store,
    "drained upload": DrainingStore,
}
"""By the part that needs one."""


# ------------------------------------------------------------------ copies between peers


class HoldfastCopier:
    """A node tier and the bulk wire to two peers, each in a process of its own: one whose tier is on
    the disk takes durable copies, one whose tier is in memory gives them back, so that the wire and
    not the disk is measured."""

    def __init__(self, directory: Path, mib: int, *, plain: bool) -> None:
        from tests.support.servers.pki import Authority

        from holdfast_core.net.tls import TlsFiles, client_context
        from holdfast_core.peer.protocol import BulkOptions

        # One attempt: a copy that has to go on inside TLS is no measurement of the other way.
        self._options = BulkOptions(attempts=1, plain=plain)
        authority = Authority()
        server = authority.write_leaf(directory / "server", _SERVER)
        client = authority.write_leaf(directory / "client", _CLIENT)
        self._context = client_context(TlsFiles.in_directory(client))
        self._shards = _Shards(directory / "own", mib)
        self._memory = tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir="/dev/shm")
        self._on_disk = _Peer(directory / "peer", server)
        self._in_memory = _Peer(Path(self._memory.name), server)
        self._target = _Memory(2 * (mib << 20))
        self._reader: ShardReader | None = None

    def prepare(self, step: int) -> None:
        """A new shard, forgotten by the page cache as after the node tier's O_DIRECT write; the peer
        in memory has it."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._shards.write(step)
        self._push(self._in_memory)
        files.forget(self._shards.path)

    def push(self) -> None:
        """To the peer; durable there."""
        self._push(self._on_disk)

    def pull(self) -> None:
        """From the peer into touched memory, verified."""
        from holdfast_core.peer.client import fetch_shard

        assert self._reader is not None
        fetch_shard(
            "127.0.0.1",
            self._in_memory.port,
            _SERVER,
            self._context,
            _ROUND,
            self._reader.record.ref,
            self._target.open,
            options=self._options,
        )

    def close(self) -> None:
        self._on_disk.close()
        self._in_memory.close()
        self._memory.cleanup()

    def _push(self, peer: _Peer) -> None:
        from holdfast_core.peer.client import send_copy

        assert self._reader is not None
        send_copy(
            "127.0.0.1",
            peer.port,
            _SERVER,
            self._context,
            _ROUND,
            self._reader,
            options=self._options,
        )


class _Peer:
    """Another node's tier and bulk server, in a process of its own."""

    def __init__(self, root: Path, certificates: Path) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve_copies, args=(theirs, root, certificates), daemon=True
        )
        self._process.start()
        self.port = int(self._pipe.recv())

    def close(self) -> None:
        self._pipe.send("end")
        self._process.join(30)
        self._process.kill()


_SERVER = "peer-0.holdfast"
_CLIENT = "peer-1.holdfast"


class _Memory:
    """OpenWriter into one buffer that was touched before: where a restore would want the bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        self._buffer = mmap.mmap(-1, capacity_bytes)
        pages: np.ndarray[Any, Any] = np.frombuffer(self._buffer, np.uint8)
        pages[::4096] = 1

    def open(self, ref: ShardRef, file_bytes: int) -> _MemoryWriter:
        return _MemoryWriter(memoryview(self._buffer), ref, file_bytes)


class _MemoryWriter:
    """CopyWriter that verifies as the node tier does, in a thread beside what arrives, and keeps the
    bytes."""

    def __init__(self, view: memoryview, ref: ShardRef, file_bytes: int) -> None:
        self._view = view
        self._digests = ThreadPoolExecutor(1, "digest")
        self._stream = ShardStream(ref, file_bytes, partial(_ThreadedDigester, self._digests))

    @property
    def offset(self) -> int:
        return self._stream.position

    def room(self, length: int) -> memoryview:
        return self._view[self.offset : self.offset + length]

    def advance(self, length: int) -> None:
        self._stream.feed(self.room(length))

    def write(self, data: memoryview | bytes) -> None:
        self.room(len(data))[:] = data
        self.advance(len(data))

    def commit(self) -> ShardRecord:
        return self._stream.finish().record

    def abort(self) -> None:
        self._digests.shutdown()


class _ThreadedDigester:
    """Digester of bytes that stay where they are until `finish`."""

    def __init__(self, thread: ThreadPoolExecutor, header: ShardHeader) -> None:
        self._thread = thread
        self._digester = PayloadDigester(header)
        self._under_way: list[Future[None]] = []

    def update(self, data: memoryview) -> None:
        self._under_way.append(self._thread.submit(self._digester.update, data))

    def finish(self) -> tuple[ShardRecord, ChunkTable]:
        for update in self._under_way:
            update.result()
        return self._digester.finish()


class _Allowing:
    """Everybody may; older copies make room first."""

    def __init__(self, tier: DiskNodeTier) -> None:
        self._tier = tier

    def authorize_put(
        self, peer_dns_name: str, round: RestartRound, ref: ShardRef, file_bytes: int
    ) -> None:
        for record in self._tier.list_shards():
            if record.header.step < ref.step:
                self._tier.delete_shard(record.ref)

    def authorize_get(self, peer_dns_name: str, ref: ShardRef) -> None:
        pass

    def allows_plain(self) -> bool:
        return True


def _serve_copies(pipe: Connection, root: Path, certificates: Path) -> None:
    from holdfast_core.net.tls import TlsFiles, server_context
    from holdfast_core.peer.server import BulkServer

    tier = DiskNodeTier(root, fill_limit=1.0)
    tier.open()
    context = server_context(TlsFiles.in_directory(certificates))
    server = BulkServer(_Allowing(tier), tier, context)
    pipe.send(server.start("127.0.0.1", 0))
    pipe.recv()
    server.close()
