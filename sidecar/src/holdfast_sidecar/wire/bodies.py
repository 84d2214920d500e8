"""Bodies of HTTP requests and replies: bounded reading within one budget of memory, and sending in pieces.

The control server reads a body only after it has admitted the caller. `ClosedConnections` counts and logs the
connections that a server closes before their end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

from aiohttp import web

from holdfast_core import logs
from holdfast_core.errors import FormatError, UnavailableError
from holdfast_core.messages.codec import MAX_CONTROL_BYTES
from holdfast_sidecar.base.rounds import Caller


class ByteBudget:
    """Budget of `limit_bytes` for one event loop. Callers wait while their bytes do not fit."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0
        self._freed = asyncio.Condition()

    @property
    def taken_bytes(self) -> int:
        return self._taken_bytes

    @asynccontextmanager
    async def take(self, size_bytes: int) -> AsyncIterator[None]:
        """Take `size_bytes` until the context ends. They must not exceed the limit of the budget."""
        async with self._freed:
            await self._freed.wait_for(lambda: self._taken_bytes + size_bytes <= self._limit_bytes)
            self._taken_bytes += size_bytes
        try:
            yield
        finally:
            self._taken_bytes -= size_bytes
            async with self._freed:
                self._freed.notify_all()


_PIECE_BYTES = 256 << 10
"""Bytes that are sent or received at once. TLS encrypts what it is given on the event loop and buffers it for
a slow receiver, and the manifest of thousands of ranks goes to a hundred of them at the same time."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits on the request bodies that are being read and parsed. A sidecar has a memory limit."""

    operator_bytes: int = MAX_CONTROL_BYTES
    """All bodies of the operator. Members cannot take them: the operator could not end a round otherwise."""
    members_bytes: int = 2 * MAX_CONTROL_BYTES
    """All bodies of members together. A gang has many members."""
    member_bytes: int = MAX_CONTROL_BYTES
    """The bodies of one member. The largest body must fit."""
    body_seconds: float = 30.0
    """Seconds from the head of a request to the end of its body, including the wait for memory."""
    piece_seconds: float = 5.0
    """Seconds for each 256 KiB of a body, the minimum rate. A silent caller loses its memory."""


def in_pieces(body: bytes) -> Iterator[memoryview]:
    """Yield a body in the pieces in which it is sent."""
    for start in range(0, len(body), _PIECE_BYTES):
        yield memoryview(body)[start : start + _PIECE_BYTES]


class Bodies:
    """Reader of request bodies whose size is bounded for each one, for each caller and for all together."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._operator = ByteBudget(limits.operator_bytes)
        self._members = ByteBudget(limits.members_bytes)
        self._shares: WeakValueDictionary[str, ByteBudget] = WeakValueDictionary()
        """The budget of each member that has a body here."""

    @asynccontextmanager
    async def read(
        self, request: web.Request, caller: Caller, limit_bytes: int
    ) -> AsyncIterator[bytes]:
        """Read the whole body. Its bytes count against the caller's limits until the context ends.

        Raises:
            FormatError: The body is too large, cut short, or of unknown length.
            UnavailableError: The body did not arrive in time, or there was no room for it.
        """
        length = _announced(request, limit_bytes)
        try:
            async with asyncio.timeout(self._limits.body_seconds) as deadline:
                async with self._room(caller, length):
                    body = await self._received(request, length)
                    deadline.reschedule(None)
                    yield body
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise UnavailableError(
                f"{request.path}: {length} bytes were announced, but were not received within "
                f"{self._limits.body_seconds:.0f} s: the caller is slow, or too many requests arrived "
                "together"
            ) from error

    @asynccontextmanager
    async def _room(self, caller: Caller, length: int) -> AsyncIterator[None]:
        if caller.operator:
            async with self._operator.take(length):
                yield
            return
        share = self._shares.setdefault(caller.pod, ByteBudget(self._limits.member_bytes))
        async with share.take(length), self._members.take(length):
            yield

    async def _received(self, request: web.Request, length: int) -> bytes:
        pieces: list[bytes] = []
        for start in range(0, length, _PIECE_BYTES):
            size = min(_PIECE_BYTES, length - start)
            try:
                async with asyncio.timeout(self._limits.piece_seconds) as deadline:
                    pieces.append(await request.content.readexactly(size))
            except asyncio.IncompleteReadError as error:
                raise FormatError(
                    f"{request.path}: the body ended after {start + len(error.partial)} of {length} "
                    "bytes"
                ) from error
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                raise UnavailableError(
                    f"{request.path}: bytes {start} to {start + size} of {length} were not received "
                    f"within {self._limits.piece_seconds:.0f} s: the caller is slow"
                ) from error
        return b"".join(pieces)


def _announced(request: web.Request, limit_bytes: int) -> int:
    length = request.content_length
    if length is None:
        if request.body_exists:
            raise FormatError(f"{request.path}: expected a Content-Length")
        return 0
    if length > limit_bytes:
        raise FormatError(f"{request.path}: {length} bytes, at most {limit_bytes} are accepted")
    return length


class ClosedConnections:
    """Record of one port. Strangers can cause many such connections, so few of them are logged."""

    def __init__(self, port: str, counted: Callable[[str, str], None]) -> None:
        """Create the record. `counted` is called with the port and the reason of each connection."""
        self._port = port
        self._counted = counted
        self._log = logs.RateLimited()

    def __call__(self, reason: str, message: str) -> None:
        self._counted(self._port, reason)
        self._log.warning(reason, message, port=self._port)
