"""The Unix socket that the launcher and the ranks of this pod speak to (docs/protocol.md).

Carries words, never tensor bytes. Each request gets one reply; pushes get none. A connection that
does not read is dropped when its buffer is full: it may not cost the sidecar memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from holdfast_core.errors import (
    FormatError,
    HoldfastError,
    NotFoundError,
    RefusedError,
    StaleRoundError,
    StateMismatchError,
    UnavailableError,
)
from holdfast_core.ids import JobUid, Rank
from holdfast_core.shared_files import listen_unix
from holdfast_core.transfer.messages import (
    PROTOCOL_VERSION,
    Hello,
    HelloReply,
    LocalRole,
    Refusal,
    Refused,
)
from holdfast_core.transfer.socket_frames import Frame, read_frame, write_frame
from holdfast_sidecar import logs
from holdfast_sidecar.rounds import RoundState
from holdfast_sidecar.tasks import Tasks

_MAX_BUFFERED_BYTES = 4 << 20
_MAX_CONNECTIONS = 1024
_MAX_REQUESTS = 32
"""Requests of one connection that may be in work at once; more wait in the socket."""


class LocalHandler(Protocol):
    """What the socket hands on to."""

    @property
    def state(self) -> RoundState: ...

    def hello(self, connection: Connection) -> HelloReply: ...

    def gone(self, connection: Connection) -> None: ...

    async def request(self, connection: Connection, message: Any) -> Any:
        """Raises RefusedError, StaleRoundError, NotFoundError, FormatError."""
        ...

    def notify(self, connection: Connection, message: Any) -> None:
        """A push from the launcher or a rank."""
        ...


class Connection:
    """One launcher or rank; `hello` is None until it introduced itself."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.hello: Hello | None = None

    @property
    def rank(self) -> Rank | None:
        return self.hello.rank if self.hello is not None else None

    def push(self, message: Any) -> bool:
        """Send without a reply; False if the other side is gone or does not read."""
        return self.send(message, 0)

    def send(self, message: Any, id_: int) -> bool:
        if self._writer.is_closing():
            return False
        if self._writer.transport.get_write_buffer_size() > _MAX_BUFFERED_BYTES:
            logs.warning("a local connection does not read: dropped", rank=self.rank)
            self._writer.close()
            return False
        self._writer.write(write_frame(message, id_))
        return True

    def close(self) -> None:
        self._writer.close()


class Intake:
    """Listens; keeps the launcher's connection and one for each rank (the newest counts)."""

    def __init__(self, path: Path, job_uid: JobUid, handler: LocalHandler) -> None:
        self._path = path
        self._job_uid = job_uid
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._requests = Tasks()
        self._connections: set[Connection] = set()
        self._left = asyncio.Event()
        self.launcher: Connection | None = None
        self.ranks: dict[Rank, Connection] = {}

    async def start(self) -> None:
        """Mode 0660: trainer and sidecar share the volume's group, not their uid."""
        listener = listen_unix(self._path.parent, self._path.name, mode=0o660)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.close()
        await self._requests.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def push_launcher(self, message: Any) -> bool:
        return self.launcher is not None and self.launcher.push(message)

    def push_rank(self, rank: Rank, message: Any) -> bool:
        connection = self.ranks.get(rank)
        return connection is not None and connection.push(message)

    async def ranks_ended(self, seconds: float) -> bool:
        """Wait until no rank is connected, which means that everything they sent was handled.

        Returns False after `seconds`: a process that a rank forked may keep its connection open.
        """
        try:
            async with asyncio.timeout(seconds):
                while self.ranks:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            return False
        return True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(writer)
        if len(self._connections) >= _MAX_CONNECTIONS:
            connection.close()
            return
        self._connections.add(connection)
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        try:
            await self._read(reader, connection)
        except FormatError as error:
            logs.warning("a local connection sent what is no frame: dropped", error=str(error))
        except (OSError, UnavailableError):
            logs.info("a local connection broke", rank=connection.rank)
        finally:
            self._connections.discard(connection)
            if task is not None:
                self._tasks.discard(task)
            self._forget(connection)
            connection.close()

    async def _read(self, reader: asyncio.StreamReader, connection: Connection) -> None:
        room = asyncio.Semaphore(_MAX_REQUESTS)
        while (frame := await read_frame(reader)) is not None:
            if connection.hello is None and isinstance(frame.message, Hello):
                self._introduce(connection, frame.message, frame.id)
            elif frame.id == 0:
                self._notify(connection, frame.message)
            else:
                await room.acquire()
                self._requests.spawn(
                    self._answer(connection, frame, room.release), type(frame.message).__name__
                )

    def _introduce(self, connection: Connection, hello: Hello, id_: int) -> None:
        state = self._handler.state
        if hello.job_uid != self._job_uid or hello.version != PROTOCOL_VERSION:
            refused = state.refused(
                Refusal.BAD_REQUEST,
                f"hello for job {hello.job_uid} in version {hello.version}: this is the sidecar of "
                f"job {self._job_uid}, version {PROTOCOL_VERSION}",
            )
            connection.send(refused, id_)
            return
        if hello.role is LocalRole.RANK and hello.rank not in state.own_ranks:
            connection.send(
                state.refused(Refusal.BAD_REQUEST, f"rank {hello.rank} is not of this pod"), id_
            )
            return
        connection.hello = hello
        if hello.role is LocalRole.LAUNCHER:
            self.launcher = connection
        elif hello.rank is not None:
            self.ranks[hello.rank] = connection
        connection.send(self._handler.hello(connection), id_)

    def _notify(self, connection: Connection, message: Any) -> None:
        if connection.hello is None:
            raise FormatError(f"{type(message).__name__} before Hello")
        self._handler.notify(connection, message)

    async def _answer(
        self, connection: Connection, frame: Frame, release: Callable[[], None]
    ) -> None:
        state = self._handler.state
        try:
            reply: Any = await self._handler.request(connection, frame.message)
        except StaleRoundError as error:
            reply = state.refused(Refusal.STALE_ROUND, str(error))
        except RefusedError as error:
            reply = state.refused(Refusal(error.code), str(error))
        except NotFoundError as error:
            reply = state.refused(Refusal.NOT_FOUND, str(error))
        except (FormatError, StateMismatchError) as error:
            reply = state.refused(Refusal.BAD_REQUEST, str(error))
        except Exception as error:  # noqa: BLE001 - without a reply a rank waits an hour
            logs.failure(f"{type(frame.message).__name__} failed", error)
            words = str(error) if isinstance(error, HoldfastError | OSError) else repr(error)
            reply = Refused(Refusal.BUSY, words, state.round, state.version)
        finally:
            release()
        connection.send(reply, frame.id)

    def _forget(self, connection: Connection) -> None:
        if self.launcher is connection:
            self.launcher = None
        if connection.rank is not None and self.ranks.get(connection.rank) is connection:
            del self.ranks[connection.rank]
            self._left.set()
        if connection.hello is not None:
            self._handler.gone(connection)
