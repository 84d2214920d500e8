"""Copies a payload into memory segment by segment, for a save that streams (ADR 0069)."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from holdfast.state.copying.jobs import Places, copies_into, copy_flat, flat_bytes
from holdfast.state.copying.target import BATCH_BYTES, PIECE_BYTES
from holdfast.state.snapshot import SavePlan, Snapshot
from holdfast.state.tensors import Leaf
from holdfast_core.ids import ByteRange

Memory = np.ndarray[Any, Any]
"""One-dimensional uint8 array."""
Jobs = list[tuple[int, Callable[[], object]]]


class SegmentWriter:
    """Copies the segments of one save, in ascending order.

    A tensor that lies across the border of two segments is cut. If it is not contiguous, it is first copied
    whole, and that copy is kept until its last segment is written.
    """

    def __init__(self, plan: SavePlan, snapshot: Snapshot) -> None:
        """Make the writer. `snapshot` must fit `plan`."""
        self._objects = plan.payload.objects
        self._text = snapshot.objects
        self._head = np.frombuffer(plan.payload.header, dtype=np.uint8)
        self._leaves = sorted(
            ((plan.ranges[leaf.name], leaf) for leaf in snapshot.leaves if leaf.byte_count),
            key=lambda placed: placed[0].start,
        )
        self._starts = [where.start for where, _ in self._leaves]
        self._cut: tuple[str, Any] | None = None
        """Name and bytes of the tensor that continues in the next segment."""

    def write(self, segment: ByteRange, target: Memory, run: Callable[[Jobs], None]) -> None:
        """Copy the current bytes of a segment.

        Args:
            segment: Range of the payload. It starts at a multiple of 64 bytes.
            target: Memory of the segment's length, aligned to 64 bytes.
            run: Runs the copies and returns when all are done.
        """
        self._write_fixed(segment, target)
        places = Places(target)
        whole: list[tuple[int, Leaf, Any]] = []
        jobs: Jobs = []
        for where, leaf in self._in(segment):
            start, stop = max(where.start, segment.start), min(where.stop, segment.stop)
            place = target[start - segment.start : stop - segment.start]
            if (start, stop) == (where.start, where.stop):
                whole.append((len(whole), leaf, places.of(leaf, start - segment.start)))
                continue
            flat = self._flat(leaf, continues=stop < where.stop)
            for low in range(0, stop - start, PIECE_BYTES):
                high = min(low + PIECE_BYTES, stop - start)
                first = start - where.start
                piece = flat[first + low : first + high]
                jobs.append((high - low, partial(copy_flat, place[low:high], piece)))
        sources = [leaf.source for _, leaf, _ in whole]
        copies = copies_into(whole, PIECE_BYTES, BATCH_BYTES)
        run(jobs + [(size, partial(copy, sources)) for size, copy in copies])

    def _in(self, segment: ByteRange) -> Iterator[tuple[ByteRange, Leaf]]:
        """Yield the leaves that have bytes in the segment."""
        first = max(0, bisect.bisect_right(self._starts, segment.start) - 1)
        for where, leaf in self._leaves[first:]:
            if where.start >= segment.stop:
                return
            if where.stop > segment.start:
                yield where, leaf

    def _flat(self, leaf: Leaf, *, continues: bool) -> Any:
        """Return the bytes of a cut tensor, and keep them if the next segment continues it."""
        flat = flat_bytes(leaf) if self._cut is None or self._cut[0] != leaf.name else self._cut[1]
        self._cut = (leaf.name, flat) if continues else None
        return flat

    def _write_fixed(self, segment: ByteRange, target: Memory) -> None:
        """Copy the header and the objects, with the spaces behind them."""
        head = self._head[segment.start : segment.stop]
        target[: len(head)] = head
        start, stop = max(self._objects.start, segment.start), min(self._objects.stop, segment.stop)
        if start < stop:
            place = target[start - segment.start : stop - segment.start]
            first = start - self._objects.start
            text = np.frombuffer(self._text[first : first + len(place)], dtype=np.uint8)
            place[: len(text)] = text
            place[len(text) :] = ord(" ")
