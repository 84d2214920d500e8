"""Length and number of the parts of an upload, within the limits of S3 and of memory. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

MIN_PART_BYTES = 5 << 20
MAX_PARTS = 10_000
MAX_BUFFERED_BYTES = 48 << 20
"""Memory limit of an upload whose parts are made while they are sent: the parts that are being made,
wait, or are being sent. A download has the same limit (download.shard.MAX_AHEAD_BYTES)."""
_BEING_MADE = 2
"""Memory to make one part, in parts: the collected bytes, and the part that is copied from them."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PartSizes:
    """Length of all parts but the last, and how many may wait or be in flight."""

    part_bytes: int
    at_once: int


def part_sizes(size_limit: int, part_bytes: int, at_once: int, *, in_memory: bool) -> PartSizes:
    """Return the part length and the number of concurrent parts for an upload.

    Parts are longer than `part_bytes` if the object would have more than 10,000 of them. If the parts are
    made in memory, both values are reduced where the upload would hold more than MAX_BUFFERED_BYTES; only an
    object of more than 10,000 such parts may hold more.

    Args:
        size_limit: Upper bound of the object's length.
        part_bytes: Preferred length of a part.
        at_once: Preferred number of parts in flight.
        in_memory: Whether each part is in memory from when it is made until it has been sent.
    """
    least = -(-size_limit // (MAX_PARTS - 1) // _MIB) * _MIB
    if not in_memory:
        return PartSizes(max(MIN_PART_BYTES, least, part_bytes), at_once)
    fitting = MAX_BUFFERED_BYTES // (at_once + _BEING_MADE) // _MIB * _MIB
    chosen = max(MIN_PART_BYTES, least, min(part_bytes, fitting))
    return PartSizes(chosen, max(1, min(at_once, MAX_BUFFERED_BYTES // chosen - _BEING_MADE)))
