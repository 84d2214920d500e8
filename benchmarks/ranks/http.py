"""Requests over kept connections that take little CPU, because the sidecars share the cores with them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

Answer = Callable[[str, str, str, bytes], bytes]
"""Function of the server name that the caller asked for, method, path and body. It returns the body of the
reply."""


class _Incoming:
    """Bytes of a connection, from which whole messages are taken."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._head: bytes | None = None
        self._missing = 0

    def add(self, data: bytes) -> None:
        self._data += data

    def message(self) -> tuple[bytes, bytes] | None:
        """Return head and body of the next message, or None until it has arrived."""
        if self._head is None:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return None
            self._head = bytes(self._data[:end])
            del self._data[: end + 4]
            lines = self._head.lower().split(b"\r\n")
            length = next((line for line in lines if line.startswith(b"content-length:")), b":0")
            self._missing = int(length.partition(b":")[2])
        if len(self._data) < self._missing:
            return None
        head, body = self._head, bytes(self._data[: self._missing])
        del self._data[: self._missing]
        self._head = None
        return head, body


class _Replies(asyncio.Protocol):
    def __init__(self) -> None:
        self._incoming = _Incoming()
        self.waiting: asyncio.Future[tuple[int, bytes]] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._incoming.add(data)
        message = self._incoming.message()
        if message is not None and self.waiting is not None and not self.waiting.done():
            self.waiting.set_result((int(message[0].split(b" ", 2)[1]), message[1]))

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_exception(ConnectionError("the connection was closed"))


class Client:
    """Connection of one played member to a sidecar. It is opened again when the sidecar has closed it."""

    def __init__(self, context: ssl.SSLContext, own_address: str) -> None:
        self._context = context
        self._own_address = own_address
        self._connected: tuple[str, int] | None = None
        self._replies = _Replies()
        self._one = asyncio.Lock()

    async def request(
        self, where: tuple[str, int], name: str, head: str, body: bytes
    ) -> tuple[int, bytes]:
        """Send one request and return the status and the body of the reply. Raises OSError.

        Args:
            where: Address and port of the sidecar.
            name: The name that its certificate must have.
            head: The first line and further lines, without the length.
            body: The body.
        """
        async with self._one:
            if self._replies.transport is None or self._connected != where:
                await self._connect(where, name)
            replies = self._replies
            assert replies.transport is not None
            replies.waiting = asyncio.get_running_loop().create_future()
            replies.transport.write(
                f"{head}\r\nHost: {where[0]}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
            return await replies.waiting

    async def _connect(self, where: tuple[str, int], name: str) -> None:
        self.close()
        self._replies = _Replies()
        loop = asyncio.get_running_loop()
        await loop.create_connection(
            lambda: self._replies,
            *where,
            ssl=self._context,
            server_hostname=name,
            local_addr=(self._own_address, 0),
            ssl_handshake_timeout=120,
        )
        self._connected = where

    def close(self) -> None:
        if self._replies.transport is not None:
            self._replies.transport.close()
