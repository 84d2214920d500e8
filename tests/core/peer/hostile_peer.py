"""A peer with the right certificate that answers as a test sets, and a shard to request from it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from tests.core.peer.bulk_pair import OPTIONS, ROUND, SERVER
from tests.support.shards.builders import BytesSource, payload, shard_header
from tests.support.tiers.memory import MemoryTier

from holdfast_core.errors import HoldfastError
from holdfast_core.format.digest import crc32c
from holdfast_core.net.tls import TlsFiles, client_context, server_context
from holdfast_core.peer.protocol import BulkFrame, Kind, receive_frame, send_frame
from holdfast_core.peer.remote import Peer
from holdfast_core.shards.file import Trailer, pack_trailer, trailer_offset
from holdfast_core.shards.record import ShardRecord

CHUNK = 64 << 10
CHUNKS = 40
SIZE = (CHUNKS - 1) * CHUNK + 1000
DATA = payload(SIZE)


def filled(tier: MemoryTier, *, step: int = 10) -> ShardRecord:
    header = shard_header(SIZE, chunk_bytes=CHUNK, step=step)
    return tier.write_shard(header, BytesSource(DATA))


Answer = Callable[[socket.socket, BulkFrame], None]


class HostilePeer:
    """Has the right certificate, and answers as the test sets."""

    def __init__(self, certificates: tuple[TlsFiles, TlsFiles], record: ShardRecord) -> None:
        self.record = record
        self.round = ROUND
        self.answers: dict[Kind, Answer] = {}
        self._context = server_context(certificates[0])
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.peer = Peer("127.0.0.1", port, SERVER, client_context(certificates[1]), OPTIONS)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            with (
                contextlib.suppress(OSError, HoldfastError),
                self._context.wrap_socket(plain, server_side=True) as sock,
            ):
                while (request := receive_frame(sock)) is not None:
                    self.answers[request.kind](sock, request)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def table_of(trailer: Trailer) -> Answer:
    def answer(sock: socket.socket, request: BulkFrame) -> None:
        record = trailer.record
        send_frame(sock, BulkFrame(Kind.REPLY, request.ref, ROUND, length=record.file_bytes))
        packed = pack_trailer(record.header, record.blake3, trailer.table)
        data(sock, request, trailer_offset(record.header), packed)

    return answer


def data(sock: socket.socket, request: BulkFrame, offset: int, content: bytes) -> None:
    send_frame(sock, head_of_data(request, offset, content), memoryview(content))


def head_of_data(request: BulkFrame, offset: int, content: bytes) -> BulkFrame:
    return BulkFrame(
        Kind.DATA, request.ref, ROUND, offset=offset, length=len(content), crc32c=crc32c(content)
    )


def ok(sock: socket.socket, request: BulkFrame) -> None:
    send_frame(sock, BulkFrame(Kind.REPLY, request.ref, ROUND, length=request.length))
