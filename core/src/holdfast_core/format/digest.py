"""The two checksums of the format: CRC32C of chunks, and BLAKE3 of chunks, payloads and documents."""

from __future__ import annotations

import functools
import re

import crc32c as _crc32c
from blake3 import blake3

from holdfast_core.errors import FormatError
from holdfast_core.ids import Digest

PREFIX = "b3:"
_DIGEST = re.compile(r"b3:[0-9a-f]{64}\Z")
_POLYNOMIAL = 0x82F63B78

Buffer = bytes | bytearray | memoryview


def crc32c(data: Buffer, value: int = 0) -> int:
    """Return the CRC32C (Castagnoli) of `data`, continued from `value`.

    Releases the GIL for large buffers.
    """
    return int(_crc32c.crc32c(data, value))


def append_crc(crc_a: int, crc_b: int, length_b: int) -> int:
    """Return the CRC32C of A followed by B, from their CRCs and the length of B in bytes.

    The map for each of the last 16 lengths is cached, so calls with few different lengths are fast.
    """
    if length_b < 0:
        raise ValueError(f"length {length_b} is negative")
    shifted = 0
    columns = _shift_map(length_b)
    while crc_a:
        low = crc_a & -crc_a
        shifted ^= columns[low.bit_length() - 1]
        crc_a ^= low
    return shifted ^ crc_b


@functools.lru_cache(maxsize=16)
def _shift_map(length_bytes: int) -> tuple[int, ...]:
    # Appending zero bytes is a linear map of the CRC over GF(2), so 32 columns define it. Bit 31 is the
    # polynomial 1, and each lower bit is x times the bit above it.
    columns = [_append_zeros(1 << 31, length_bytes)]
    for _ in range(31):
        last = columns[-1]
        columns.append(last >> 1 ^ (_POLYNOMIAL if last & 1 else 0))
    return tuple(reversed(columns))


def _append_zeros(crc: int, length_bytes: int) -> int:
    """Return the CRC after `length_bytes` zero bytes, by repeated squaring of the map of one zero bit."""
    square = [_POLYNOMIAL, *(1 << bit for bit in range(31))]
    for _ in range(3):
        square = [_times(square, column) for column in square]
    remaining = length_bytes
    while remaining:
        if remaining & 1:
            crc = _times(square, crc)
        remaining >>= 1
        if remaining:
            square = [_times(square, column) for column in square]
    return crc


def _times(matrix: list[int], vector: int) -> int:
    total = 0
    row = 0
    while vector:
        if vector & 1:
            total ^= matrix[row]
        vector >>= 1
        row += 1
    return total


def digest_of(data: Buffer) -> Digest:
    """Return the BLAKE3 of a buffer."""
    return Digest(PREFIX + blake3(data).hexdigest())


def chunk_digest(data: Buffer) -> bytes:
    """Return the BLAKE3 of a chunk as 32 bytes."""
    return bytes(blake3(data).digest())


class Blake3:
    """BLAKE3 of a stream of buffers."""

    __slots__ = ("_hasher",)

    def __init__(self) -> None:
        self._hasher = blake3()

    def update(self, data: Buffer) -> None:
        self._hasher.update(data)

    def digest(self) -> Digest:
        return Digest(PREFIX + self._hasher.hexdigest())

    def raw(self) -> bytes:
        """Return the digest as 32 bytes."""
        return bytes(self._hasher.digest())


def parse_digest(text: object, what: str) -> Digest:
    """Check that `text` is `b3:` and 64 lower-case hex characters. Raises FormatError.

    `what` names the value in the error.
    """
    if not isinstance(text, str) or _DIGEST.match(text) is None:
        shown = text if isinstance(text, str) and len(text) <= 80 else type(text).__name__
        raise FormatError(f"{what}: {shown!r} is not a digest, expected b3: and 64 hex characters")
    return Digest(text)


def hex_of(digest: Digest) -> str:
    """Return the 64 hex characters of a digest, for keys and file names. Raises FormatError."""
    return parse_digest(digest, "digest")[len(PREFIX) :]
