"""The rank's side of the Unix socket: one thread that reads, writes and reconnects without a limit.

The training thread never uses the socket. It puts frames into a bounded queue and continues, so that a
slow, stopped or dead peer does not delay training. Requests to such a peer fail. After a reconnect the
link sends Hello again.

The socket is closed in forked children. A data loader's workers are such children and inherit every
descriptor. The other side of a socket sees its end only when the last process that holds it has closed it. A
live worker would thus keep a persister and `Checkpointer.close` waiting.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import selectors
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from holdfast_core.errors import (
    ConfigError,
    FormatError,
    HoldfastError,
    RefusedError,
    StaleRoundError,
    UnavailableError,
)
from holdfast_core.messages.schema import Hello, HelloReply, Refusal, Refused, ShardFile
from holdfast_core.messages.socket_frames import Frame, take_frames, write_frame


class OwnSocket(socket.socket):
    """Socket that a forked child closes right after the fork.

    `close` ends the connection even if another process still holds the descriptor: a child that C code
    forked does not run Python's fork hooks.
    """

    @classmethod
    def of(cls, plain: socket.socket) -> Self:
        """Return a socket that takes over the descriptor of `plain`, which is unusable afterwards."""
        owned = cls(plain.family, plain.type, plain.proto, fileno=plain.detach())
        _open.add(owned)
        return owned

    def close(self) -> None:
        if self.fileno() >= 0:
            with contextlib.suppress(OSError):  # the other side has already closed its end
                self.shutdown(socket.SHUT_RDWR)
        super().close()

    def forget(self) -> None:
        """Close only this process's descriptor. The connection of the parent process stays open."""
        super().close()


def connect_to(path: Path) -> OwnSocket:
    """Connect to a Unix socket. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return OwnSocket.of(connection)


_open: weakref.WeakSet[OwnSocket] = weakref.WeakSet()


def _forget_all() -> None:
    for one in tuple(_open):
        one.forget()


os.register_at_fork(after_in_child=_forget_all)


logger = logging.getLogger(__name__)

_MAX_QUEUED_BYTES = 8 << 20
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 1.0
PERSISTER_PAUSE_SECONDS = 30.0
"""Longest pause between two starts of a persister, each of which imports modules for a second."""
_READ_BYTES = 64 * 1024
_MAX_FILES = 4
"""Most files that one read may receive. A rank has one request for a file at a time."""


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """A reply that carried an open file. The receiver closes the file."""

    file: ShardFile
    fd: int


class LinkEvents(Protocol):
    """Callbacks of a link. They run in the link's thread and must not block."""

    def hello(self) -> Hello:
        """Return the Hello for a new connection."""
        ...

    def hello_accepted(self, reply: HelloReply) -> None:
        """Handle the reply to Hello. No request can be sent on this connection before this returns."""
        ...

    def connected(self) -> None:
        """Handle a new connection, on which requests can be sent."""
        ...

    def disconnected(self, reason: str) -> None:
        """Handle the end of a connection, or a failed attempt to connect."""
        ...

    def refused(self, error: HoldfastError) -> None:
        """Handle a refused Hello. The link tries again."""
        ...

    def push(self, message: Any) -> None:
        """Handle a message that is not a reply to a request."""
        ...


def pauses(longest_seconds: float) -> Iterator[float]:
    """Yield the pauses between attempts to connect."""
    pause = _FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, longest_seconds)


