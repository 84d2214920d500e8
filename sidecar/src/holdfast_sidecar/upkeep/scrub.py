"""Scrub the node tier: read and verify everything, to find bit flips while other good copies exist.

Each shard, manifest and layout is verified within two passes, both of own ranks and of copies for peers.
Reads are slow. They pause while a save or a restore moves bytes, unless the pass would not end in time.
Damaged data is quarantined and fetched again from a peer or the object store. After a restart of the process
a new pass begins, in another random order. `Verifier` verifies one shard, of which another member received
corrupt bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from holdfast_core import logs
from holdfast_core.errors import (
    CorruptionError,
    FormatError,
    HoldfastError,
    NotFoundError,
    UnreadableError,
)
from holdfast_core.format.manifest import parse_manifest_of
from holdfast_core.ids import CheckpointId, Digest, JobUid, ShardRef, TierName
from holdfast_core.tasks import Tasks
from holdfast_core.tiers.base import NodeTier
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.telemetry import Telemetry
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.upkeep.replace import Replacer


class Verifier:
    """Handler of reports of bad bytes. Only a read here decides that a copy is bad, not the sender."""

    def __init__(self, tiers: Tiers, replacer: Replacer, telemetry: Telemetry) -> None:
        self._tiers = tiers
        self._replacer = replacer
        self._telemetry = telemetry
        self._tasks = Tasks()
        self._suspected = set[ShardRef]()
        """The shards that are being verified. Many ranks may have read the same bad copy."""

    def suspect(self, ref: ShardRef) -> None:
        """Begin to verify the shard, unless that is under way. A bad copy is quarantined and replaced."""
        if ref not in self._suspected:
            self._suspected.add(ref)
            self._tasks.spawn(self._verify(ref), "verify")

    async def close(self) -> None:
        await self._tasks.cancel()

    async def _verify(self, ref: ShardRef) -> None:
        try:
            damage = await self._tiers.quarantine_if_damaged(ref, self._telemetry.metrics)
        except NotFoundError:
            return
        except (HoldfastError, OSError) as error:
            # No later report may come. The scrub reads the shard again, and ends the failure.
            self._telemetry.failures.note(_SUBJECT, TierName.NODE, error)
            return
        finally:
            self._suspected.discard(ref)
        if damage is not None:
            logs.warning("quarantined a bad copy", rank=ref.rank, step=ref.step, error=str(damage))
            self._replacer.shard_is_bad(ref)


_SUBJECT = "scrub"
_REPLACING = "replacing bad copies"
_LEAST_BYTES_PER_SECOND = 4 << 20
_BUSY_POLL_SECONDS = 1.0


@dataclass(slots=True)
class ScrubPace:
    """Pace of one pass. Without saves or restores it reads evenly and takes half of `pass_seconds`."""

    total_bytes: int
    pass_seconds: float
    started: float
    """Monotonic seconds."""
    done_bytes: int = 0

    def pause_seconds(self, length: int) -> float:
        """Return how long to wait after `length` bytes were read."""
        rate = max(_LEAST_BYTES_PER_SECOND, 2 * self.total_bytes / self.pass_seconds)
        return length / rate

    def is_late(self, now: float) -> bool:
        """Return whether the pass must read even while saves or restores move bytes.

        In the second half of its time it must, if the rest would otherwise not be read by the end.
        """
        passed = (now - self.started) / self.pass_seconds
        return self.done_bytes < self.total_bytes * min(1.0, max(0.0, 2 * passed - 1))


class Scrubber:
    """Background task that reads the whole node tier again and again."""

    def __init__(
        self,
        pod: Pod,
        tiers: Tiers,
        replacer: Replacer,
        telemetry: Telemetry,
        busy: Callable[[], bool],
        throttle: Callable[[int], object],
    ) -> None:
        """Create the scrubber. `start` begins its task.

        Args:
            pod: Its settings have the times of a pass, which its clock measures.
            tiers: Has the node tier to read. Reads run in the pool `scrub`.
            replacer: Fetches what was quarantined.
            telemetry: Counts bytes and damaged copies, and receives errors of the disk.
            busy: Returns whether a save or a restore moves bytes now.
            throttle: Called in a thread with the length of each piece that was read. It may block.
        """
        self._pod = pod
        self._tiers = tiers
        self._replacer = replacer
        self._telemetry = telemetry
        self._busy = busy
        self._throttle = throttle
        self._tasks = Tasks()

    def start(self) -> None:
        self._tasks.spawn(self._run(), "scrub")

    async def close(self) -> None:
        await self._tasks.cancel()

    async def _run(self) -> None:
        settings, rest = self._pod.settings, self._pod.settings.scrub_rest_seconds
        next_pass = self._pod.clock.monotonic()
        while True:
            await self._pod.clock.sleep(rest)
            try:
                await self._replacer.replace_missing()
            except (HoldfastError, OSError) as error:
                self._telemetry.failures.note(_REPLACING, TierName.NODE, error)
            else:
                self._telemetry.failures.healthy(_REPLACING)
            started = self._pod.clock.monotonic()
            if started < next_pass:
                continue
            try:
                await self._pass()
            except (HoldfastError, OSError) as error:
                self._telemetry.failures.note(_SUBJECT, TierName.NODE, error)
            else:
                self._telemetry.failures.healthy(_SUBJECT)
            next_pass = started + settings.scrub_pass_seconds

    async def _pass(self) -> None:
        """Read everything once.

        A read error does not stop the pass; the newest one is raised at its end. What could not be read is
        not quarantined: if volumes failed briefly on all nodes, no copy would be left.
        """
        records = list(self._tiers.node.list_shards())
        random.shuffle(records)
        schedule = ScrubPace(
            sum(r.header.payload_bytes for r in records),
            self._pod.settings.scrub_pass_seconds,
            self._pod.clock.monotonic(),
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

    async def _shard_is_bad(self, ref: ShardRef, schedule: ScrubPace) -> bool:
        """Verify a shard. If it is damaged or missing, pass it to the replacer and return True."""
        try:
            await self._read(ref, schedule)
        except NotFoundError:
            # The shard was pruned, or another program deleted its file. The replacer fetches it if a
            # manifest still names it.
            self._replacer.shard_is_bad(ref)
            return True
        except UnreadableError:
            raise  # a volume that fails for a moment must not remove every copy
        except CorruptionError as error:
            # Read it once more, since the fault may be in this process's memory.
            damage = await self._tiers.pools.scrub.run(self._damage, ref)
            if damage is None:
                logs.warning("a shard is intact at the second read", ref=str(ref), error=str(error))
                return False
            self._telemetry.metrics.corruption(TierName.NODE)
            logs.warning("scrub: quarantined a shard", ref=str(ref), error=str(damage))
            await self._tiers.pools.meta.run(self._tiers.node.quarantine, ref, damage)
            self._replacer.shard_is_bad(ref)
            return True
        return False

    async def _read(self, ref: ShardRef, schedule: ScrubPace) -> None:
        """Read and verify a shard at the pace of the schedule. Raises NotFoundError, CorruptionError."""
        reader = await self._tiers.pools.scrub.run(self._tiers.node.open_shard, ref)
        try:
            pieces = reader.read_payload()
            try:
                while True:
                    await self._turn(schedule)
                    length = await self._tiers.pools.scrub.run(self._piece, pieces)
                    if length is None:
                        return
                    schedule.done_bytes += length
                    self._telemetry.metrics.scrubbed(length)
                    await self._pod.clock.sleep(schedule.pause_seconds(length))
            finally:
                await self._tiers.pools.scrub.run(pieces.close)
        finally:
            reader.close()

    async def _turn(self, schedule: ScrubPace) -> None:
        """Wait while a save or a restore moves bytes, as long as the pass can still end in time."""
        while self._busy() and not schedule.is_late(self._pod.clock.monotonic()):
            await self._pod.clock.sleep(_BUSY_POLL_SECONDS)

    def _piece(self, pieces: Generator[memoryview]) -> int | None:
        piece = next(pieces, None)
        if piece is None:
            return None
        self._throttle(len(piece))
        return len(piece)

    def _damage(self, ref: ShardRef) -> CorruptionError | None:
        """Read the whole shard and return its verification error. None if it is good or gone."""
        try:
            return self._tiers.damage(ref)
        except NotFoundError:
            return None

    # ------------------------------------------------------------------ documents

    async def _documents(self) -> None:
        """Verify all manifests and layouts. Quarantine and replace the damaged ones."""
        found, unread = await self._tiers.pools.scrub.run(self._bad_documents)
        for bad in found:
            self._telemetry.metrics.corruption(TierName.NODE)
            logs.warning("scrub: quarantined a document", error=str(bad.damage))
            try:
                await self._tiers.pools.meta.run(bad.quarantine, self._tiers.node)
            except (HoldfastError, OSError) as error:
                unread = error  # its replacement quarantines it, too
            if bad.manifest is not None:
                self._replacer.manifest_is_bad(*bad.manifest)
            elif bad.layout is not None:
                self._replacer.layout_is_bad(*bad.layout)
        if found:
            await self._replacer.replace_missing()
        if unread is not None:
            raise unread

    def _bad_documents(self) -> tuple[list[BadDocument], HoldfastError | OSError | None]:
        """Return the damaged documents, and the error of one that could not be read."""
        found: list[BadDocument] = []
        try:
            found.extend(bad_documents(self._tiers.node, self._telemetry.metrics.scrubbed))
        except (HoldfastError, OSError) as error:
            return found, error
        return found, None


@dataclass(frozen=True, slots=True)
class BadDocument:
    """A damaged manifest or layout on the node tier: exactly one of the two fields is set."""

    damage: CorruptionError
    """What is wrong with it."""
    manifest: tuple[JobUid, CheckpointId] | None = None
    layout: tuple[Digest, ShardRef] | None = None
    """The layout's digest, and a shard of this node that names it."""

    def quarantine(self, node: NodeTier) -> None:
        if self.manifest is not None:
            node.quarantine_manifest(*self.manifest, self.damage)
        if self.layout is not None:
            node.quarantine_layout(self.layout[0], self.damage)


