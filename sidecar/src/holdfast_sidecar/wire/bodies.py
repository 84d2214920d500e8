"""Bodies of HTTP requests and replies: bounded reading, and sending in pieces.

The control server reads a body only after it has admitted the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from aiohttp import web

from holdfast_core.errors import FormatError, UnavailableError
from holdfast_sidecar.wire.budget import ByteBudget

_BODY_SECONDS = 30.0
"""Seconds from the head of a request to the end of its body, including the wait for memory."""
_PIECE_BYTES = 256 << 10
"""Bytes that are sent at once. TLS encrypts what it is given on the event loop and buffers it for a slow
receiver, and the manifest of thousands of ranks goes to a hundred of them at the same time."""


def in_pieces(body: bytes) -> Iterator[memoryview]:
    """Yield a body in the pieces in which it is sent."""
    for start in range(0, len(body), _PIECE_BYTES):
        yield memoryview(body)[start : start + _PIECE_BYTES]


class Bodies:
    """Reader of request bodies whose size is bounded for each one and for all together."""

    def __init__(self, limit_bytes: int) -> None:
        self._budget = ByteBudget(limit_bytes)

    @asynccontextmanager
    async def read(self, request: web.Request, limit_bytes: int) -> AsyncIterator[bytes]:
        """Read the whole body. Its bytes count against the common limit until the context ends.

        Raises:
            FormatError: The body is too large, cut short, or of unknown length.
            UnavailableError: The body did not arrive in time, or there was no room for it.
        """
        length = _announced(request, limit_bytes)
        try:
            async with asyncio.timeout(_BODY_SECONDS) as deadline, self._budget.take(length):
                body = await request.content.readexactly(length)
                deadline.reschedule(None)
                yield body
        except asyncio.IncompleteReadError as error:
            raise FormatError(
                f"{request.path}: the body ended after {len(error.partial)} of {length} bytes"
            ) from error
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise UnavailableError(
                f"{request.path}: {length} bytes were announced, but were not received within "
                f"{_BODY_SECONDS:.0f} s: the caller is slow, or too many requests arrived together"
            ) from error


def _announced(request: web.Request, limit_bytes: int) -> int:
    length = request.content_length
    if length is None:
        if request.body_exists:
            raise FormatError(f"{request.path}: expected a Content-Length")
        return 0
    if length > limit_bytes:
        raise FormatError(f"{request.path}: {length} bytes, at most {limit_bytes} are accepted")
    return length
