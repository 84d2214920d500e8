"""A source of an object whose second part cannot be made, and what is kept of the first one meanwhile."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import TracebackType

from holdfast_core.errors import TierError
from holdfast_core.format.canonical import crc32c
from holdfast_core.tiers.objects import Part


class EndingSource:
    """An ObjectSource. The error that ends it has the calls that led to the making of its second part."""

    made_while_sent = True
    size_limit = 20 << 20

    def parts(self, part_bytes: int) -> Iterator[Part]:
        yield Part((bytes(1000),), 1000, crc32c(bytes(1000)), False)
        raise TierError("no more parts")

    def verify(self) -> None:
        """Do nothing."""


def kept_of_parts(calls: TracebackType | None) -> list[object]:
    """Return the parts, and the bytes of parts, to which local variables of these calls refer."""
    frames = [frame for frame, _ in traceback.walk_tb(calls)]
    assert any(frame.f_code is EndingSource.parts.__code__ for frame in frames)
    found = [value for frame in frames for value in frame.f_locals.values()]
    pairs = [value for pair in found if isinstance(pair, tuple) for value in pair]
    return [v for v in (*found, *pairs) if isinstance(v, bytes | memoryview | Part)]
