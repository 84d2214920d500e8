"""Reads of a file that stay ahead of whoever uses the bytes. Nothing here knows shards."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from holdfast_core.ids import ByteRange
from holdfast_core.node.files import BufferPool, read_at, set_direct
from holdfast_core.shards.file import BLOCK_BYTES, align

_PARTS = 3
"""Of a buffer: the caller uses one, two are read. A disk that is asked for one thing at a time waits
between the answers."""


def read_ahead(fd: int, ranges: Iterable[ByteRange], buffers: BufferPool) -> Iterator[memoryview]:
    """The bytes of each range, in order: the next two are read while the caller uses this one.

    A view is shorter where the file ends, and valid until the next one is asked for. A range,
    grown to whole blocks, is at most a third of a buffer long (see `pieces`). Past the page cache
    where the file system can: shards are written past it and read once. Raises OSError.
    """
    with ExitStack() as stack:
        buffer = stack.enter_context(buffers.take())
        step = _part_bytes(buffers)
        parts = tuple(buffer[n * step : (n + 1) * step] for n in range(_PARTS))
        direct = stack.enter_context(_direct(fd))
        readers = stack.enter_context(ThreadPoolExecutor(_PARTS - 1, "holdfast-node-read"))
        pending: deque[Future[memoryview]] = deque()
        for number, wanted in enumerate(ranges):
            pending.append(readers.submit(_read, direct, parts[number % _PARTS], wanted))
            if len(pending) == _PARTS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def pieces(span: ByteRange, buffers: BufferPool) -> Iterator[ByteRange]:
    """`span`, which begins at a block, cut for `read_ahead`."""
    step = _part_bytes(buffers)
    for start in range(span.start, span.stop, step):
        yield ByteRange(start, min(start + step, span.stop))


def _part_bytes(buffers: BufferPool) -> int:
    return buffers.size_bytes // _PARTS // BLOCK_BYTES * BLOCK_BYTES


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
