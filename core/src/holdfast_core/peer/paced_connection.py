"""A bulk connection that is read at a pace: a peer that only ever drips is given up.

The connection's time-out bounds one silence, and a byte before each of its ends would hold a restore
for ever. This bounds the sum.
"""

from __future__ import annotations

from holdfast_core.pacing.minimum_rate import Pace
from holdfast_core.peer.connection import Line


class PacedLine:
    """bulk.Incoming of a line, inside TLS or outside. `pace` is of one answer."""

    def __init__(self, line: Line, pace: Pace) -> None:
        self._line = line
        self._pace = pace
        self._taken_bytes = 0

    def taken(self, length: int) -> None:
        """So much of the payload was in the frame that ended here: heads of frames earn no time, else
        frames of a byte each would be as good as whole ones."""
        self._taken_bytes += length
        self._pace.received_bytes = self._taken_bytes

    def recv_into(self, buffer: memoryview, /) -> int:
        """Raises UnavailableError where the peer is too slow, OSError."""
        sock = self._line.sock
        return self._pace.receive(sock, sock.gettimeout(), sock.recv_into, buffer) or 0

    def version(self) -> str | None:
        """Of TLS; None outside."""
        return self._line.sock.version()
