"""The Unix socket for the launcher and the ranks of this pod (docs/protocol.md).

It carries messages, never tensor bytes. Each request gets one reply; pushes get none. Whatever the trainer
does, the memory of the sidecar stays bounded: connections are limited, and new ones replace those that have
not sent Hello; a frame that is not finished in time ends its connection; large frames share a few MiB; and a
connection that does not read is closed when its buffer is full.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from holdfast_core import logs
from holdfast_core.errors import (
    FormatError,
    HoldfastError,
    RefusedError,
    UnavailableError,
)
from holdfast_core.ids import JobUid, Rank
from holdfast_core.messages.common import refusal_of
from holdfast_core.messages.schema import (
    PROTOCOL_VERSION,
    Hello,
    HelloReply,
    Refusal,
)
from holdfast_core.messages.socket_frames import Frame, read_frame, write_frame
from holdfast_core.net import ConnectionLimits, Connections
from holdfast_core.shm.shared_files import listen_unix
from holdfast_core.tasks import Tasks
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.wire.bodies import ByteBudget, ClosedConnections

_MAX_BUFFERED_BYTES = 256 << 10
_READ_BYTES = 16 << 10
"""Limit of a connection's read buffer. Larger frames take their bytes from a common budget."""
_LARGE_FRAMES_BYTES = 8 << 20
"""Limit on the bytes of all frames larger than `_READ_BYTES` that are being read."""
_HELLO_BYTES = 4 << 10
_CONNECTIONS = ConnectionLimits(handshakes=64, authenticated=256, per_caller=8)


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """Limits on the socket's connections."""

    connections: ConnectionLimits = _CONNECTIONS
    hello_seconds: float = 10.0
    """Seconds from the connection to the end of Hello."""
    frame_seconds: float = 30.0
    """Seconds from the length of a frame to its end."""


_MAX_REQUESTS = 32
"""Requests of one connection that are handled at the same time. Further ones wait in the socket."""


class LocalHandler(Protocol):
    """Handler of the socket's connections and messages."""

    @property
    def state(self) -> RoundState: ...

    def hello(self, connection: LocalConnection) -> HelloReply:
        """Return the reply to a Hello that was accepted."""
        ...

    def gone(self, connection: LocalConnection) -> None:
        """Handle the end of a connection whose Hello was accepted."""
        ...

    async def request(self, connection: LocalConnection, message: Any) -> Any:
        """Return the reply to a request.

        Raises:
            RefusedError, StaleRoundError, NotFoundError, FormatError: The request is refused.
        """
        ...

    def notify(self, connection: LocalConnection, message: Any) -> None:
        """Handle a push from the launcher or a rank."""
        ...


@dataclass(frozen=True, slots=True)
class Attached:
    """Reply that carries an open file. The sender closes the file."""

    message: Any
    fd: int


class LocalConnection:
    """Connection of one launcher or rank. `hello` is None until its Hello was accepted."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.hello: Hello | None = None

    @property
    def name(self) -> str:
        hello = self.hello
        return "" if hello is None else _name_of(hello)

    @property
    def rank(self) -> Rank | None:
        return self.hello.rank if self.hello is not None else None

    def push(self, message: Any) -> bool:
        """Send a message that gets no reply. Return False if the other side is gone or does not read."""
        return self.send(message, 0)

    def send(self, message: Any, id_: int) -> bool:
        """Send a message: a push if `id_` is 0, else the reply to that request. Returns as `push` does."""
        if not self._is_read(_MAX_BUFFERED_BYTES):
            return False
        self._writer.write(write_frame(message, id_))
        return True

    def send_attached(self, reply: Attached, id_: int) -> bool:
        """Send a reply with its open file, and close the file. Returns as `push` does."""
        data = write_frame(reply.message, id_)
        try:
            # The frame goes directly to the socket, so that none may wait in the buffer before it.
            if not self._is_read(0):
                return False
            with self._writer.get_extra_info("socket").dup() as plain:
                sent = socket.send_fds(plain, [data], [reply.fd])
        except OSError as error:
            logs.warning("a file could not be sent", rank=self.rank, error=str(error))
            self.abort()
            return False
        finally:
            os.close(reply.fd)
        self._writer.write(data[sent:])
        return True

    def _is_read(self, buffered_bytes: int) -> bool:
        """Return whether the connection is open and at most `buffered_bytes` wait. Abort it if more wait."""
        if self._writer.is_closing():
            return False
        if self._writer.transport.get_write_buffer_size() > buffered_bytes:
            logs.warning(
                "a local connection does not read its messages and is closed", rank=self.rank
            )
            self.abort()
            return False
        return True

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Close the connection and discard what the other side has not read."""
        self._writer.transport.abort()


class LocalConnections:
    """The newest connection of the launcher and of each rank, whose Hello was accepted."""

    def __init__(self) -> None:
        self.launcher: LocalConnection | None = None
        self.ranks: dict[Rank, LocalConnection] = {}
        self._left = asyncio.Event()

    def push_launcher(self, message: Any) -> bool:
        return self.launcher is not None and self.launcher.push(message)

    def push_rank(self, rank: Rank, message: Any) -> bool:
        connection = self.ranks.get(rank)
        return connection is not None and connection.push(message)

    async def ranks_ended(self, seconds: float) -> bool:
        """Wait until no rank is connected, which means that all their messages have been received.

        Return False after `seconds`, because a process that a rank forked may keep its connection open.
        """
        try:
            async with asyncio.timeout(seconds):
                while self.ranks:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            return False
        return True

    def add(self, connection: LocalConnection) -> None:
        """Keep a connection whose Hello was accepted, in place of an older one."""
        if connection.rank is None:
            self.launcher = connection
        else:
            self.ranks[connection.rank] = connection

    def remove(self, connection: LocalConnection) -> None:
        """Drop a connection that has ended. One that a newer connection has replaced is ignored."""
        if self.launcher is connection:
            self.launcher = None
        if connection.rank is not None and self.ranks.get(connection.rank) is connection:
            del self.ranks[connection.rank]
            self._left.set()


