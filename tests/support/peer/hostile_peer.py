"""A peer with the right certificate that answers as a test sets, and a shard to request from it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from tests.support.peer.bulk_pair import OPTIONS, SERVER
from tests.support.shards.builders import BytesSource, payload, shard_header
from tests.support.tiers.memory import MemoryTier

from holdfast_core.errors import HoldfastError
from holdfast_core.messages.schema import ReadReply, ReadShard
from holdfast_core.net.tls import TlsFiles, client_context, server_context
from holdfast_core.peer.protocol import Peer, receive_message, send_message
from holdfast_core.shards.file import Trailer, pack_trailer
from holdfast_core.shards.record import ShardRecord

CHUNK = 64 << 10
CHUNKS = 40
SIZE = (CHUNKS - 1) * CHUNK + 1000
DATA = payload(SIZE)


def filled(tier: MemoryTier, *, step: int = 10) -> ShardRecord:
    header = shard_header(SIZE, chunk_bytes=CHUNK, step=step)
    return tier.write_shard(header, BytesSource(DATA))


def trailer_of(tier: MemoryTier, record: ShardRecord) -> Trailer:
    with tier.open_shard(record.ref) as reader:
        return Trailer(record, reader.table)


Answer = Callable[[socket.socket, ReadShard], None]


class HostilePeer:
    """Has the right certificate, and answers as the test sets."""

    def __init__(self, certificates: tuple[TlsFiles, TlsFiles], trailer: Trailer) -> None:
        self.record = trailer.record
        self.trailer: Answer = sends_trailer(trailer)
        """Answer to a request for the trailer."""
        self.spans: Answer = sends_bytes
        """Answer to a request for parts of the payload."""
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
                while (request := receive_message(sock, ReadShard)) is not None:
                    (self.spans if request.spans else self.trailer)(sock, request)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def sends(content: bytes) -> Answer:
    """Return the answer that announces and sends these bytes."""

    def answer(sock: socket.socket, request: ReadShard) -> None:
        send_message(sock, ReadReply(len(content)))
        sock.sendall(content)

    return answer


def sends_trailer(trailer: Trailer) -> Answer:
    record = trailer.record
    return sends(pack_trailer(record.header, record.blake3, trailer.table))


def requested(request: ReadShard) -> bytes:
    """Return the bytes that an honest peer sends."""
    return b"".join(DATA[span.start : span.stop] for span in request.spans)


def sends_bytes(sock: socket.socket, request: ReadShard) -> None:
    sends(requested(request))(sock, request)
