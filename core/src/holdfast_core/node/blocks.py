"""Pipeline of blocks to a file: while the caller fills one, the others are digested and written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from holdfast_core.node.files import write_at
from holdfast_core.shards.record import ChunkTable, ShardHeader, ShardRecord
from holdfast_core.shards.stream import PayloadDigester


class BlockPipe:
    """Ring of blocks with one thread that digests and two that write. Not thread-safe.

    Two writes are in progress at a time, because a disk is idle between single writes. The caller

    1. gets a block with `begin`,
    2. fills it, and may pass filled parts to `digest`,
    3. passes it to `write`, and begins the next block,
    4. waits for all blocks with `finish`, and
    5. always calls `close` before it closes the file, whose descriptor the threads use.
    """

    def __init__(self, fd: int, blocks: Sequence[memoryview]) -> None:
        self._fd = fd
        self._blocks = blocks
        self._busy: list[list[Future[None]]] = [[] for _ in blocks]
        self._turn = 0
        self._digests = ThreadPoolExecutor(1, "holdfast-node-digest")
        self._writes = ThreadPoolExecutor(2, "holdfast-node-write")

    def begin(self) -> memoryview:
        """Return the next block after its earlier use has ended. Raises the OSError of that use."""
        self._wait(self._turn)
        return self._blocks[self._turn]

    def digest(self, update: Callable[[memoryview], None], data: memoryview) -> None:
        """Call `update` with `data`, a part of the current block, in the order of the calls."""
        self._busy[self._turn].append(self._digests.submit(update, data))

    def write(self, data: memoryview, offset: int) -> None:
        """Start the write of `data`, the filled part of the current block, and move to the next block."""
        self._busy[self._turn].append(self._writes.submit(write_at, self._fd, data, offset))
        self._turn = (self._turn + 1) % len(self._blocks)

    def finish(self) -> None:
        """Wait until all blocks are digested and written. Raises OSError."""
        for turn in range(len(self._blocks)):
            self._wait(turn)

    def close(self) -> None:
        """Wait for the running calls and cancel the others."""
        for threads in (self._digests, self._writes):
            threads.shutdown(cancel_futures=True)

    def _wait(self, turn: int) -> None:
        for future in self._busy[turn]:
            future.result()
        self._busy[turn].clear()


class PipedDigester:
    """Digester that works in the pipe's thread. The data that it gets lies in the pipe's current block."""

    def __init__(self, pipe: BlockPipe, header: ShardHeader) -> None:
        self._pipe = pipe
        self._digester = PayloadDigester(header)

    def update(self, data: memoryview) -> None:
        self._pipe.digest(self._digester.update, data)

    def finish(self) -> tuple[ShardRecord, ChunkTable]:
        self._pipe.finish()
        return self._digester.finish()