class Intake:
    """Server of the socket. It passes messages to its handler, and keeps `connections` up to date."""

    def __init__(
        self,
        path: Path,
        job_uid: JobUid,
        handler: LocalHandler,
        connections: LocalConnections,
        *,
        limits: IntakeLimits | None = None,
        dropped: Callable[[str, str], None] = lambda port, reason: None,
    ) -> None:
        """Create the server; `start` begins to listen. `dropped` is as in `ControlServer`."""
        self._limits = limits or IntakeLimits()
        self._closed = ClosedConnections("socket", dropped)
        self._large = ByteBudget(_LARGE_FRAMES_BYTES)
        self._open: Connections[LocalConnection] = Connections(
            self._limits.connections, self._replaced
        )
        self._path = path
        self._job_uid = job_uid
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._requests = Tasks()
        self._connections: set[LocalConnection] = set()
        self._introduced = connections

    async def start(self) -> None:
        """Listen. The socket's mode is 0660, because trainer and sidecar share a group but not their uid."""
        listener = listen_unix(self._path.parent, self._path.name, mode=0o660)
        self._server = await asyncio.start_unix_server(
            self._serve, sock=listener, limit=_READ_BYTES
        )

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.close()
        await self._requests.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = LocalConnection(writer)
        self._connections.add(connection)
        self._open.add(connection)
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        try:
            await self._read(reader, connection)
        except FormatError as error:
            self._closed("frame", f"a local connection sent an invalid frame: {error}")
        except (OSError, UnavailableError) as error:
            self._closed("broken", f"a local connection broke: {error or type(error).__name__}")
        finally:
            self._open.remove(connection)
            self._connections.discard(connection)
            if task is not None:
                self._tasks.discard(task)
            self._forget(connection)
            connection.close()

    def _replaced(self, connection: LocalConnection) -> None:
        connection.abort()
        self._closed("room", "a local connection was closed to make room for a newer one")

    @property
    def connections(self) -> int:
        return len(self._open)

    @property
    def large_bytes(self) -> int:
        """Bytes taken by large frames that are being read."""
        return self._large.taken_bytes

    async def _read(self, reader: asyncio.StreamReader, connection: LocalConnection) -> None:
        async with asyncio.timeout(self._limits.hello_seconds):
            while connection.hello is None:
                frame = await read_frame(reader, limit_bytes=_HELLO_BYTES)
                if frame is None:
                    return
                if not isinstance(frame.message, Hello):
                    raise FormatError(f"{type(frame.message).__name__} before Hello")
                self._introduce(connection, frame.message, frame.id)
        requests = asyncio.Semaphore(_MAX_REQUESTS)
        while (frame := await self._next_frame(reader)) is not None:
            if frame.id == 0:
                self._handler.notify(connection, frame.message)
            else:
                await requests.acquire()
                self._requests.spawn(
                    self._answer(connection, frame, requests.release), type(frame.message).__name__
                )

    async def _next_frame(self, reader: asyncio.StreamReader) -> Frame | None:
        return await read_frame(reader, room=self._room, body_seconds=self._limits.frame_seconds)

    def _room(self, length: int) -> AbstractAsyncContextManager[None]:
        return nullcontext() if length <= _READ_BYTES else self._large.take(length)

    def _introduce(self, connection: LocalConnection, hello: Hello, id_: int) -> None:
        state = self._handler.state
        if hello.job_uid != self._job_uid or hello.version != PROTOCOL_VERSION:
            refused = state.refused(
                Refusal.BAD_REQUEST,
                f"hello for job {hello.job_uid} in version {hello.version}: this is the sidecar of "
                f"job {self._job_uid}, version {PROTOCOL_VERSION}",
            )
            connection.send(refused, id_)
            return
        if hello.rank is not None and hello.rank not in state.own_ranks:
            connection.send(
                state.refused(Refusal.BAD_REQUEST, f"rank {hello.rank} does not run in this pod"),
                id_,
            )
            return
        connection.hello = hello
        if not self._open.authenticate(connection, connection.name):
            connection.hello = None
            raise UnavailableError(f"too many connections of {_name_of(hello)}")
        self._introduced.add(connection)
        connection.send(self._handler.hello(connection), id_)

    async def _answer(
        self, connection: LocalConnection, frame: Frame, release: Callable[[], None]
    ) -> None:
        state = self._handler.state
        try:
            reply: Any = await self._handler.request(connection, frame.message)
        except Exception as error:  # noqa: BLE001 - without a reply a rank waits an hour
            code = refusal_of(error)
            if code is Refusal.BUSY and not isinstance(error, RefusedError):
                logs.failure(f"{type(frame.message).__name__} failed", error)
            text = str(error) if isinstance(error, HoldfastError | OSError) else repr(error)
            reply = state.refused(code, text)
        finally:
            release()
        if isinstance(reply, Attached):
            connection.send_attached(reply, frame.id)
        else:
            connection.send(reply, frame.id)

    def _forget(self, connection: LocalConnection) -> None:
        self._introduced.remove(connection)
        if connection.hello is not None:
            self._handler.gone(connection)


def _name_of(hello: Hello) -> str:
    return "launcher" if hello.rank is None else f"rank {hello.rank}"
