"""Frames out of a stream of bytes, for a socket that is read without blocking."""

from __future__ import annotations

import struct

from holdfast_core.errors import FormatError
from holdfast_core.messages.codec import MAX_MESSAGE_BYTES
from holdfast_core.messages.socket_frames import Frame, UnknownMessage, parse_body

_LENGTH = struct.Struct("!I")


class FrameDecoder:
    """Feed it what arrives; it gives the frames that are complete. Bounded by one frame."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[Frame]:
        """Raises FormatError; the connection is then out of step and must be closed."""
        self._buffer += data
        frames: list[Frame] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if not 0 < length <= MAX_MESSAGE_BYTES:
                raise FormatError(f"frame: {length} bytes, expected 1..{MAX_MESSAGE_BYTES}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            frame = parse_body(self._buffer[_LENGTH.size : end])
            self._buffer = self._buffer[end:]
            if frame.id != 0 or not isinstance(frame.message, UnknownMessage):
                frames.append(frame)
        return frames
