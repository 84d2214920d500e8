"""Fetch of chunks that an object stores compressed: they are read, decoded and verified."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Sequence

from holdfast_core.errors import CorruptionError
from holdfast_core.shards.coding import ChunkDecoder, Coding
from holdfast_core.store.download.source import READS, Source

_LOG = logging.getLogger(__name__)


def fill_decoded(
    source: Source,
    offset: int,
    coding: Coding,
    places: Sequence[memoryview],
    is_good: Callable[[int, memoryview], bool],
) -> list[int]:
    """Fetch consecutive compressed chunks of an object and decode them.

    A chunk that does not decode or does not verify is read again, alone, up to READS reads in all. Besides
    `places` the stored bytes are in memory; they are never longer than the chunks.

    Args:
        source: The object.
        offset: Where the first chunk begins in the object.
        coding: How these chunks are stored.
        places: One buffer for each chunk, as long as the chunk.
        is_good: Receives the position of a chunk and its buffer; returns whether the chunk verifies.

    Returns:
        The positions in `places` of the chunks that were wrong at every read.

    Raises:
        NotFoundError: The object is gone.
        UnavailableError: The retry policy is spent.
    """
    decoder = ChunkDecoder()
    total = coding.stored_bytes(0, len(places))
    # An anonymous map, because a bytearray would be filled with zeros first.
    stored = memoryview(mmap.mmap(-1, total))
    source.fill(offset, stored)
    bad: list[int] = []
    for position, place in enumerate(places):
        start, stop = (coding.stored_bytes(0, at) for at in (position, position + 1))
        found = stored[start:stop]
        for left in reversed(range(READS)):
            why = _wrong(decoder, found, coding.widths[position], place, position, is_good)
            if not why:
                break
            if not left:
                bad.append(position)
                break
            _LOG.warning(
                "%s: bytes from %d on: %s; reading them again",
                source.describe(),
                offset + start,
                why,
            )
            source.fill(offset + start, found)
    return bad


def _wrong(
    decoder: ChunkDecoder,
    stored: memoryview,
    width: int,
    place: memoryview,
    position: int,
    is_good: Callable[[int, memoryview], bool],
) -> str:
    """Decode a chunk into its buffer and return why the result is wrong; "" if it is good."""
    try:
        decoder.decode(stored, width, place)
    except CorruptionError as error:
        return str(error)
    return "" if is_good(position, place) else "the chunk does not match the chunk table"
