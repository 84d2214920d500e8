"""An authenticated connection between two launchers.

Both ends first send a line with the protocol's version and 16 random bytes. From these and the run's key
follows the key of the connection. A frame is a u32 length, an HMAC-SHA256 over direction, number and body,
and the body. A frame of another process, or one that was sent before, therefore has no valid HMAC. The
messages are not encrypted: they hold no secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import struct
from typing import Any, Self

from holdfast.launcher.command_line.node_options import NodeOptions
from holdfast.launcher.nodes import messages
from holdfast_core.errors import FormatError, UnavailableError

ALIVE_SECONDS = 5.0
"""Period of `Alive`."""
SILENCE_SECONDS = 30.0
"""A connection over which nothing arrives for so long counts as broken."""

_GREETING = f"holdfast run {messages.PROTOCOL}\n".encode()
_NONCE_BYTES = 16
_HEAD = struct.Struct("!I32s")


def run_key(options: NodeOptions) -> bytes:
    """Return the key that all launchers of a run share."""
    words = (options.run_id.encode(), options.token.encode())
    text = b"".join(len(word).to_bytes(8, "big") + word for word in words)
    return hashlib.sha256(b"holdfast run" + text).digest()


def store_secret(key: bytes, salt: str) -> str:
    """Return the secret of a round's store, which all launchers of a run can compute."""
    return hmac.new(key, b"store" + salt.encode(), hashlib.sha256).hexdigest()


class NodeLink:
    """One end of a connection. `open` returns it; `close` ends it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        key: bytes,
        *,
        leads: bool,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._key = key
        self._leads = leads
        self._sent = 0
        self._received = 0
        self._keeping: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        key: bytes,
        *,
        leads: bool,
    ) -> Self:
        """Exchange the greetings.

        Args:
            reader: The connection.
            writer: The connection.
            key: The run's key.
            leads: Whether this end is node 0.

        Raises:
            FormatError: The other end is not a launcher of this release.
            UnavailableError: The connection has ended.
        """
        own = secrets.token_bytes(_NONCE_BYTES)
        writer.write(_GREETING + own)
        try:
            greeting = await reader.readexactly(len(_GREETING))
            other = await reader.readexactly(_NONCE_BYTES)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise UnavailableError("it closed the connection without a greeting") from error
        if greeting != _GREETING:
            raise FormatError(
                f"it is not `holdfast run` of the same release: expected {_GREETING!r}, found {greeting!r}"
            )
        nonces = own + other if leads else other + own
        session = hmac.new(key, b"connection" + nonces, hashlib.sha256).digest()
        return cls(reader, writer, session, leads=leads)

    def keep_alive(self) -> None:
        """Send Alive from time to time, until `close`."""
        self._keeping = asyncio.get_running_loop().create_task(self._keep_alive())

    def send(self, message: Any) -> None:
        """Send a message, unless the connection has ended. `receive` then reports it."""
        if self._writer.is_closing():
            return
        body = messages.encode(message)
        self._writer.write(_HEAD.pack(len(body), self._mac(self._leads, self._sent, body)) + body)
        self._sent += 1

    async def receive(self, silence_seconds: float = SILENCE_SECONDS) -> Any:
        """Return the next message that is not Alive.

        Raises:
            FormatError: A frame is not authentic or not valid.
            UnavailableError: The connection has ended, or nothing arrived for `silence_seconds`.
        """
        while True:
            try:
                async with asyncio.timeout(silence_seconds):
                    length, mac = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
                    if not 0 < length <= messages.MAX_BYTES:
                        raise FormatError(
                            f"a frame has {length} bytes, expected 1 to {messages.MAX_BYTES}"
                        )
                    body = await self._reader.readexactly(length)
            except TimeoutError as error:
                raise UnavailableError(f"nothing arrived for {silence_seconds:g} s") from error
            except asyncio.IncompleteReadError as error:
                raise UnavailableError("it closed the connection") from error
            except OSError as error:
                raise UnavailableError(f"the connection broke: {error}") from error
            if not hmac.compare_digest(mac, self._mac(not self._leads, self._received, body)):
                raise FormatError("its --rdzv-id or HOLDFAST_RUN_TOKEN differs")
            self._received += 1
            message = messages.decode(body)
            if not isinstance(message, messages.Alive):
                return message

    async def wait_closed(self, seconds: float) -> None:
        """Wait until the other end has closed the connection, at most `seconds`."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(seconds):
                while await self._reader.read(4096):
                    pass

    def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        self._writer.close()

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_SECONDS)
            self.send(messages.Alive())

    def _mac(self, from_leader: bool, number: int, body: bytes) -> bytes:
        head = (b"L" if from_leader else b"N") + number.to_bytes(8, "big")
        return hmac.new(self._key, head + body, hashlib.sha256).digest()
