"""A2, A4, A6: the node tier and transfers between nodes, compared with the plain disk and loopback.

All measurements move the same bytes, one at a time and alternately. Only ratios within one run are
meaningful. The bulk server runs in a separate process, as in a cluster, with its own node tier.

    raw_write, raw_read    16 MiB O_DIRECT blocks from and to one buffer, one file, fsync at the end
    node_write, node_verify, node_fill    our shard: written durably, verified, read into a slot
    loopback    sendfile of a file in memory to recv_into of one buffer: the limit of a connection
    crc_socket  a plain socket whose ends compute the CRC32C of the bytes, in memory on both sides
    wire_*      a shard in memory copied from a peer, verified and discarded: our transfer without a disk
    pair_*      two wire_* at the same time, seconds for one of them: the gain of a second stream
    ranges_one, ranges_two    the chunks of one shard over one connection, its halves over two (TLS)
    copy_*      a shard of one node tier copied to the other, durable and verified

Prints one JSON line: {"mib": .., "seconds": {leg: [..]}, "gib_per_second": {leg: median},
"cpu_seconds_per_gib": {leg: median, both processes}, "ratios": {name: median}}.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import shutil
import socket
import ssl
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from tests.support.servers.pki import Authority
from tests.support.shards.builders import shard_header

from holdfast_core.format.canonical import crc32c
from holdfast_core.ids import ShardRef
from holdfast_core.net import TlsFiles, client_context, server_context
from holdfast_core.node.files import set_direct
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.peer.protocol import PIECE_BYTES, BulkOptions, Peer, receive_into, tune
from holdfast_core.peer.server import BulkServer, shards_of
from holdfast_core.peer.store import PeerStore, copy_shard
from holdfast_core.shards.file import ShardHeader, ShardRecord
from holdfast_core.shards.stream import ShardStream
from holdfast_core.tiers.base import NodeTier

SERVER = "gpt-1-r0.uid.holdfast"
CLIENT = "gpt-0-r0.uid.holdfast"
BLOCK_BYTES = 16 << 20
MEMORY = Path("/dev/shm")
RUN_CHUNKS = 16
"""4 MiB, the size of a restore's requests."""
# With a single attempt, a transfer cannot fall back to another transport, which would falsify the
# measurement.
TLS = BulkOptions(attempts=1)
PLAIN = BulkOptions(attempts=1, plain=True)

RATIOS = {
    "node_write/raw_write": ("node_write", "raw_write"),
    "node_verify/raw_read": ("node_verify", "raw_read"),
    "node_fill/raw_read": ("node_fill", "raw_read"),
    "wire_tls/loopback": ("wire_tls", "loopback"),
    "wire_plain/loopback": ("wire_plain", "loopback"),
    "wire_plain/wire_tls": ("wire_plain", "wire_tls"),
    "pair_tls/wire_tls": ("pair_tls", "wire_tls"),
    "pair_plain/wire_plain": ("pair_plain", "wire_plain"),
    "ranges_two/ranges_one": ("ranges_two", "ranges_one"),
    "wire_tls/crc_socket": ("wire_tls", "crc_socket"),
    "wire_plain/crc_socket": ("wire_plain", "crc_socket"),
    "copy_tls/raw_write": ("copy_tls", "raw_write"),
    "copy_plain/raw_write": ("copy_plain", "raw_write"),
    "copy_plain/copy_tls": ("copy_plain", "copy_tls"),
}


class Handler:
    """Allows everything."""

    def authorize(self, peer_dns_name: str, key: str) -> None: ...

    def allows_plain(self) -> bool:
        return True

    def throttle(self, byte_count: int) -> None: ...


class Discard:
    """CopyWriter that verifies what arrives and keeps nothing."""

    def __init__(self, ref: ShardRef, file_bytes: int) -> None:
        self._stream = ShardStream(ref, file_bytes)
        self._buffer = memoryview(bytearray(4 << 20))

    @property
    def offset(self) -> int:
        return self._stream.position

    def room(self, length: int) -> memoryview:
        return self._buffer[:length]

    def advance(self, length: int) -> None:
        self._stream.feed(self._buffer[:length])

    def write(self, data: memoryview | bytes) -> None:
        self._stream.feed(memoryview(data))

    def commit(self) -> ShardRecord:
        return self._stream.finish().record

    def abort(self) -> None: ...


