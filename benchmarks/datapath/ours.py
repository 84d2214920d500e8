"""Holdfast as the benchmarks use it.

No other module here calls the product, so that a change of the product changes one file. Comments mark the
uses of internal names.
"""

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
from dataclasses import dataclass
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
from holdfast_core.format.canonical import Buffer, digest_of
from holdfast_core.ids import Digest, ShardRef
from holdfast_core.node import shard_file
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.peer.protocol import BulkOptions
from holdfast_core.shards import stream
from holdfast_core.shards.file import ChunkTable, ShardHeader, ShardRecord
from holdfast_core.shards.stream import PayloadDigester, ShardStream
from holdfast_core.tiers.base import ShardReader

_COMMIT_SECONDS = 300.0
_CONNECT_SECONDS = 60.0
_PYTHON = sys.executable


# ------------------------------------------------------------------ saving and restoring


class HoldfastSaver:
    """A Checkpointer over a directory. It allocates its memory before the first save, as `steps` does."""

    def __init__(self, state: dict[str, Any], directory: Path) -> None:
        self._state = {"model": state}
        self._root = directory / "holdfast"
        self._open = holdfast.Checkpointer(
            holdfast.Folder(self._root, keep_last=1),
            interval_steps=1,
            on_save_error="raise",
            when_busy="wait",
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
    """A restarted training. It has opened its checkpointer and fetched nothing."""

    def __init__(self, root: Path) -> None:
        self._checkpointer = holdfast.Checkpointer(
            holdfast.Folder(root, keep_last=1), interval_steps=1
        )
        self._step = 0

    def __enter__(self) -> Restoring:
        self._checkpointer.open()
        # The sidecar of a pod is already running when a restore begins, so its start is not measured.
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()

    def restore(self, into: dict[str, Any]) -> str:
        """Load the newest checkpoint into these tensors. Return the tier that the bytes came from."""
        tier_read = _TierRead()
        logger = logging.getLogger("holdfast.checkpoint.restoring")
        logger.addHandler(tier_read)
        logger.setLevel(logging.INFO)
        try:
            step = self._checkpointer.restore({"model": into})
            if step is None:
                raise FileNotFoundError("found no checkpoint to restore")
            self._step = step
        finally:
            logger.removeHandler(tier_read)
        return tier_read.tier

    def leave_in_memory(self, state: dict[str, Any]) -> None:
        """Save once more and leave the slots in shared memory, as a killed process does."""
        self._checkpointer.save(self._step + 1, {"model": state}).wait("local", _COMMIT_SECONDS)
        # Internal: a pod keeps its slots in the same way.
        self._checkpointer._place._memory._is_removed = False  # type: ignore[attr-defined]


class _TierRead(logging.Handler):
    """Reads the tier of a restore from the log, because no API reports it."""

    tier = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("rank %d restored step") and isinstance(record.args, tuple):
            self.tier = str(record.args[2])


def _with_persister(digests: bool) -> MakeSaver:
    """Make a saver with or without digests. Both variants of A8 start their persister in the same way."""

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
    """Run `holdfast.directory.persister`, with constants instead of the payload's digests if not `digests`.

    The files that it writes without digests cannot be read, so the product has no such switch.
    """
    from holdfast.directory.persister import main as serve

    if not digests:
        for module, name, instead in (
            (stream, "Blake3", _NoBlake3),
            (stream, "crc32c", _no_crc),
            (shard_file, "crc32c", _no_crc),
        ):
            if not hasattr(module, name):
                raise AttributeError(f"{module.__name__} no longer has {name}: adapt A8")
            setattr(module, name, instead)
    return serve(arguments)


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
    """PayloadSource over memory whose pages are present."""

    def __init__(self, size_bytes: int) -> None:
        self._data = memoryview(os.urandom(1 << 20) * (size_bytes >> 20))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self._data[offset : offset + len(buffer)]

    def verified(self, byte_count: int) -> None:
        return


class _Shards:
    """A node tier that holds one shard at a time."""

    def __init__(self, root: Path, mib: int) -> None:
        self.tier = DiskNodeTier(root, fill_limit=1.0)
        self.tier.open()
        self._root = root
        self._bytes = mib << 20
        self._source = _Source(self._bytes)
        self._record: ShardRecord | None = None

    def write(self, step: int) -> ShardReader:
        if self._record is not None:
            self.tier.delete_shard(self._record.ref)
        header = shard_header(self._bytes, step=step, world_size=1)
        self._record = self.tier.write_shard(header, self._source)
        return self.tier.open_shard(self._record.ref)

    @property
    def path(self) -> Path:
        (path,) = self._root.rglob("rank*.shard")
        return path


# ------------------------------------------------------------------ the object store


class HoldfastUploader:
    """The object tier with the default configuration of a store."""

    def __init__(self, store: dict[str, str], directory: Path, mib: int) -> None:
        from tests.support.servers.credentials import StaticCredentials

        from holdfast_core.store.s3.client import S3Client
        from holdfast_core.store.s3.credentials import Keys
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
    """MinIO is missing or does not start. The results contain the message."""


class Store:
    """A real MinIO server, which is stopped and removed at the end."""

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
    """A server in a separate process that accepts uploads and discards them, to measure the client alone."""

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
"""By the name of the part that needs a store."""


# ------------------------------------------------------------------ copies between peers


class HoldfastCopier:
    """The bulk server of this node, and two peers, each in a separate process.

    The peer with a tier on the disk makes durable copies. The peer with a tier in memory returns copies, so
    that the transfer is measured and not the disk.
    """

    def __init__(self, directory: Path, mib: int, *, plain: bool) -> None:
        from tests.support.servers.pki import Authority

        from holdfast_core.net import TlsFiles, client_context, server_context
        from holdfast_core.peer.server import BulkServer, shards_of

        # With a single attempt, a plain copy cannot fall back to TLS, which would falsify the measurement.
        self._options = BulkOptions(attempts=1, plain=plain)
        authority = Authority()
        certificates = authority.write_leaf(directory / "server", _SERVER)
        client = authority.write_leaf(directory / "client", _CLIENT)
        self._context = client_context(TlsFiles.in_directory(client))
        self._shards = _Shards(directory / "own", mib)
        context = server_context(TlsFiles.in_directory(certificates))
        self._server = BulkServer(_Allowing(), shards_of(self._shards.tier), context)
        own = _Own(self._server.start("127.0.0.1", 0), client, self._options)
        self._memory = tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir="/dev/shm")
        self._on_disk = _Peer(directory / "peer", certificates, own)
        self._in_memory = _Peer(Path(self._memory.name), certificates, own)
        self._target = _Memory(2 * (mib << 20))
        self._ref: ShardRef | None = None

    def prepare(self, step: int) -> None:
        """Write a new shard and copy it to the peer in memory.

        Drop the shard from the page cache, which does not contain it after the O_DIRECT write of a node
        tier either.
        """
        with self._shards.write(step) as reader:
            self._ref = reader.record.ref
        self._in_memory.copy(self._ref)
        files.forget(self._shards.path)

    def push(self) -> None:
        """Let the peer on the disk copy the shard, and wait until it is durable there."""
        assert self._ref is not None
        self._on_disk.copy(self._ref)

    def pull(self) -> None:
        """Copy the shard from the peer into memory whose pages are present, and verify it."""
        from holdfast_core.peer.protocol import Peer
        from holdfast_core.peer.store import copy_shard

        assert self._ref is not None
        peer = Peer("127.0.0.1", self._in_memory.port, _SERVER, self._context, self._options)
        copy_shard(peer, self._ref, self._target)  # type: ignore[arg-type]  # it uses two methods of it

    def close(self) -> None:
        self._on_disk.close()
        self._in_memory.close()
        self._server.close()
        self._memory.cleanup()


