"""Decoder of frames for a socket that is read without blocking."""

from __future__ import annotations

import struct

from holdfast_core.errors import FormatError
from holdfast_core.messages.codec import MAX_MESSAGE_BYTES
from holdfast_core.messages.socket_frames import Frame, UnknownMessage, parse_body

_LENGTH = struct.Struct("!I")


class FrameDecoder:
    """Splits a stream of bytes into frames. It buffers at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[Frame]:
        """Add received bytes and return the frames that are complete.

        Raises FormatError for an invalid frame. The stream cannot be decoded any further then, and the
        connection must be closed.
        """
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
