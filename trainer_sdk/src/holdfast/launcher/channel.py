"""The launcher's connection to the sidecar: frames on the pod's Unix socket, with endless reconnects.

It uses asyncio. A handler decides which messages a new connection begins with, and handles pushes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from holdfast_core.errors import FormatError, HoldfastError
from holdfast_core.messages.schema import Hello, HelloReply, Refused
from holdfast_core.messages.socket_frames import read_frame, write_frame

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
_HELLO_SECONDS = 10.0


class ChannelHandler(Protocol):
    def hello(self) -> Hello:
        """Return the Hello for a new connection."""
        ...

    async def connected(self, reply: HelloReply) -> None:
        """Send again the messages that the sidecar may not have received."""
        ...

    async def push(self, message: Any) -> None:
        """Handle a message that is not a reply to a request."""
        ...


class SidecarChannel:
    """Connection to the sidecar that reconnects by itself. `run` never returns; cancel it."""

    def __init__(
        self,
        path: Path,
        handler: ChannelHandler,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._path = path
        self._handler = handler
        self._sleep = sleep
        self._writer: asyncio.StreamWriter | None = None
        self._next_id = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        logged = ""
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(str(self._path))
            except OSError as error:
                if logged != "absent":
                    logger.info("waiting for the sidecar at %s: %s", self._path, error)
                    logged = "absent"
                await self._sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                continue
            try:
                await self._serve(reader, writer)
                reason = "the sidecar closed the connection"
            except (OSError, HoldfastError, TimeoutError, asyncio.IncompleteReadError) as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                pause = _FIRST_PAUSE_SECONDS
            finally:
                self._drop(writer)
            if logged != reason:
                logger.warning("connection to the sidecar ended, reconnecting: %s", reason)
                logged = reason
            await self._sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def notify(self, message: Any) -> bool:
        """Send a message that has no reply. Return False when there is no connection.

        The handler's `connected` must send it again.
        """
        if self._writer is None or self._writer.is_closing():
            return False
        self._writer.write(write_frame(message, 0))
        return True

    async def request(self, message: Any) -> Any:
        """Send a request and return the reply, which may be Refused.

        Raises ConnectionResetError when there is no connection, or when it ends before the reply.
        """
        if self._writer is None:
            raise ConnectionResetError("no connection to the sidecar")
        self._next_id += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[self._next_id] = future
        self._writer.write(write_frame(message, self._next_id))
        return await future

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        reading = asyncio.ensure_future(self._read(reader))
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                greeting = asyncio.ensure_future(self.request(self._handler.hello()))
                await asyncio.wait({greeting, reading}, return_when=asyncio.FIRST_COMPLETED)
                if not greeting.done():
                    greeting.cancel()
                    await reading
                    raise ConnectionResetError(
                        "the sidecar closed the connection before HelloReply"
                    )
            reply = greeting.result()
            if isinstance(reply, Refused):
                raise FormatError(f"the sidecar refused Hello: {reply.code}: {reply.message}")
            if not isinstance(reply, HelloReply):
                raise FormatError(f"the sidecar answered Hello with {type(reply).__name__}")
            await self._handler.connected(reply)
            await reading
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError, HoldfastError):
                await reading

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (frame := await read_frame(reader)) is not None:
            if frame.id == 0:
                await self._handler.push(frame.message)
                continue
            future = self._waiting.pop(frame.id, None)
            if future is not None and not future.done():
                future.set_result(frame.message)

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._writer = None
        writer.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionResetError("the connection to the sidecar ended"))
        self._waiting.clear()