@dataclass(frozen=True)
class _Own:
    """How a peer reaches the bulk server of this process."""

    port: int
    certificates: Path
    options: BulkOptions


class _Peer:
    """The tier and the bulk server of another node, in a separate process."""

    def __init__(self, root: Path, certificates: Path, own: _Own) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve_copies, args=(theirs, root, certificates, own), daemon=True
        )
        self._process.start()
        self.port = int(self._pipe.recv())

    def copy(self, ref: ShardRef) -> None:
        """Let the peer copy a shard of this process, in place of the one before."""
        self._pipe.send(ref)
        self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(30)
        self._process.kill()


_SERVER = "peer-0.holdfast"
_CLIENT = "peer-1.holdfast"


class _Memory:
    """Tier of one reused buffer whose pages are present, as the target memory of a restore is."""

    def __init__(self, capacity_bytes: int) -> None:
        self._buffer = mmap.mmap(-1, capacity_bytes)
        pages: np.ndarray[Any, Any] = np.frombuffer(self._buffer, np.uint8)
        pages[::4096] = 1

    def list_shards(self) -> tuple[ShardRecord, ...]:
        return ()

    def begin_copy(self, ref: ShardRef, file_bytes: int) -> _MemoryWriter:
        return _MemoryWriter(memoryview(self._buffer), ref, file_bytes)


class _MemoryWriter:
    """CopyWriter that keeps the bytes, and verifies them in a thread during the transfer.

    The verification is that of the node tier.
    """

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
    """Digester in another thread. The bytes must not change until `finish`."""

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
    """Allows every transfer, without a limit."""

    def authorize(self, peer_dns_name: str, key: str) -> None:
        return

    def allows_plain(self) -> bool:
        return True

    def throttle(self, byte_count: int) -> None:
        return


def _serve_copies(pipe: Connection, root: Path, certificates: Path, own: _Own) -> None:
    from holdfast_core.net import TlsFiles, client_context, server_context
    from holdfast_core.peer.protocol import Peer
    from holdfast_core.peer.server import BulkServer, shards_of
    from holdfast_core.peer.store import copy_shard

    tier = DiskNodeTier(root, fill_limit=1.0)
    tier.open()
    server = BulkServer(
        _Allowing(), shards_of(tier), server_context(TlsFiles.in_directory(certificates))
    )
    pipe.send(server.start("127.0.0.1", 0))
    context = client_context(TlsFiles.in_directory(own.certificates))
    peer = Peer("127.0.0.1", own.port, _SERVER, context, own.options)
    while (ref := pipe.recv()) is not None:
        for record in tier.list_shards():
            tier.delete_shard(record.ref)
        copy_shard(peer, ref, tier)
        pipe.send(None)
    server.close()
