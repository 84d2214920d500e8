"""The coordinator's part of persisting: it chooses the steps for the object store and puts their manifests.

One step is uploaded at a time. Members upload their shards when the coordinator requests it. When all have,
the coordinator puts the references (if shards refer to earlier checkpoints) and the manifest, each only if
absent. The rules of the queue are in `holdfast_core.store.rules`.

The first committed step is uploaded at once, whatever the interval says: until then, the loss of two pods can
cost all steps. The coordinator also compares the newest persisted step with the store. While the store does
not have it, for example because the bucket was emptied, the next committed step is uploaded at once, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from holdfast_core import logs
from holdfast_core.clock import Clock
from holdfast_core.contract import SidecarContract
from holdfast_core.errors import AlreadyExistsError
from holdfast_core.format.manifest import parse_manifest
from holdfast_core.ids import CheckpointId, Step, TierName
from holdfast_core.messages.schema import (
    CHECKPOINT_MISSING,
    Failure,
    PersistRequest,
    Refusal,
    RestorePoint,
    Round,
)
from holdfast_core.store.commit import commit, references_beside
from holdfast_core.store.rules import UploadQueue, merged
from holdfast_core.store.tier import ObjectTier
from holdfast_core.tasks import Backoff
from holdfast_sidecar.base.telemetry import Failures
from holdfast_sidecar.base.tiers import Pools
from holdfast_sidecar.coordinator.ledger import Ledger, StepEntry
from holdfast_sidecar.upkeep.prune import quarantined
from holdfast_sidecar.wire.server import Versioned

COMPARE_SECONDS = 60.0
"""Interval in which the newest persisted step is compared with the store: one request without a body."""
_NEWEST = "newest checkpoint in the store"


class GangUploads:
    """The queue of steps for the object store, and the loop that persists them."""

    def __init__(
        self,
        contract: SidecarContract,
        message: Round,
        store: ObjectTier | None,
        *,
        ledger: Ledger,
        versioned: Versioned,
        pools: Pools,
        failures: Failures,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        self._contract = contract
        self._store = store
        self._ledger = ledger
        self._versioned = versioned
        self._pools = pools
        self._failures = failures
        self._clock = clock
        self._on_change = on_change
        self._policy = message.policy
        self._apart = quarantined(message)
        """Checkpoints whose objects no new upload refers to: a drill may have found them damaged."""
        self.is_held = message.hold_uploads
        """Whether no upload is requested, because a quota of the store is reached."""
        self._round = message.round
        self._after = set[Step]()
        """For each request to save that no committed step has fulfilled yet: the progress at that time."""
        self._since = _uploaded_before(message)
        """The step whose upload was requested last. Later multiples of the interval are due."""
        self._requested_at: float | None = None
        """Monotonic seconds of that request. None: this coordinator has requested none."""
        self._gave_up = False
        self.last = message.last_persisted
        """Newest persisted step of the job, as far as this coordinator has a record of it."""
        self.last_bytes = 0
        self.is_stored: bool | None = None
        """Whether the store has `last`. None: not compared yet."""

    # ------------------------------------------------------------------ which steps

    def policy(self, message: Round) -> None:
        """Take over the policy of a ROUND, and whether uploads are held."""
        self._policy = message.policy
        self._apart = quarantined(message)
        if self.is_held is not message.hold_uploads:
            self.is_held = message.hold_uploads
            logs.info("uploads are held" if self.is_held else "uploads go on", round=self._round)
            self._keep_newest()
            self._versioned.tick()

    def _keep_newest(self) -> None:
        """While uploads are held, let the newest step wait alone, so that the others can be pruned."""
        if self.is_held:
            self._ledger.uploads = self._ledger.uploads.only_newest()

    def ask_after(self, step: Step) -> None:
        """Persist the first step that is committed above this one, because a save was requested."""
        self._after.add(step)

    def committed(self, step: Step) -> None:
        """Queue a step that has become local, if it is due."""
        if self._due(step):
            self._request(step)

    def lost(self, step: Step) -> None:
        """Give up the upload of a step of which a member lacks its shard. Later ones would wait for it."""
        if step in self._ledger.on_way_to_store:
            self._ledger.upload_ended(self._ledger.steps[step], persisted=False)
            self.ask_after(step)

    def look(self, failures: Iterable[Failure]) -> None:
        """Give up an upload for which the store keeps other bytes, once a later step waits for its end.

        No repetition helps then. Without a later step the worker tries again: a person may have deleted the
        object, and the last step of a gang is not given up.
        """
        first = self._ledger.uploads.first
        if first is None:
            return
        for failure in failures:
            is_taken = (failure.tier, failure.reason) == (TierName.OBJECT, Refusal.CONFLICT)
            if not is_taken or failure.step != first.step:
                continue
            if len(self._ledger.on_way_to_store) == 1:
                self.ask_after(first.step)
            else:
                logs.warning("an upload is given up", step=first.step, error=failure.message)
                self._ledger.upload_ended(self._ledger.steps[first.step], persisted=False)
            return

    def finish(self, newest: StepEntry | None) -> None:
        """Queue the gang's newest step after the ranks have ended, even if the interval does not name it."""
        if self._store is None or newest is None or newest.persisted or self._gave_up:
            return
        if newest.step not in self._ledger.on_way_to_store:
            self._request(newest.step)
            self._versioned.tick()

    def has(self, checkpoint: CheckpointId) -> bool:
        """Return whether the store has this checkpoint or a newer one, as far as is known."""
        last = None if self.last is None or self._is_missing else self.last.own_checkpoint
        return last is not None and last.step >= checkpoint.step

    def give_up(self, waited_seconds: float) -> None:
        """Stop waiting for the store, and report the steps that were not persisted as a failure."""
        self._gave_up = True
        steps = [checkpoint.step for checkpoint in self._ledger.uploads.wanted]
        self._ledger.uploads = UploadQueue()
        self._failures.note_text(
            "uploads at the end",
            TierName.OBJECT,
            "GaveUp",
            f"steps {steps} were not persisted within {waited_seconds:.0f} s after the last "
            "rank returned",
            step=steps[-1] if steps else None,
        )

    @property
    def waits_for_room(self) -> bool:
        """Whether nothing is uploaded until the quota has room: uploads are held, and none is under way."""
        return self.is_held and self._ledger.uploads.request is None

    @property
    def _is_missing(self) -> bool:
        return self.is_stored is False

    def _due(self, step: Step) -> bool:
        last = self.last
        if self._store is None or (
            last is not None
            and last.round == self._round
            and last.step is not None
            and last.step >= step
        ):
            return False
        if fulfilled := {after for after in self._after if step > after}:
            self._after -= fulfilled
            return True
        every, seconds = self._policy.object_every_steps, self._policy.object_every_seconds
        if (every, seconds) == (None, None):
            return False
        if (last is None or self._is_missing) and not self._ledger.on_way_to_store:
            return True
        if every is not None:
            return step // every > self._since // every
        at = self._requested_at
        return seconds is not None and (at is None or self._clock.monotonic() - at >= seconds)

    def _request(self, step: Step) -> None:
        self._since, self._requested_at = step, self._clock.monotonic()
        dropped = self._ledger.request_upload(step)
        self._keep_newest()
        if dropped is not None:
            self._failures.note_text(
                "deleting replaced uploads",
                TierName.OBJECT,
                "Superseded",
                f"step {dropped} waited for the store and was replaced by step {step}",
                step=dropped,
            )

    # ------------------------------------------------------------------ what the store has

    async def compare(self) -> None:
        """Compare the newest persisted step with the store every COMPARE_SECONDS until cancelled.

        Without this, a bucket that was emptied would be noticed when all pods are lost. Return immediately if
        the job has no object store.
        """
        while self._store is not None:
            last = self.last
            checkpoint = None if last is None else last.own_checkpoint
            if checkpoint is not None:
                await self._look_for(self._store, checkpoint)
            await self._clock.sleep(COMPARE_SECONDS)

    async def _look_for(self, store: ObjectTier, checkpoint: CheckpointId) -> None:
        contract = self._contract
        try:
            missing = await self._pools.store.run(
                store.missing_manifest, contract.namespace, contract.job_uid, checkpoint
            )
        except Exception as error:  # noqa: BLE001 - otherwise the comparisons stop silently
            self._failures.note(_NEWEST, TierName.OBJECT, error, step=checkpoint.step)
            return
        if self.last is None or self.last.own_checkpoint != checkpoint:
            return  # a newer step was persisted meanwhile
        if self.is_stored is not (missing is None):
            self.is_stored = missing is None
            self._versioned.bump(urgent=False)
        if missing is None:
            self._failures.healthy(_NEWEST)
            return
        self._failures.note_text(
            _NEWEST,
            TierName.OBJECT,
            CHECKPOINT_MISSING,
            f"by the job's status, step {checkpoint.step} of round {checkpoint.round} is persisted, but "
            f"there is no {missing}: restore the objects of the job, or correct bucket and prefix of the "
            "store",
            step=checkpoint.step,
        )

    # ------------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Persist queued steps until cancelled. Return immediately if the job has no object store."""
        store = self._store
        if store is None:
            return
        backoff = Backoff(0.5, 15.0)
        planned: PersistRequest | None = None
        while True:
            await self._versioned.wait_tick(at_most_seconds=5.0)
            first = self._ledger.uploads.first
            entry = None if first is None else self._ledger.steps.get(first.step)
            if first is None or entry is None or entry.manifest is None:
                continue
            if self.waits_for_room:
                continue
            try:
                request = await self._requested(store, first)
                if request is None:
                    continue
                if request != planned:
                    planned = request
                    self._on_change()  # The plan for the workers has it now.
                if len(entry.uploaded) < entry.world_size:
                    continue
                if not await self._commit(store, entry, entry.manifest):
                    logs.warning(
                        "the shard refers to chunks that the store no longer has: "
                        "uploading all of it",
                        step=entry.step,
                    )
                    self._ledger.upload_whole(entry)
                    self._versioned.tick()
                    continue
            except Exception as error:  # noqa: BLE001 - otherwise uploads stop silently
                self._failures.note(
                    "manifests in the store", TierName.OBJECT, error, step=entry.step
                )
                if isinstance(error, AlreadyExistsError):
                    self._ledger.upload_ended(entry, persisted=False)
                # A step at the end of the gang is queued again.
                await self._clock.sleep(backoff.next_seconds())
            else:
                backoff.reset()
                self._persisted(entry)
            self._on_change()

    async def _requested(
        self, store: ObjectTier, checkpoint: CheckpointId
    ) -> PersistRequest | None:
        """Return the request for the first checkpoint of the queue, which the first call makes.

        None: the coordinator has given up meanwhile.
        """
        ledger, contract = self._ledger, self._contract
        if ledger.uploads.request is not None:
            return ledger.uploads.request
        last = None if self._is_missing else self.last
        stored = None if last is None else last.own_checkpoint
        base = ledger.uploads.base(() if stored is None or stored in self._apart else (stored,))
        older: tuple[CheckpointId, ...] = ()
        if base is not None:
            older = await self._pools.store.run(
                references_beside, store, contract.namespace, contract.job_uid, base
            )
            older = tuple(c for c in older if c not in self._apart)
        if ledger.uploads.first == checkpoint:
            ledger.uploads, _ = ledger.uploads.requested(
                None if base is None else last,
                older,
                compress=self._policy.compresses_uploads,
            )
        return ledger.uploads.request

    async def _commit(self, store: ObjectTier, entry: StepEntry, manifest: bytes) -> bool:
        """Put references and manifest of a step whose shards are all in the store.

        Returns:
            False if a checkpoint that vouches for references is gone, so that the shards that have any must
            be uploaded whole.
        """
        needs, bases = merged(entry.uploaded.values())
        return await self._pools.store.run(
            lambda: commit(store, self._contract.namespace, parse_manifest(manifest), needs, bases)
        )

    def _persisted(self, entry: StepEntry) -> None:
        self._ledger.upload_ended(entry, persisted=True)
        self._failures.healthy("manifests in the store")
        self._failures.healthy("deleting replaced uploads")
        if self.last is None or self.last.step is None or self.last.step < entry.step:
            self.last = RestorePoint(entry.step, entry.round, entry.manifest_digest)
            self.last_bytes = entry.payload_bytes
        if self.last.step == entry.step:
            self.is_stored = True
            self._failures.healthy(_NEWEST)
        logs.info("persisted", step=entry.step, round=entry.round)


def _uploaded_before(message: Round) -> int:
    """Return the step from which on multiples of the interval are due for upload in this round.

    It is the newest step in the store that the round continues from. Steps between it and the restore point
    may have been due and lost their upload with the last coordinator.
    """
    last = message.last_persisted
    persisted = 0 if last is None or last.step is None else last.step
    if last is not None and last.round == message.round:
        return persisted
    return min(persisted, message.restore_point.step or 0)