def bad_documents(node: NodeTier, read: Callable[[int], object]) -> Iterator[BadDocument]:
    """Yield the damaged manifests, and the damaged layouts that a shard of this node names. Blocks.

    Documents of a format that this release does not support are skipped. The error of a document that
    cannot be read is raised after all others have been read.

    Args:
        node: The node tier.
        read: Called with the number of bytes of each document that was read.
    """
    unread: HoldfastError | OSError | None = None
    for job_uid, checkpoint in node.list_manifests():
        try:
            document = node.get_manifest(job_uid, checkpoint)
            read(len(document))
            parse_manifest_of(document, job_uid, checkpoint)
        except UnreadableError as error:
            unread = error
        except CorruptionError as error:
            yield BadDocument(error, manifest=(job_uid, checkpoint))
            continue
        except (NotFoundError, FormatError):
            continue
        except (HoldfastError, OSError) as error:
            unread = error
    for digest, ref in {record.header.layout: record.ref for record in node.list_shards()}.items():
        try:
            read(len(node.get_layout(digest)))
        except UnreadableError as error:
            unread = error
        except CorruptionError as error:
            yield BadDocument(error, layout=(digest, ref))
        except NotFoundError:
            continue
        except (HoldfastError, OSError) as error:
            unread = error
    if unread is not None:
        raise unread