class DiscardTier:
    """The part of a NodeTier that a copy needs. It keeps nothing."""

    def list_shards(self) -> tuple[ShardRecord, ...]:
        return ()

    def begin_copy(self, ref: ShardRef, file_bytes: int) -> Discard:
        return Discard(ref, file_bytes)


class FileSource:
    """PayloadSource over a file in memory, which takes the place of a slot."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            done += os.preadv(self._fd, [buffer[done:]], offset + done)

    def verified(self, byte_count: int) -> None:
        return


@dataclass(frozen=True)
class Ports:
    disk: int
    memory: int
    raw: int
    crc: int


def opened(root: Path) -> DiskNodeTier:
    tier = DiskNodeTier(root, capacity_bytes=1 << 40)
    tier.open()
    return tier


def serve(folder: Path, memory: Path, certificates: Path, pipe: Connection) -> None:
    """Run the other node: its tiers, its bulk servers and a plain sender.

    The parent sends commands between measurements, and receives a reply to each.
    """
    context = server_context(TlsFiles.in_directory(certificates))
    disk, shared = opened(folder), opened(memory)
    with ExitStack() as stack:
        ports = []
        for tier in (disk, shared):
            server = BulkServer(Handler(), shards_of(tier), context)
            ports.append(server.start("127.0.0.1", 0))
            stack.callback(server.close)
        for send in (_send_raw, _send_with_crc):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            threading.Thread(target=_serve_raw, args=(listener, memory, send), daemon=True).start()
            ports.append(listener.getsockname()[1])
        pipe.send(Ports(*ports))
        while True:
            command, *arguments = pipe.recv()
            if command == "stop":
                return
            if command == "write":
                pipe.send(_written(disk if arguments[0] == "disk" else shared, *arguments[1:]))
            if command == "cpu":
                pipe.send(time.process_time())


def _written(tier: DiskNodeTier, header: ShardHeader, path: Path) -> ShardRecord:
    return tier.write_shard(header, FileSource(path))


def _serve_raw(
    listener: socket.socket, root: Path, send: Callable[[socket.socket, Path], None]
) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        (path,) = root.glob("*/shards/**/*.shard")
        with sock:
            tune(sock)
            send(sock, path)


def _send_raw(sock: socket.socket, path: Path) -> None:
    with path.open("rb") as file:
        sock.sendfile(file)


def _send_with_crc(sock: socket.socket, path: Path) -> None:
    """Send pieces of the file, each after its length and its CRC32C."""
    buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))
    fd = os.open(path, os.O_RDONLY)
    position = 0
    while count := os.preadv(fd, [buffer], position):
        piece = buffer[:count]
        sock.sendall(count.to_bytes(4, "big") + crc32c(piece).to_bytes(4, "big"))
        sock.sendall(piece)
        position += count
    os.close(fd)


@dataclass
class Bench:
    folder: Path
    payload: Path
    size: int
    tier: DiskNodeTier
    ports: Ports
    context: ssl.SSLContext
    pipe: Connection
    record: ShardRecord
    """The shard on our disk."""
    theirs: ShardRecord
    """The shard on the other node's disk, which copy_* copies."""
    in_memory: ShardRecord
    buffer: memoryview
    step: int = 1000

    def raw_write(self) -> float:
        path = self.folder / "raw"
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        began = time.perf_counter()
        os.posix_fallocate(fd, 0, self.size)
        set_direct(fd, True)
        for offset in range(0, self.size, BLOCK_BYTES):
            os.pwrite(fd, self.buffer[: min(BLOCK_BYTES, self.size - offset)], offset)
        os.fsync(fd)
        seconds = time.perf_counter() - began
        os.close(fd)
        return seconds

    def raw_read(self) -> float:
        fd = os.open(self.folder / "raw", os.O_RDONLY)
        set_direct(fd, True)
        began = time.perf_counter()
        for offset in range(0, self.size, BLOCK_BYTES):
            os.preadv(fd, [self.buffer[: min(BLOCK_BYTES, self.size - offset)]], offset)
        seconds = time.perf_counter() - began
        os.close(fd)
        return seconds

    def node_write(self) -> float:
        self.step += 1
        header = shard_header(self.size, step=self.step)
        source = FileSource(self.payload)
        began = time.perf_counter()
        record = self.tier.write_shard(header, source)
        seconds = time.perf_counter() - began
        self.tier.delete_shard(record.ref)
        return seconds

    def node_verify(self) -> float:
        began = time.perf_counter()
        with self.tier.open_shard(self.record.ref) as reader:
            reader.verify()
        return time.perf_counter() - began

    def node_fill(self) -> float:
        self._forget_pages(self.record)
        slot = os.open(self.payload.with_name("slot"), os.O_WRONLY | os.O_CREAT, 0o600)
        began = time.perf_counter()
        with self.tier.open_shard(self.record.ref) as reader:
            written = 0
            for part in reader.read_payload():
                written += os.pwrite(slot, part, written)
        seconds = time.perf_counter() - began
        os.close(slot)
        return seconds

    def loopback(self) -> float:
        began = time.perf_counter()
        with socket.create_connection(("127.0.0.1", self.ports.raw)) as sock:
            while sock.recv_into(self.buffer):
                pass
        return time.perf_counter() - began

    def crc_socket(self) -> float:
        head = memoryview(bytearray(8))
        began = time.perf_counter()
        with socket.create_connection(("127.0.0.1", self.ports.crc)) as sock:
            tune(sock)
            while receive_into(sock, head, may_end=True):
                piece = self.buffer[: int.from_bytes(head[:4], "big")]
                receive_into(sock, piece)
                if crc32c(piece) != int.from_bytes(head[4:], "big"):
                    raise ValueError("a piece does not match its CRC32C")
        return time.perf_counter() - began

    def wire_tls(self) -> float:
        return self._copy(self.ports.memory, self.in_memory, DiscardTier())

    def wire_plain(self) -> float:
        return self._copy(self.ports.memory, self.in_memory, DiscardTier(), PLAIN)

    def pair_tls(self) -> float:
        return _at_once(self.wire_tls, self.wire_tls) / 2

    def pair_plain(self) -> float:
        return _at_once(self.wire_plain, self.wire_plain) / 2

    def ranges_one(self) -> float:
        began = time.perf_counter()
        self._read_chunks(0.0, 1.0)
        return time.perf_counter() - began

    def ranges_two(self) -> float:
        return _at_once(partial(self._read_chunks, 0.0, 0.5), partial(self._read_chunks, 0.5, 1.0))

    def _read_chunks(self, start: float, stop: float) -> None:
        """Read this part of the shard in runs of RUN_CHUNKS.

        `start` and `stop` are fractions of the shard.
        """
        peer = Peer("127.0.0.1", self.ports.memory, SERVER, self.context, TLS)
        header = self.in_memory.header
        count = -(-header.payload_bytes // header.chunk_bytes)
        chunks = range(int(start * count), int(stop * count))
        runs = (
            range(first, min(first + RUN_CHUNKS, chunks.stop))
            for first in range(chunks.start, chunks.stop, RUN_CHUNKS)
        )
        with (
            PeerStore(peer).open_shard(self.in_memory.ref) as shard,
            closing(shard.read(runs)) as pieces,
        ):
            for _ in pieces:
                pass

    def copy_tls(self) -> float:
        return self._copy_to_disk(TLS)

    def copy_plain(self) -> float:
        return self._copy_to_disk(PLAIN)

    def _copy_to_disk(self, options: BulkOptions) -> float:
        self._forget_pages(self.theirs)
        seconds = self._copy(self.ports.disk, self.theirs, self.tier, options)
        self.tier.delete_shard(self.theirs.ref)
        return seconds

    def cpu(self) -> float:
        self.pipe.send(("cpu",))
        return time.process_time() + float(self.pipe.recv())

    def _copy(
        self,
        port: int,
        record: ShardRecord,
        tier: NodeTier | DiscardTier,
        options: BulkOptions = TLS,
    ) -> float:
        peer = Peer("127.0.0.1", port, SERVER, self.context, options)
        began = time.perf_counter()
        copy_shard(peer, record.ref, tier)  # type: ignore[arg-type]  # it uses two methods of it
        return time.perf_counter() - began

    def _forget_pages(self, record: ShardRecord) -> None:
        """Drop the shard from the page cache.

        A peer usually requests a shard that is only on the disk.
        """
        for path in self.folder.rglob(f"*{record.blake3[3:19]}.shard"):
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _at_once(one: Callable[[], object], other: Callable[[], object]) -> float:
    """Run both and return the seconds until both are done."""
    began = time.perf_counter()
    with ThreadPoolExecutor(1) as helper:
        submitted = helper.submit(other)
        one()
        submitted.result()
    return time.perf_counter() - began


LEGS = (
    "raw_write",
    "node_write",
    "raw_read",
    "node_verify",
    "node_fill",
    "loopback",
    "crc_socket",
    "wire_tls",
    "wire_plain",
    "pair_tls",
    "pair_plain",
    "ranges_one",
    "ranges_two",
    "copy_tls",
    "copy_plain",
)


Measured = dict[str, list[float]]


def measured(bench: Bench, legs: list[str], repetitions: int) -> tuple[Measured, Measured]:
    """Return seconds, and processor seconds of both processes.

    The first round is a warm-up and is not counted.
    """
    seconds: Measured = {leg: [] for leg in legs}
    cpu: Measured = {leg: [] for leg in legs}
    for repetition in range(repetitions + 1):
        for leg in legs:
            before = bench.cpu()
            took = getattr(bench, leg)()
            used = bench.cpu() - before
            if repetition:
                seconds[leg].append(took)
                cpu[leg].append(used)
            print(f"{repetition} {leg} {took:.3f} s", file=sys.stderr, flush=True)
    return seconds, cpu


def report(mib: int, seconds: Measured, cpu: Measured) -> str:
    """Summarize the measurements. A ratio of speeds is computed for each repetition, then the median."""
    gib = mib / 1024
    ratios = {
        name: round(
            statistics.median(b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True)), 3
        )
        for name, (ours, theirs) in RATIOS.items()
        if ours in seconds and theirs in seconds
    }
    speeds = {leg: round(gib / statistics.median(took), 2) for leg, took in seconds.items()}
    rounded = {leg: [round(s, 4) for s in took] for leg, took in seconds.items()}
    used = {leg: round(statistics.median(took) / gib, 2) for leg, took in cpu.items()}
    return json.dumps(
        {
            "mib": mib,
            "seconds": rounded,
            "gib_per_second": speeds,
            "cpu_seconds_per_gib": used,
            "ratios": ratios,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: TMPDIR")
    parser.add_argument("--legs", default=",".join(LEGS))
    arguments = parser.parse_args()
    size = arguments.mib << 20
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=arguments.directory)
            )
        )
        memory = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=MEMORY))
        stack.callback(shutil.rmtree, memory)
        payload = memory / "payload"
        block = os.urandom(1 << 20)
        with payload.open("wb") as file:
            for number in range(arguments.mib):
                file.write(number.to_bytes(8, "big") + block[8:])

        authority = Authority()
        ours, theirs = multiprocessing.Pipe()
        authority.write_leaf(folder / "server", SERVER)
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(folder / "theirs", memory / "theirs", folder / "server", theirs)
        )
        process.start()
        stack.callback(process.join, 10)
        ports = ours.recv()
        stack.callback(ours.send, ("stop",))
        tier = opened(folder / "ours")
        ours.send(("write", "disk", shard_header(size, rank=1, step=11), payload))
        fetched = ours.recv()
        ours.send(("write", "memory", shard_header(size, rank=2), payload))
        files = TlsFiles.in_directory(authority.write_leaf(folder / "client", CLIENT))
        bench = Bench(
            folder,
            payload,
            size,
            tier,
            ports,
            client_context(files),
            ours,
            tier.write_shard(shard_header(size), FileSource(payload)),
            fetched,
            ours.recv(),
            memoryview(mmap.mmap(-1, BLOCK_BYTES)),
        )
        seconds, cpu = measured(bench, arguments.legs.split(","), arguments.repetitions)
    print(report(arguments.mib, seconds, cpu))


if __name__ == "__main__":
    main()
