"""Read a bulk connection with a minimum rate, so that a slow peer cannot hold a restore for ever.

The connection's time-out bounds one pause only. A peer could send a byte before each time-out.
"""

from __future__ import annotations

from holdfast_core.pacing.minimum_rate import Pace
from holdfast_core.peer.connection import Line


class PacedLine:
    """`protocol.Incoming` of a Line, inside TLS or outside, for one answer."""

    def __init__(self, line: Line, pace: Pace) -> None:
        self._line = line
        self._pace = pace
        self._taken_bytes = 0

    def taken(self, length: int) -> None:
        """Count the payload bytes of a frame that was received whole, without its header.

        Callers that accept frames of any size call this after each frame. Otherwise a peer could extend the
        deadline with the headers of very small frames.
        """
        self._taken_bytes += length
        self._pace.received_bytes = self._taken_bytes

    def recv_into(self, buffer: memoryview, /) -> int:
        """Read into `buffer`, and return the number of bytes. 0 means that the peer closed the connection.

        Raises UnavailableError if the peer is too slow, and OSError.
        """
        sock = self._line.sock
        return self._pace.receive(sock, sock.gettimeout(), sock.recv_into, buffer) or 0

    def version(self) -> str | None:
        """Return the TLS version, or None outside TLS."""
        return self._line.sock.version()
