"""Reads what lies on the node's disk again, so that bits that flipped are found while there are good copies.

Every shard, manifest and layout on the node tier is read within two passes, own ones and peers' copies.
Reads are slow, wait while a save or a restore moves bytes, and go on beside it only where the pass
would not end in time. What is bad is quarantined and fetched again from a peer or the store. A process
that restarts begins a new pass, in another order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from holdfast_core.clock import Clock
from holdfast_core.errors import CorruptionError, FormatError, HoldfastError, NotFoundError
from holdfast_core.format.manifest import parse_manifest_of
from holdfast_core.ids import CheckpointId, Digest, JobUid, ShardRef, TierName
from holdfast_core.tiers.base import NodeTier
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.failures import Failures
from holdfast_sidecar.base.metrics import Metrics
from holdfast_sidecar.base.pools import Pools
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.tasks import Tasks
from holdfast_sidecar.upkeep.replace import Replacer

_SUBJECT = "scrub"
_LEAST_BYTES_PER_SECOND = 4 << 20
_BUSY_POLL_SECONDS = 1.0


@dataclass(slots=True)
class Schedule:
    """How fast a pass reads: evenly over half of its time, and never later than its end."""

    total_bytes: int
    pass_seconds: float
    started: float
    """Monotonic seconds."""
    done_bytes: int = 0

    def pause_seconds(self, length: int) -> float:
        """How long to wait after reading so many bytes in idle time."""
        rate = max(_LEAST_BYTES_PER_SECOND, 2 * self.total_bytes / self.pass_seconds)
        return length / rate

    def is_late(self, now: float) -> bool:
        """It must go on beside saves: in the second half of its time, where the rest would not be read
        by its end."""
        passed = (now - self.started) / self.pass_seconds
        return self.done_bytes < self.total_bytes * min(1.0, max(0.0, 2 * passed - 1))


class Scrubber:
    def __init__(
        self,
        settings: Settings,
        node: NodeTier,
        replacer: Replacer,
        *,
        pools: Pools,
        metrics: Metrics,
        failures: Failures,
        clock: Clock,
        busy: Callable[[], bool],
        throttle: Callable[[int], object],
    ) -> None:
        """`busy`: a save or a restore moves bytes now. `throttle` is called in a thread before bytes are
        read, and may block."""
        self._settings = settings
        self._node = node
        self._replacer = replacer
        self._pools = pools
        self._metrics = metrics
        self._failures = failures
        self._clock = clock
        self._busy = busy
        self._throttle = throttle
        self._tasks = Tasks()

    def start(self) -> None:
        self._tasks.spawn(self._run(), "scrub")

    async def close(self) -> None:
        await self._tasks.cancel()

    async def _run(self) -> None:
        settings, rest = self._settings, self._settings.scrub_rest_seconds
        next_pass = self._clock.monotonic()
        while True:
            await self._clock.sleep(rest)
            await self._replacer.replace_missing()
            started = self._clock.monotonic()
            if started < next_pass:
                continue
            try:
                await self._pass()
            except (HoldfastError, OSError) as error:
                self._failures.note(_SUBJECT, TierName.NODE, error)
            else:
                self._failures.healthy(_SUBJECT)
            next_pass = started + settings.scrub_pass_seconds

    async def _pass(self) -> None:
        """Read everything once. What cannot be read keeps nothing else from being read: the newest such
        error is raised at the end. It is not quarantined: a volume that fails for a moment, on all nodes
        perhaps, would take every copy away."""
        records = list(self._node.list_shards())
        random.shuffle(records)
        schedule = Schedule(
            sum(r.header.payload_bytes for r in records),
            self._settings.scrub_pass_seconds,
            self._clock.monotonic(),
        )
        unread: HoldfastError | OSError | None = None
        try:
            await self._documents()
        except (HoldfastError, OSError) as error:
            unread = error
        for record in records:
            try:
                if await self._shard_is_bad(record.ref, schedule):
                    await self._replacer.replace_missing()
            except (HoldfastError, OSError) as error:
                unread = error
        if unread is not None:
            raise unread

    # ------------------------------------------------------------------ shards

    async def _shard_is_bad(self, ref: ShardRef, schedule: Schedule) -> bool:
        try:
            await self._read(ref, schedule)
        except NotFoundError:
            # Pruned meanwhile, or deleted by another program: what a manifest still names is fetched.
            self._replacer.shard_is_bad(ref)
            return True
        except CorruptionError as error:
            # Once more: the memory of this process may be what is bad.
            damage = await self._pools.scrub.run(self._damage, ref)
            if damage is None:
                logs.warning("a shard verified at the second look", ref=str(ref), error=str(error))
                return False
            self._metrics.corruption(TierName.NODE)
            logs.warning("scrub: quarantined a shard", ref=str(ref), error=str(damage))
            await self._pools.meta.run(self._node.quarantine, ref, str(damage))
            self._replacer.shard_is_bad(ref)
            return True
        return False

    async def _read(self, ref: ShardRef, schedule: Schedule) -> None:
        reader = await self._pools.scrub.run(self._node.open_shard, ref)
        try:
            pieces = reader.read_payload()
            try:
                while True:
                    await self._turn(schedule)
                    length = await self._pools.scrub.run(self._piece, pieces)
                    if length is None:
                        return
                    schedule.done_bytes += length
                    self._metrics.scrubbed(length)
                    await self._clock.sleep(schedule.pause_seconds(length))
            finally:
                await self._pools.scrub.run(pieces.close)
        finally:
            reader.close()

    async def _turn(self, schedule: Schedule) -> None:
        """Wait for idle time, as long as the pass can still end in time."""
        while self._busy() and not schedule.is_late(self._clock.monotonic()):
            await self._clock.sleep(_BUSY_POLL_SECONDS)

    def _piece(self, pieces: Generator[memoryview]) -> int | None:
        piece = next(pieces, None)
        if piece is None:
            return None
        self._throttle(len(piece))
        return len(piece)

    def _damage(self, ref: ShardRef) -> CorruptionError | None:
        try:
            with self._node.open_shard(ref) as reader:
                reader.verify()
        except CorruptionError as error:
            return error
        except NotFoundError:
            return None
        return None

    # ------------------------------------------------------------------ documents

    async def _documents(self) -> None:
        found = await self._pools.scrub.run(self._bad_documents)
        for bad in found:
            self._metrics.corruption(TierName.NODE)
            logs.warning("scrub: quarantined a document", error=bad.words)
            await self._pools.meta.run(bad.quarantine, self._node)
            if bad.manifest is not None:
                self._replacer.manifest_is_bad(*bad.manifest)
            elif bad.layout is not None:
                self._replacer.layout_is_bad(*bad.layout)
        if found:
            await self._replacer.replace_missing()

    def _bad_documents(self) -> list[BadDocument]:
        return list(bad_documents(self._node, self._metrics.scrubbed))


@dataclass(frozen=True, slots=True)
class BadDocument:
    words: str
    manifest: tuple[JobUid, CheckpointId] | None = None
    layout: tuple[Digest, JobUid, CheckpointId] | None = None
    """And the checkpoint whose manifest names it."""

    def quarantine(self, node: NodeTier) -> None:
        if self.manifest is not None:
            node.quarantine_manifest(*self.manifest, self.words)
        if self.layout is not None:
            node.quarantine_layout(self.layout[0], self.words)


def bad_documents(node: NodeTier, read: Callable[[int], object]) -> Iterator[BadDocument]:
    """Blocking. Manifests that are not what their name and digest say, and layouts that manifests name.
    What a newer release wrote is not judged. `read` hears the bytes of each document."""
    layouts: set[Digest] = set()
    for job_uid, checkpoint in node.list_manifests():
        try:
            document = node.get_manifest(job_uid, checkpoint)
            read(len(document))
            digest = parse_manifest_of(document, job_uid, checkpoint).layout
        except CorruptionError as error:
            yield BadDocument(str(error), manifest=(job_uid, checkpoint))
            continue
        except (NotFoundError, FormatError):
            continue
        if digest in layouts:
            continue
        layouts.add(digest)
        try:
            read(len(node.get_layout(digest)))
        except CorruptionError as error:
            yield BadDocument(str(error), layout=(digest, job_uid, checkpoint))
        except NotFoundError:
            continue
