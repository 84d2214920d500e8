"""Bring the own ranks' shards of the restore point to this node before the ranks start.

The sources of a shard are the node tier, then every other member, then the object store. Each copy is
verified. A bad copy at a member is reported to it, and the next source is tried. Failed attempts are
repeated until a new round begins; the ranks never start without their restore point. If it was saved by
another number of ranks, only its manifest is brought here.

`Rehydrator.failures` report to the operator what was tried: immediately if every place replied that it has
nothing, and after `Settings.restore_patience_seconds` if a place that may have the data is unreachable
or busy. They report nothing in a round that has committed a step: its ranks were restored before this process
restarted, and the restore point may have been pruned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from holdfast_core import logs
from holdfast_core.errors import (
    HoldfastError,
    NotFoundError,
)
from holdfast_core.format.manifest import Manifest
from holdfast_core.ids import CheckpointId, Digest, Rank, ShardRef, TierName
from holdfast_core.messages.schema import (
    RestorePoint,
    Round,
)
from holdfast_core.tasks import Tasks
from holdfast_core.tiers.sources import SourceErrors
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.telemetry import Metrics, RestoreFailures
from holdfast_sidecar.restore.fetch import Fetcher


@dataclass(frozen=True, slots=True)
class Restored:
    """What the ranks of this pod restore from."""

    point: RestorePoint
    manifest: Manifest | None
    """None if the round has no restore point."""
    refs: dict[Rank, ShardRef]
    """The own ranks' shards. Empty if another number of ranks saved the checkpoint."""
    payload_bytes: dict[Rank, int]
    sources: dict[Rank, TierName]
    """Tier that served each rank's shard. Fills update it."""
    is_of_others: bool = False
    """Whether another number of ranks saved the checkpoint. In that case no whole shard is brought here,
    because the byte ranges that a rank needs are known only from its Fill."""


class Rehydrator:
    """Fetcher of the current round's restore point."""

    def __init__(
        self,
        pod: Pod,
        fetcher: Fetcher,
        metrics: Metrics,
        on_change: Callable[[], None],
    ) -> None:
        self._pod = pod
        self._fetcher = fetcher
        self._metrics = metrics
        self._on_change = on_change
        self._tasks = Tasks()
        self._retry = asyncio.Event()
        self._settled = asyncio.Event()
        """Set when the restore point is here, or is no longer needed, and when the round ends."""
        self.restored: Restored | None = None
        """What the restore point consists of, once it is on this node."""
        self.seconds: float | None = None
        """How long it took to bring the restore point here."""
        self.failures = RestoreFailures(on_change)

    async def reset(self) -> None:
        """Cancel everything of the round that ended."""
        await self._tasks.cancel()
        await self._fetcher.reset()
        self.restored = None
        self.seconds = None
        self.failures.clear()
        settled, self._settled = self._settled, asyncio.Event()
        settled.set()

    def begin(self, message: Round) -> None:
        """Start to bring the restore point here. Call it once a round."""
        self._tasks.spawn(self._until_done(message.restore_point), "rehydrate")

    def retry_now(self) -> None:
        """Begin the next attempt without waiting for the back-off. Call it when members change."""
        self._retry.set()

    async def settled(self) -> None:
        """Wait while the restore point of this round is brought here.

        Ranks run meanwhile only if the sidecar has restarted.
        """
        await self._settled.wait()

    async def layout(self, restored: Restored, rank: Rank) -> bytes:
        """Return the layout of a rank that saved the restore point.

        Raises:
            NotFoundError: There is no restore point, or no place has the layout. The message lists what
                was tried.
            UnavailableError: A place that may have the layout is unreachable or busy.
        """
        if restored.manifest is None:
            raise NotFoundError("there is no restore point in this round")
        return await self._fetcher.layout(
            restored.manifest.ref(rank),
            restored.manifest.shards[rank].layout,
            self._pod.namespace_of(restored.point),
        )

    async def _until_done(self, point: RestorePoint) -> None:
        started = self._pod.clock.monotonic()
        patience = self._pod.patience()
        logged = ""
        while True:
            self._retry.clear()
            source_errors = SourceErrors()
            restored, is_needed = None, True
            try:
                restored = await self._attempt(point, source_errors)
                is_needed = restored is None and not await self._fetcher.is_outlived()
            except (HoldfastError, OSError) as error:
                source_errors.failed("this node", error)
            if restored is not None:
                self.restored = restored
                self._settled.set()
                self.failures.clear()
                self.seconds = self._pod.clock.monotonic() - started
                self._metrics.rehydrated(self.seconds)
                logs.info(
                    "all shards of the restore point are on the node",
                    step=point.step,
                    sources={str(r): str(t) for r, t in restored.sources.items()},
                )
                self._on_change()
                return
            if not is_needed:
                self._settled.set()
            if (text := str(source_errors)) != logged:
                logged = text
                logs.warning(
                    "the restore point cannot be read yet", step=point.step, source_errors=text
                )
            if is_needed and (patience.over or not source_errors.retryable):
                self.failures.note(None, text, is_final=not source_errors.retryable)
            # asyncio.wait_for of Python 3.11 ignores a cancellation that comes with the retry.
            with suppress(TimeoutError):
                async with asyncio.timeout(patience.next_seconds()):
                    await self._retry.wait()

    async def _attempt(self, point: RestorePoint, source_errors: SourceErrors) -> Restored | None:
        """Try once to bring the restore point here.

        None if a part is missing; `source_errors` lists the errors then.
        """
        if point.step is None or point.round is None:
            return Restored(point, None, {}, {}, {})
        manifest = await self._fetcher.manifest(
            point, CheckpointId(point.step, point.round), source_errors
        )
        if manifest is None:
            return None
        state = self._pod.state
        if manifest.world_size != state.world_size:
            return Restored(point, manifest, {}, {}, {}, is_of_others=True)
        job_uid = self._pod.job_uid_of(point)
        records = {s.rank: s for s in manifest.shards}
        own = [Rank(r) for r in state.own_ranks]
        refs = {r: ShardRef(job_uid, point.step, point.round, r, records[r].blake3) for r in own}
        found = await asyncio.gather(
            *(self._fetcher.shard(refs[r], point, source_errors) for r in own)
        )
        sources = {r: tier for r, tier in zip(own, found, strict=True) if tier is not None}
        if len(sources) < len(own):
            return None
        await asyncio.gather(*(self._bring_layout(refs[r], records[r].layout, point) for r in own))
        sizes = {r: records[r].payload_bytes for r in own}
        return Restored(point, manifest, refs, sizes, sources)

    async def _bring_layout(self, ref: ShardRef, digest: Digest, point: RestorePoint) -> None:
        """Bring the layout of an own shard here, so that copies of the shard get it from this node.

        A failure is only logged: a rank whose placements have not changed restores without it.
        """
        try:
            await self._fetcher.layout(ref, digest, self._pod.namespace_of(point))
        except HoldfastError as error:
            logs.warning("reading a shard's layout failed", rank=ref.rank, error=str(error))
