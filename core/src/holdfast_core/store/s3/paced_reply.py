"""Socket adapter that ends a reply that arrives too slowly (holdfast_core.pacing.minimum_rate)."""

from __future__ import annotations

import io
import socket

from holdfast_core.pacing.minimum_rate import Pace


class PacedSocket:
    """A connected socket with the one method that http.client.HTTPResponse uses, `makefile`."""

    def __init__(self, sock: socket.socket, pace: Pace) -> None:
        self._sock = sock
        self._pace = pace

    def makefile(self, mode: str) -> io.BufferedReader:
        if mode != "rb":
            raise ValueError(f"mode {mode!r}, expected 'rb'")
        return io.BufferedReader(_PacedReader(self._sock, self._pace))


class _PacedReader(io.RawIOBase):
    """Raw reader of a socket whose reads are bounded by a Pace."""

    def __init__(self, sock: socket.socket, pace: Pace) -> None:
        self._sock = sock
        self._pace = pace
        self._idle_seconds = sock.gettimeout()
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]  # takes any buffer
        return self._pace.receive(self._sock, self._idle_seconds, self._raw.readinto, buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