class Link:
    """Connection to the sidecar or persister that reconnects by itself.

    The thread survives every exception. An exception of `connect` or of a connection ends that
    connection. An exception of a callback is logged, and later callbacks are still called.

    Args:
        connect: Opens a socket, or raises OSError. It is called again after each end of a connection, and
            where Hello is not answered within `hello_seconds`.
        events: Receives the callbacks.
        hello_seconds: Time-out of the reply to Hello; None for none.
        peer: Name of the other side for log and error messages.
        longest_pause_seconds: Limit of the pause between two attempts to connect, which doubles each time.
    """

    def __init__(
        self,
        connect: Callable[[], socket.socket],
        events: LinkEvents,
        hello_seconds: float | None = 10.0,
        peer: str = "the sidecar",
        longest_pause_seconds: float = _LONGEST_PAUSE_SECONDS,
    ) -> None:
        self._longest_pause_seconds = longest_pause_seconds
        self._peer = peer
        self._connect = connect
        self._hello_seconds = hello_seconds
        self._events = events
        self._lock = threading.Lock()
        self._outgoing: collections.deque[bytes] = collections.deque()
        self._queued_bytes = 0
        self._next_id = 0
        self._waiting: dict[int, Future[Any]] = {}
        self._files: collections.deque[int] = collections.deque()
        """Open files that were received, in the order of the frames that carry them."""
        self._closing = threading.Event()
        self._ready = threading.Event()
        self._wakers: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._wakers = socket.socketpair()
        for waker in self._wakers:
            waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="holdfast-link", daemon=True)
        self._thread.start()

    @property
    def is_connected(self) -> bool:
        return self._ready.is_set()

    def wait_connected(self, timeout_seconds: float) -> bool:
        return self._ready.wait(timeout_seconds)

    def submit(self, message: Any) -> Future[Any]:
        """Send a request and return a future of its reply.

        The future raises RefusedError for a refusal and for a full queue, StaleRoundError for a refusal
        of the round, and UnavailableError when there is no connection or it ends before the reply.
        """
        future: Future[Any] = Future()
        name = type(message).__name__
        error: HoldfastError
        with self._lock:
            self._next_id += 1
            id_ = self._next_id
            if not self._ready.is_set():
                error = UnavailableError(f"{name}: there is no connection to {self._peer}")
            elif self._enqueue(write_frame(message, id_)):
                self._waiting[id_] = future
                return future
            else:
                error = RefusedError(
                    Refusal.BUSY,
                    f"{name}: {self._queued_bytes} bytes wait to be sent to {self._peer}, which does "
                    "not read them",
                )
        future.set_exception(error)
        return future

    def request(self, message: Any, timeout_seconds: float) -> Any:
        """Send a request and wait for its reply.

        Raises what the future of `submit` raises, and UnavailableError at the time-out.
        """
        try:
            return self.submit(message).result(timeout_seconds)
        except TimeoutError as error:
            raise UnavailableError(
                f"{type(message).__name__}: no reply from {self._peer} within {timeout_seconds} s"
            ) from error

    def notify(self, message: Any) -> bool:
        """Send a message that has no reply. Return False where it cannot be queued.

        That is so without a connection, and when the queue is full.
        """
        with self._lock:
            return self._ready.is_set() and self._enqueue(write_frame(message, 0))

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Send the queued messages, then end the connection and the thread."""
        self._closing.set()
        self._wake()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            self._thread = None

    def _enqueue(self, data: bytes) -> bool:
        if self._queued_bytes + len(data) > _MAX_QUEUED_BYTES:
            return False
        self._outgoing.append(data)
        self._queued_bytes += len(data)
        self._wake()
        return True

    def _wake(self) -> None:
        if self._wakers is not None:
            try:
                self._wakers[1].send(b"w")
            except BlockingIOError:
                return  # the socket's buffer is full, so that the thread wakes up in any case
            except OSError:
                return  # the thread has ended and closed the sockets

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        waits = pauses(self._longest_pause_seconds)
        while not self._closing.is_set():
            reason = self._live()
            if self._ready.is_set():
                waits = pauses(self._longest_pause_seconds)
            self._drop(reason)
            if not self._closing.is_set():
                self._call(partial(self._events.disconnected, reason))
                self._closing.wait(next(waits))
        if self._wakers is not None:
            for waker in self._wakers:
                waker.close()

    def _live(self) -> str:
        """Open one connection, serve it to its end, and return why it ended."""
        try:
            connection = self._connect()
        except (OSError, ConfigError) as error:
            return f"cannot connect: {error}"
        except BaseException as error:
            logger.exception("connecting to %s failed with an unexpected error", self._peer)
            return f"cannot connect: {type(error).__name__}: {error}"
        try:
            with connection:
                self._serve(connection)
            return "the peer closed the connection"
        except (OSError, HoldfastError) as error:
            return f"{type(error).__name__}: {error}"
        except BaseException as error:
            logger.exception("the connection to %s failed with an unexpected error", self._peer)
            return f"{type(error).__name__}: {error}"

    def _call(self, callback: Callable[[], object]) -> None:
        """Run a callback and log its exception, which would otherwise end the thread and all later saves."""
        try:
            callback()
        except BaseException:
            logger.exception("handling a message from %s failed", self._peer)

    def _serve(self, connection: socket.socket) -> None:
        received = bytearray()
        early = self._exchange_hello(connection, received)
        connection.setblocking(False)
        for frame in early:
            self._handle(frame)
        wakers = self._wakers
        if wakers is None:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(wakers[0], selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ)
            pending = b""
            while True:
                pending = self._send(connection, pending)
                if self._closing.is_set() and not pending and not self._outgoing:
                    return
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if pending else 0)
                selector.modify(connection, wanted)
                for key, mask in selector.select():
                    if key.fileobj is wakers[0]:
                        wakers[0].recv(4096)
                    elif mask & selectors.EVENT_READ and not self._receive(connection, received):
                        return

    def _exchange_hello(self, connection: socket.socket, received: bytearray) -> list[Frame]:
        """Send Hello and wait for its reply. Return the other frames that arrived with it."""
        connection.settimeout(self._hello_seconds)
        connection.sendall(write_frame(self._events.hello(), 1 << 40))
        frames: list[Frame] = []
        while True:
            data = connection.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError("the connection was closed before HelloReply")
            received += data
            frames.extend(take_frames(received))
            for position, frame in enumerate(frames):
                if frame.id == 1 << 40:
                    reply = frame.message
                    if isinstance(reply, Refused):
                        error = _refusal(reply)
                        self._events.refused(error)
                        raise error
                    if not isinstance(reply, HelloReply):
                        raise FormatError(f"Hello was answered with {type(reply).__name__}")
                    # A thread in `wait_connected` reads the round as soon as `_ready` is set.
                    self._events.hello_accepted(reply)
                    with self._lock:
                        self._ready.set()
                    self._events.connected()
                    return frames[:position] + frames[position + 1 :]

    def _send(self, connection: socket.socket, pending: bytes) -> bytes:
        with self._lock:
            if self._outgoing:
                pending += b"".join(self._outgoing)
                self._outgoing.clear()
                self._queued_bytes = 0
        while pending:
            try:
                pending = pending[connection.send(pending) :]
            except BlockingIOError:
                break
        return pending

    def _receive(self, connection: socket.socket, received: bytearray) -> bool:
        try:
            data, files, _, _ = socket.recv_fds(
                connection, _READ_BYTES, _MAX_FILES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return True
        self._files.extend(files)
        if not data:
            return False
        received += data
        for frame in take_frames(received):
            self._handle(frame)
        return True

    def _handle(self, frame: Frame) -> None:
        if frame.id == 0:
            self._call(partial(self._events.push, frame.message))
            return
        message = frame.message
        if isinstance(message, ShardFile) and message.is_attached:
            if not self._files:
                raise FormatError(f"{message.path}: the frame carries no open file")
            message = OpenedFile(message, self._files.popleft())
        with self._lock:
            future = self._waiting.pop(frame.id, None)
        if future is None:
            if isinstance(message, OpenedFile):
                os.close(message.fd)
            return
        if isinstance(message, Refused):
            self._call(partial(future.set_exception, _refusal(message)))
        else:
            self._call(partial(future.set_result, message))

    def _drop(self, reason: str) -> None:
        with self._lock:
            self._ready.clear()
            waiting, self._waiting = self._waiting, {}
            self._outgoing.clear()
            self._queued_bytes = 0
        while self._files:
            os.close(self._files.popleft())
        for future in waiting.values():
            error = UnavailableError(f"the connection to {self._peer} ended: {reason}")
            self._call(partial(future.set_exception, error))


def _refusal(refused: Refused) -> HoldfastError:
    if refused.code is Refusal.STALE_ROUND:
        return StaleRoundError(
            refused.message, own_round=refused.round, own_version=refused.version
        )
    return RefusedError(refused.code, f"{refused.code}: {refused.message}")
