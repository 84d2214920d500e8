"""Read a part of the restore point into a rank's slot, and wait for places that do not answer.

A thread cannot be cancelled. One that waits for a slow disk or peer may continue in the next round, when
the slot belongs to another fill or holds a save of the rank. Every write of a fill therefore goes through
`FillTarget`, which stops the writes when the fill ends or is replaced.

Ranks that start together read from the same few holders and may overload them, so a shard that only an
unreachable place may have is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from holdfast_core import logs
from holdfast_core.errors import RefusedError, UnavailableError
from holdfast_core.format.rank_layout import RankLayout
from holdfast_core.ids import ByteRange, Rank, TierName
from holdfast_core.messages.schema import Refusal
from holdfast_core.reading import Reader
from holdfast_core.shards.file import ShardRecord
from holdfast_core.shm.slot_file import SlotFile, SlotHeader, begin_assembly, begin_shard
from holdfast_sidecar.base.pod import Patience
from holdfast_sidecar.base.telemetry import Metrics
from holdfast_sidecar.base.tiers import Pools
from holdfast_sidecar.restore.fetch import PodPlaces, PodShardPlace


class FillTarget:
    """Target of one fill, which owns the descriptor of its slot. Thread-safe.

    It implements `reshard.assemble.PayloadSink`.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._stopped: str | None = None
        self._slot: SlotFile | None = None

    def stop(self, why: str) -> None:
        """Forbid all further writes and close the slot's descriptor. Waits for a write under way.

        The descriptor is closed while the lock is held, because its number may be reused for another file
        immediately. A second call keeps the first reason.
        """
        with self._lock:
            if self._stopped is None:
                self._stopped = why
            slot, self._slot = self._slot, None
            if slot is not None:
                slot.close()

    def check(self) -> None:
        """Raise RefusedError (BUSY) if the target was stopped."""
        with self.writing():
            return

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock during the body, so that it runs entirely before any `stop`.

        Raises RefusedError (BUSY) instead if the target was stopped.
        """
        with self._lock:
            if self._stopped is not None:
                raise RefusedError(
                    Refusal.BUSY, f"the fill of rank {self._rank} was stopped: {self._stopped}"
                )
            yield

    def take(self, slot: SlotFile) -> None:
        """Direct all further writes to `slot`, and close the slot before it.

        The target owns the slot from this call on, and closes it even if this raises.
        """
        try:
            with self.writing():
                old, self._slot = self._slot, slot
        except BaseException:
            slot.close()
            raise
        if old is not None:
            old.close()

    def header(self) -> SlotHeader:
        with self.writing():
            return self._open.header()

    def write_header(self, header: SlotHeader) -> None:
        with self.writing():
            self._open.write_header(header)

    def write_payload(self, offset: int, data: memoryview) -> None:
        with self.writing():
            self._open.write_payload(offset, data)

    @property
    def _open(self) -> SlotFile:
        if self._slot is None:
            raise ValueError("FillTarget: take() a slot first")
        return self._slot


T = TypeVar("T")


class SlotReader:
    """Reader of a checkpoint into slots.

    Its methods raise NotFoundError, with what was tried, if a part is available nowhere, and RefusedError if
    the target was stopped. `waits` is called with the reason, on each retry, once waiting has lasted longer
    than the patience. The tier that they return is the farthest one that served a part.
    """

    def __init__(self, pools: Pools, metrics: Metrics, patience: Callable[[], Patience]) -> None:
        self._pools = pools
        self._metrics = metrics
        self._patience = patience

    async def shard(
        self, saved: PodPlaces, rank: Rank, target: FillTarget, waits: Callable[[str], None]
    ) -> tuple[ShardRecord, TierName]:
        """Write the payload of a rank's shard into the target's slot, which then names the shard."""
        size = saved.manifest.shards[rank].payload_bytes
        header = await self._pools.fill.run(begin_shard, target, saved.manifest.ref(rank), size)
        reader = Reader(saved, target, target.check)
        record = await self._patiently(
            reader, lambda: reader.read_span(rank, ByteRange(0, size)), rank, waits
        )
        await self._pools.fill.run(target.write_header, header)
        return record, reader.farthest

    async def boxes(
        self,
        saved: PodPlaces,
        wanted: RankLayout,
        world_size: int,
        target: FillTarget,
        waits: Callable[[str], None],
    ) -> TierName:
        """Write the payload of the layout `wanted` into the target's slot.

        The slot is then FREE and its header names no round and step, since its bytes are not a saved
        shard. `world_size` is the number of the ranks that restore.

        Raises:
            StateMismatchError: The checkpoint does not hold the wanted tensors.
            FormatError: `wanted` is not a valid layout of a payload.
        """
        header = await self._pools.fill.run(begin_assembly, target, wanted)
        reader = Reader(saved, target, target.check)
        await self._patiently(reader, lambda: reader.read(wanted, world_size), wanted.rank, waits)
        await self._pools.fill.run(target.write_header, header)
        logs.info(
            "a payload was built from other ranks' shards",
            rank=wanted.rank,
            payload_bytes=wanted.payload_bytes,
            read_bytes={str(tier): count for tier, count in reader.read_bytes.items()},
        )
        return reader.farthest

    async def _patiently(
        self,
        reader: Reader[PodShardPlace],
        read: Callable[[], Awaitable[T]],
        rank: Rank,
        waits: Callable[[str], None],
    ) -> T:
        patience: Patience | None = None
        try:
            while True:
                try:
                    return await read()
                except UnavailableError as error:
                    if patience is None:
                        patience = self._patience()
                        logs.warning("a fill waits for a source", rank=rank, error=str(error))
                    if patience.over:
                        waits(str(error))
                    await patience.pause()
        finally:
            for tier, byte_count in reader.fetched_bytes.items():
                self._metrics.fetched(tier, byte_count)
