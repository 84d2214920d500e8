"""Chunks that an object stores compressed: fetched as they are stored, decoded, compared."""

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
    """Chunks that the object stores in a row from `offset` on, into `places`: the place of each, as
    long as the chunk. Those that do not decode, or are not good, are read once more, alone. Returns
    the positions of those that are wrong at every read. Besides the places their stored bytes are in
    memory, which are no more. Raises NotFoundError, UnavailableError."""
    decoder = ChunkDecoder()
    total = coding.stored_bytes(0, len(places))
    # An anonymous map: a bytearray would be filled with zeros first.
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
                "%s: bytes from %d on: %s; reading them once more",
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
    """Why the place does not hold the chunk now; "" if it does."""
    try:
        decoder.decode(stored, width, place)
    except CorruptionError as error:
        return str(error)
    return "" if is_good(position, place) else "not what the chunk table says"
