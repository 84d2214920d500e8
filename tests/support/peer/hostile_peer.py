"""A peer with the right certificate that answers as a test sets, and a shard to request from it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from tests.support.peer.bulk_pair import OPTIONS, SERVER
from tests.support.shards.builders import BytesSource, payload, shard_header
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.errors import HoldfastError
from holdfast_core.messages.schema import ReadObject, ReadReply
from holdfast_core.net import TlsFiles, client_context, server_context
from holdfast_core.peer.protocol import Peer, receive_message, send_message
from holdfast_core.shards.file import ShardRecord, Trailer, head_bytes, pack_trailer, trailer_offset

CHUNK = 64 << 10
CHUNKS = 40
SIZE = (CHUNKS - 1) * CHUNK + 1000
DATA = payload(SIZE)
HEAD = head_bytes(shard_header(SIZE, chunk_bytes=CHUNK))


def filled(tier: ScratchTier, *, step: int = 10) -> ShardRecord:
    header = shard_header(SIZE, chunk_bytes=CHUNK, step=step)
    return tier.write_shard(header, BytesSource(DATA))


def trailer_of(tier: ScratchTier, record: ShardRecord) -> Trailer:
    with tier.open_shard(record.ref) as reader:
        return Trailer(record, reader.table)


Answer = Callable[[socket.socket, ReadObject], None]


class HostilePeer:
    """Has the right certificate, and answers as the test sets."""

    def __init__(self, certificates: tuple[TlsFiles, TlsFiles], trailer: Trailer) -> None:
        self.record = trailer.record
        self.trailer: Answer = sends_trailer(trailer)
        """Answer to a request for the trailer, or for the end of it."""
        self.size: Answer = lambda sock, request: send_message(
            sock, ReadReply(self.record.file_bytes)
        )
        """Answer to a request for the length of the shard file."""
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
                while (request := receive_message(sock, ReadObject)) is not None:
                    self._answer(request)(sock, request)

    def _answer(self, request: ReadObject) -> Answer:
        if request.range is None:
            return self.size
        if request.range.stop > trailer_offset(self.record.header):
            return self.trailer
        return self.spans

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def sends(content: bytes) -> Answer:
    """Return the answer that announces and sends these bytes."""

    def answer(sock: socket.socket, request: ReadObject) -> None:
        send_message(sock, ReadReply(len(content)))
        sock.sendall(content)

    return answer


def sends_trailer(trailer: Trailer) -> Answer:
    """Return the answer with the requested end of a file that has this trailer."""

    def answer(sock: socket.socket, request: ReadObject) -> None:
        sends(end_of_file(trailer, request))(sock, request)

    return answer


def end_of_file(trailer: Trailer, request: ReadObject) -> bytes:
    record, wanted = trailer.record, request.range
    assert wanted is not None
    end = pack_trailer(record.header, record.blake3, trailer.table)
    file = bytes(HEAD) + DATA + bytes(trailer_offset(record.header) - HEAD - SIZE) + end
    return file[wanted.start : wanted.stop]


def requested(request: ReadObject) -> bytes:
    """Return the bytes of the payload that an honest peer sends."""
    wanted = request.range
    assert wanted is not None
    return DATA[wanted.start - HEAD : wanted.stop - HEAD]


def sends_bytes(sock: socket.socket, request: ReadObject) -> None:
    sends(requested(request))(sock, request)
