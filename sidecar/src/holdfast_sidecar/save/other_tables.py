"""Chunk tables of shards that other workers saved, fetched for an upload. Calls block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import ShardRef, Worker, worker_of
from holdfast_core.shards.file import Trailer
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.wire.bulk import BulkPeers

_TABLES_SECONDS = 60.0
"""Time-out for fetching the chunk tables of all other ranks together, checked before each fetch. After
it the upload begins with the tables that have arrived."""


class OtherTables:
    """Source of chunk tables for `ShardUploader`."""

    def __init__(
        self,
        current: Callable[[], RoundState],
        bulk: BulkPeers,
        clock: Clock,
        *,
        procs_per_worker: int,
    ) -> None:
        self._current = current
        self._bulk = bulk
        self._clock = clock
        self._procs_per_worker = procs_per_worker

    def fetch(self, refs: Sequence[ShardRef]) -> Iterator[Trailer]:
        """Yield the tables of these shards, each from the worker that saved the shard.

        A worker whose fetch fails is not asked again.
        """
        silent: set[Worker] = set()
        deadline = self._clock.monotonic() + _TABLES_SECONDS
        for ref in refs:
            worker = worker_of(ref.rank, self._procs_per_worker)
            member = self._current().member(worker)
            if member is None or worker in silent or self._clock.monotonic() > deadline:
                continue
            try:
                yield self._bulk.fetch_table(member, ref)
            except (HoldfastError, OSError) as error:
                silent.add(worker)
                logs.warning(
                    "reading a chunk table failed", rank=ref.rank, worker=worker, error=str(error)
                )
