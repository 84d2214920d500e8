"""The end of a gang: which step is persisted last, and when the pods may go."""

from __future__ import annotations

from holdfast_core import logs
from holdfast_core.errors import HoldfastError
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import Level, TierName
from holdfast_core.messages.schema import RestorePoint
from holdfast_sidecar.coordinator.commit import Commits, RoundParts
from holdfast_sidecar.coordinator.ledger import StepEntry
from holdfast_sidecar.coordinator.plan import shard_infos
from holdfast_sidecar.wire.server import Versioned

SILENT_SECONDS = 20.0
"""Time without a report after which a worker counts as silent: pods that end no longer wait for its upload,
and the operator calls it itself. It is several times the interval of reports."""


class GangEnd:
    """What the coordinator does when ranks or pods end."""

    def __init__(self, parts: RoundParts, commits: Commits, versioned: Versioned) -> None:
        self._parts = parts
        self._contract = parts.pod.settings.contract
        self._clock = parts.pod.clock
        self._store = parts.tiers.store
        self._pools = parts.tiers.pools
        self._ledger = parts.ledger
        self._gathered = parts.gathered
        self._commits = commits
        self._versioned = versioned
        self._done_at: float | None = None
        self._finished_version: int | None = None
        self._left: tuple[RestorePoint | None, int] | None = None
        """The newest persisted step of a gang with a leaving pod, and the version that reports it."""
        self._gave_up = False
        self._is_over = False
        """Whether the operator has ended the job. Its pods stay until the newest step is persisted."""

    @property
    def finished(self) -> bool:
        """Whether the newest step has every level that it is to reach after all ranks have returned 0."""
        return self._finished_version is not None

    def end_job(self) -> None:
        """Bring the newest step into the store, because the operator has ended the job."""
        self._is_over = True
        self._versioned.tick()

    @property
    def may_end(self) -> bool:
        """Whether this pod may end: it is idle, and the operator has received what no other pod can tell it.

        A restore from the object store alone needs the record of the last persisted step.
        """
        if not self._only_store_stays:
            return self._commits.idle
        if self._left is None or not self._commits.idle:
            return False
        reported, version = self._left
        return reported == self._parts.uploads.last and self._versioned.acknowledged(version)

    async def run(self) -> None:
        """Finish the job after all ranks have returned 0.

        The newest step is brought to every level that it is to reach, then the state reports `finished`.
        `release` releases the pods once the operator has acknowledged that state.
        """
        while self._finished_version is None:
            await self._versioned.wait_tick(at_most_seconds=5.0)
            if self._is_over:
                await self._adopt_restore_point()
            if self._is_over or self._only_store_stays:
                self._persist_last_step()
            if not self._gathered.done:
                continue
            if self._done_at is None or self._parts.uploads.is_held:
                # A quota is no failure of the store: the pods keep the step until there is room.
                self._done_at = self._clock.monotonic()
            self._parts.uploads.finish(self._newest_that_stays())
            waited = self._clock.monotonic() - self._done_at
            if waited > self._parts.pod.settings.finish_give_up_seconds and not (
                self._gave_up or self._is_over
            ):
                self._gave_up = True
                self._parts.uploads.give_up(waited)
            if self._settled():
                self._finished_version = self._versioned.bump(urgent=True)
                logs.info("finished", round=self._parts.message.round)

    @property
    def _only_store_stays(self) -> bool:
        """Whether a pod leaves whose shards only the object store can keep.

        Either no peer has copies, or all peers that have copies are ending, too, or the gang may continue
        with fewer workers, which cannot restore from peers.
        """
        return self._store is not None and self._gathered.leaves and not self._copies_stay

    @property
    def _copies_stay(self) -> bool:
        """Whether copies of the shards of each pod that ends stay, from which the next round can restore."""
        ending = self._gathered.ending
        if ending and self._parts.message.policy.shrinks:
            return False
        kept = all(self._gathered.stays(self._parts.targets.get(worker, ())) for worker in ending)
        return kept and (self._ledger.expects_copies or not ending)

    @property
    def waits_for_store(self) -> bool:
        """Whether no pod may end before the newest step is persisted.

        A step is persisted only if all workers upload their shards. So it is the same for all workers, and
        false once one of them is silent.
        """
        if self._store is None or self._copies_stay:
            return False
        # This looks at all workers, so it comes last: every report of each worker asks for it.
        return self._gathered.all_reported_since(self._clock.monotonic() - SILENT_SECONDS)

    def _persist_last_step(self) -> None:
        """Persist the step at which the ranks have stopped, then report it to the operator immediately."""
        self._parts.uploads.finish(self._newest_that_stays())
        last = self._parts.uploads.last
        # The reports of other workers may still have to say that they have saved a newer step.
        if self._commits.idle and (self._left is None or self._left[0] != last):
            self._left = last, self._versioned.bump(urgent=True)
            logs.info("the last step is persisted: a pod leaves", round=self._parts.message.round)

    async def _adopt_restore_point(self) -> None:
        """Enter the restore point as a local step, if this round has none and the store lacks it.

        The members have its shards, from which the ranks were to restore.
        """
        point = self._parts.message.restore_point.own_checkpoint
        comes = self._commits.choice().pending or self._ledger.pending
        has_saved = comes or self._ledger.newest(Level.LOCAL) is not None
        if point is None or has_saved or self._parts.uploads.has(point):
            return
        try:
            found = await self._pools.read.run(
                self._parts.tiers.node.get_manifest,
                self._contract.job_uid,
                point,
            )
            shards = await self._pools.read.run(shard_infos, found, self._contract.job_uid, point)
        except HoldfastError as error:
            self._parts.failures.note(
                "manifest of the restore point", TierName.NODE, error, step=point.step
            )
            return
        if len(shards) == self._ledger.world_size:  # else the store has it: other ranks saved it
            self._ledger.adopt(point, found, digest_of(found), shards)

    def _newest_that_stays(self) -> StepEntry | None:
        """Return the newest local step, which the end of the job uploads.

        None while a step that waits in slots, or waits for its manifest, can still become local, because that
        one is uploaded then.
        """
        comes = any(not self._ledger.steps[step].local for step in self._ledger.pending)
        return None if comes or self._commits.choice().pending else self._ledger.newest(Level.LOCAL)

    def _settled(self) -> bool:
        return self._gave_up or (self._gathered.idle and self._commits.idle)

    def release(self) -> None:
        if self._finished_version is not None and self._versioned.acknowledged(
            self._finished_version
        ):
            self._parts.plans.release()
