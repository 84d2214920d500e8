"""Read a part of the restore point into a rank's slot, and wait for places that do not answer.

A thread cannot be cancelled. One that waits for a slow disk or peer may continue in the next round, when
the slot belongs to another fill or holds a save of the rank. Every write of a fill therefore goes through
`FillTarget`, which stops the writes when the fill ends or is replaced.

Ranks that start together read from the same few holders and may overload them, so a shard that only an
unreachable place may have is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast_core import logs
from holdfast_core.errors import RefusedError, UnavailableError
from holdfast_core.format.rank_layout import RankLayout
from holdfast_core.ids import Rank, TierName
from holdfast_core.messages.schema import Refusal
from holdfast_core.reading import Reader
from holdfast_core.shards.file import ShardRecord
from holdfast_core.shm.slot_file import SlotFile, SlotHeader
from holdfast_sidecar.base.pod import Patience
from holdfast_sidecar.restore.fetch import PodPlaces


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


async def fill(
    saved: PodPlaces,
    target: FillTarget,
    rank: Rank,
    wanted: RankLayout | None,
    world_size: int,
    patience: Callable[[], Patience],
    waits: Callable[[str], None],
) -> tuple[ShardRecord | None, TierName]:
    """Put a payload of a checkpoint into the target's slot, and wait for places that do not answer.

    Args:
        saved: The checkpoint.
        target: Target of the fill.
        rank, wanted, world_size: As in `Reader.fill`.
        patience: Begins to wait.
        waits: Called with the reason, on each retry, once waiting has lasted longer than the patience.

    Returns:
        What `Reader.fill` returns, and the farthest tier that served a part.

    Raises:
        NotFoundError: A part is available nowhere. The message lists what was tried.
        RefusedError: The target was stopped.
        StateMismatchError: The checkpoint does not hold the wanted tensors.
        FormatError: `wanted` is not a valid layout of a payload.
    """
    reader = Reader(saved, target, target.check)
    waiting: Patience | None = None
    try:
        while True:
            try:
                record = await reader.fill(target, rank, wanted, world_size)
                break
            except UnavailableError as error:
                if waiting is None:
                    waiting = patience()
                    logs.warning("a fill waits for a source", rank=rank, error=str(error))
                if waiting.over:
                    waits(str(error))
                await waiting.pause()
    finally:
        for tier, byte_count in reader.fetched_bytes.items():
            saved.metrics.fetched(tier, byte_count)
    if wanted is not None:
        logs.info(
            "a payload was built from other ranks' shards",
            rank=rank,
            payload_bytes=wanted.payload_bytes,
            read_bytes={str(tier): count for tier, count in reader.read_bytes.items()},
        )
    return record, reader.farthest
