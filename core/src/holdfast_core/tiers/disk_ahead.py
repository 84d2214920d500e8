"""Reads of a file that stay ahead of whoever uses the bytes. Nothing here knows shards."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from holdfast_core.format.shard import BLOCK_BYTES, align
from holdfast_core.ids import ByteRange
from holdfast_core.tiers.disk import BufferPool, read_at, set_direct


def read_ahead(fd: int, ranges: Iterable[ByteRange], buffers: BufferPool) -> Iterator[memoryview]:
    """The bytes of each range, in order: the next one is read while the caller uses this one.

    A view is shorter where the file ends, and valid until the next one is asked for. A range,
    grown to whole blocks, is at most half a buffer long (see `pieces`). Past the page cache where
    the file system can: shards are written past it and read once. Raises OSError.
    """
    with ExitStack() as stack:
        buffer = stack.enter_context(buffers.take())
        half = len(buffer) // 2
        halves = (buffer[:half], buffer[half:])
        direct = stack.enter_context(_direct(fd))
        reader = stack.enter_context(ThreadPoolExecutor(1, "holdfast-node-read"))
        pending: Future[memoryview] | None = None
        for number, wanted in enumerate(ranges):
            following = reader.submit(_read, direct, halves[number % 2], wanted)
            if pending is not None:
                yield pending.result()
            pending = following
        if pending is not None:
            yield pending.result()


def pieces(span: ByteRange, buffers: BufferPool) -> Iterator[ByteRange]:
    """`span`, which begins at a block, cut for `read_ahead`."""
    step = buffers.size_bytes // 2
    for start in range(span.start, span.stop, step):
        yield ByteRange(start, min(start + step, span.stop))


@contextmanager
def _direct(fd: int) -> Iterator[int]:
    """A descriptor of the same open file with flags of its own: others send from `fd` meanwhile.
    The file may have lost its name."""
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        set_direct(own, True)
        yield own
    finally:
        os.close(own)


def _read(fd: int, buffer: memoryview, wanted: ByteRange) -> memoryview:
    first = wanted.start // BLOCK_BYTES * BLOCK_BYTES
    got = read_at(fd, buffer[: align(wanted.stop) - first], first)
    return buffer[wanted.start - first : min(got, wanted.stop - first)]
