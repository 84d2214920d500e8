"""Reads of a file that run ahead of their consumer. Independent of the shard format."""

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
"""Parts of a buffer: the caller uses one while two are read. A disk is idle between single reads."""


def read_ahead(fd: int, ranges: Iterable[ByteRange], buffers: BufferPool) -> Iterator[memoryview]:
    """Yield the bytes of each range in order, and read the next two while the caller uses one.

    A view is shorter if the file ends within its range, and it is valid until the next one is requested.
    The reads bypass the page cache where the file system can, as the writes do: a shard is read once.

    Args:
        fd: The file.
        ranges: Byte ranges. Each, extended to whole blocks, is at most a third of a buffer (see
            `pieces`).
        buffers: Pool that one buffer is taken from.

    Raises:
        OSError: The disk failed.
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
    """Cut `span`, which begins on a block boundary, into ranges for `read_ahead`."""
    step = _part_bytes(buffers)
    for start in range(span.start, span.stop, step):
        yield ByteRange(start, min(start + step, span.stop))


def _part_bytes(buffers: BufferPool) -> int:
    return buffers.size_bytes // _PARTS // BLOCK_BYTES * BLOCK_BYTES


@contextmanager
def _direct(fd: int) -> Iterator[int]:
    """Open the same file again with O_DIRECT, because other threads may send from `fd` meanwhile.

    The path under /proc also works for a file that was deleted. A file of another user, whose descriptor
    this process was sent, cannot be opened again; no other thread uses that descriptor.
    """
    try:
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        own = os.dup(fd)
    try:
        set_direct(own, True)
        yield own
    finally:
        os.close(own)


def _read(fd: int, buffer: memoryview, wanted: ByteRange) -> memoryview:
    first = wanted.start // BLOCK_BYTES * BLOCK_BYTES
    got = read_at(fd, buffer[: align(wanted.stop) - first], first)
    return buffer[wanted.start - first : min(got, wanted.stop - first)]
