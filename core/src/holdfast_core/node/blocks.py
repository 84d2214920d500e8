"""Blocks on their way to a file: while the caller fills one, the others are digested and written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from holdfast_core.node.files import write_at
from holdfast_core.shards.chunk_table import ChunkTable
from holdfast_core.shards.record import ShardHeader, ShardRecord
from holdfast_core.shards.stream import PayloadDigester

Put = Callable[[int, memoryview, int], None]
"""Brings bytes into an open file, at an offset. Raises OSError."""


class BlockPipe:
    """Blocks in turn, one thread that digests and two that write: a disk that is given one thing at a
    time waits in between. Not thread-safe.

    1. `begin` gives a block. 2. The caller fills it; `digest` may start on a part that is filled.
    3. `write` sends it off. 4. `finish` waits for all. 5. `close`, always, before the file is
    closed: it waits for the threads, which use its descriptor.
    """

    def __init__(self, fd: int, blocks: Sequence[memoryview]) -> None:
        self._fd = fd
        self._blocks = blocks
        self._busy: list[list[Future[None]]] = [[] for _ in blocks]
        self._turn = 0
        self._digests = ThreadPoolExecutor(1, "holdfast-node-digest")
        self._writes = ThreadPoolExecutor(2, "holdfast-node-write")

    def begin(self) -> memoryview:
        """The next block, as soon as nobody uses it. Raises what went wrong with it before:
        OSError."""
        self._wait(self._turn)
        return self._blocks[self._turn]

    def digest(self, update: Callable[[memoryview], None], data: memoryview) -> None:
        """Call `update` with `data`, a part of the current block, after all earlier ones."""
        self._busy[self._turn].append(self._digests.submit(update, data))

    def write(self, data: memoryview, offset: int, put: Put = write_at) -> None:
        """Write `data`, the filled part of the current block, and turn to the next one."""
        self._busy[self._turn].append(self._writes.submit(put, self._fd, data, offset))
        self._turn = (self._turn + 1) % len(self._blocks)

    def finish(self) -> None:
        """All is digested and handed to the disk. Raises OSError."""
        for turn in range(len(self._blocks)):
            self._wait(turn)

    def close(self) -> None:
        for threads in (self._digests, self._writes):
            threads.shutdown(cancel_futures=True)

    def _wait(self, turn: int) -> None:
        for future in self._busy[turn]:
            future.result()
        self._busy[turn].clear()


class PipedDigester:
    """Digester whose work is done by the pipe's thread; what it is given lies in the pipe's current
    block."""

    def __init__(self, pipe: BlockPipe, header: ShardHeader) -> None:
        self._pipe = pipe
        self._digester = PayloadDigester(header)

    def update(self, data: memoryview) -> None:
        self._pipe.digest(self._digester.update, data)

    def finish(self) -> tuple[ShardRecord, ChunkTable]:
        self._pipe.finish()
        return self._digester.finish()
