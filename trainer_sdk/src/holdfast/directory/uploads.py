"""The thread of a persister that brings committed checkpoints of a folder into its object store.

Rank 0's persister leads. One checkpoint is uploaded at a time:

1. The leader takes the store for this run (store.open), and writes which checkpoint is uploaded next.
2. Each persister uploads the shards of its ranks, and records in the folder how the store holds them.
3. When all shards are recorded, the leader checks that no other run has taken the store since, and puts the
   manifest. The checkpoint is then persisted. It writes that down, and every persister tells its rank.
4. The leader deletes checkpoints of the store that retention does not keep.

A kill between any two of these leaves older checkpoints of the store unchanged. The next persister, of this
run or of the next one, asks the folder and the store what is missing (ADR 0024).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from holdfast.directory.choice import JOB_UID, NAMESPACE, candidates, pinned
from holdfast.directory.commit import remove_older
from holdfast.directory.folder_store import FolderStore, ForeignTrainingError
from holdfast.directory.open_folder import OpenFolder
from holdfast.directory.plan import LEFT_OUT, FolderPlan, PlanFile, not_uploaded
from holdfast.directory.processes import Claim, claim_checkpoint
from holdfast.directory.share import GoneError, ShareUploader
from holdfast_core.errors import (
    AlreadyExistsError,
    CapacityError,
    HoldfastError,
    NotFoundError,
    UnavailableError,
)
from holdfast_core.format.manifest import Manifest
from holdfast_core.ids import CheckpointId, Level, age_of
from holdfast_core.messages.schema import (
    STORE_TAKEN,
    PersistRequest,
    RestorePoint,
    StoredAs,
)
from holdfast_core.pacing import BackgroundLimit
from holdfast_core.retention import RetentionReason, superseded
from holdfast_core.store.commit import commit, references_beside
from holdfast_core.store.open import TakenError
from holdfast_core.store.rules import QUIET, STALE_UPLOADS, merged
from holdfast_core.store.tier import ObjectTier
from holdfast_core.tasks import Backoff

logger = logging.getLogger(__name__)

Push = Callable[[Any], None]

_POLL_SECONDS = 0.25
"""How often a persister looks for what another one has written."""
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_SWEEP_SECONDS = 900.0
_END_SECONDS = 10.0
"""Longest wait for the thread, which may be in a request whose connection hangs."""


class FolderUploads:
    """Uploads of one persister. `start` begins the thread. Thread-safe.

    Args:
        folder: The folder.
        store: Its object store.
        background: Slows uploads down while training needs the machine.
        keep_last: Number of checkpoints to keep in the store.
    """

    def __init__(
        self, folder: OpenFolder, store: FolderStore, background: BackgroundLimit, keep_last: int
    ) -> None:
        self._folder = folder
        self._store = store
        self._keep_last = keep_last
        self._leads = folder.options.leads
        self._files = folder.committer.files(folder.round)
        self._plan_file = PlanFile(self._files.path / "plan.json")
        self._shares = ShareUploader(folder, store, background.take)
        self._lock = threading.Condition()
        self._taking = threading.Lock()
        self._plan = FolderPlan()
        self._incoming: list[CheckpointId] = []
        """Committed checkpoints that this process has not seen an outcome of."""
        self._told: set[CheckpointId] = set()
        self._pushes: list[Push] = []
        self._claimed: tuple[CheckpointId, Claim | None] | None = None
        """The checkpoint that is being uploaded, which no process may delete, and its claim."""
        # A persister that replaces another one in its round continues what that one has begun: the trainer
        # may wait for an upload, and neither takes the store again nor saves before.
        self._is_training = self._plan_file.read() is not None or any(
            checkpoint.round == folder.round for checkpoint in candidates(folder.tier)
        )
        self._is_taken = False
        self._is_woken = False
        """Whether there is something to do that the thread has not seen."""
        self._closing = False
        self._backoff = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        self._logged = ""
        self._sweep_at = 0.0
        self._thread = threading.Thread(target=self._run, name="holdfast-upload", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def listen(self, push: Push) -> None:
        """Send outcomes to this connection from now on, and those that are known now."""
        with self._lock:
            self._pushes.append(push)
            plan = self._plan
        for message in plan.outcomes.values():
            push(message)

    def take(self) -> None:
        """Take the store for this run, before its first step.

        If the store does not answer or is full, this is tried again while training goes on.

        Raises:
            HoldfastError: The store cannot be used, or another run or training uses it.
        """
        try:
            self._take()
        except (UnavailableError, CapacityError) as error:
            logger.warning(
                "%s cannot be used for now: training starts, its saves go to the folder, and uploads are "
                "tried again (%s)",
                self._store.url,
                error,
            )
        with self._lock:
            self._is_training = self._is_woken = True
            self._lock.notify_all()

    def committed(self, checkpoint: CheckpointId) -> None:
        """Queue a checkpoint that has become local."""
        with self._lock:
            self._is_training = self._is_woken = True
            self._incoming.append(checkpoint)
            self._lock.notify_all()
            plan = self._plan
        if plan.over:
            self._set_plan(plan)  # the thread does nothing more

    @property
    def wanted(self) -> frozenset[CheckpointId]:
        """Checkpoints that the folder must keep until they are in the store.

        What the thread will leave out is not among them, so that their number is bounded also while the
        thread waits for the store.
        """
        with self._lock:
            if self._plan.over:
                return frozenset()
            plan, _ = self._plan.with_committed(self._incoming)
            return frozenset(plan.queue.wanted)

    def finish(self, longest_seconds: float) -> bool:
        """Upload what is committed, then stop. Return whether all of it is in the store.

        Args:
            longest_seconds: Longest wait.
        """
        with self._lock:
            if self._is_training and not self._is_done():
                logger.warning(
                    "uploading the last checkpoints to %s, for at most %.0f s",
                    self._store.url,
                    longest_seconds,
                )
            done = self._lock.wait_for(self._is_done, longest_seconds)
            newest = max(self._plan.outcomes.items(), key=lambda one: age_of(one[0]), default=None)
        if not done:
            logger.warning(
                "the last checkpoints are not in %s: they are in the folder, and the next run that uses "
                "it uploads the newest one",
                self._store.url,
            )
        self._close()
        self._thread.join(_END_SECONDS if done else 0.0)  # old checkpoints may still be deleted
        self._shares.close()
        return done and (newest is None or not newest[1].failed)

    def abort(self) -> None:
        """Stop without uploading what waits."""
        self._close()
        self._shares.close()
        self._thread.join(_END_SECONDS)

    def _close(self) -> None:
        with self._lock:
            self._closing = True
            self._lock.notify_all()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            pause, waits_it_out = _POLL_SECONDS, False
            with self._lock:
                self._is_woken = False
            try:
                pause = self._lead() if self._leads else self._follow()
                self._worked()
            except (TakenError, ForeignTrainingError) as error:
                self._end(error)
            except (HoldfastError, OSError) as error:
                pause, waits_it_out = self._failed(error), True
            except Exception:
                logger.exception("uploads to %s failed", self._store.url)
                pause, waits_it_out = _LONGEST_PAUSE_SECONDS, True
            with self._lock:
                if pause > 0:
                    self._wait(pause, wakes=not waits_it_out)
                if self._closing:
                    return

    def _wait(self, seconds: float, *, wakes: bool) -> None:
        """Wait, at most until the end. With `wakes`, until there is something to do."""
        self._lock.wait_for(lambda: self._closing or (wakes and self._is_woken), seconds)

    def _failed(self, error: Exception) -> float:
        """Log an error that is new, and return the seconds after which uploads are tried again."""
        if str(error) != self._logged and not self._closing:
            self._logged = str(error)
            logger.warning("uploads to %s fail and are tried again: %s", self._store.url, error)
        return self._backoff.next_seconds()

    def _worked(self) -> None:
        if self._logged:
            logger.warning("uploads to %s continue", self._store.url)
        self._logged = ""
        self._backoff.reset()

    def _is_done(self) -> bool:
        if self._plan.over or not self._is_training:
            return True
        return not self._incoming and not self._plan.queue.wanted

    # ------------------------------------------------------------------ every persister but the leader's

    def _follow(self) -> float:
        plan = self._plan_file.read()
        if plan is None:
            if self._plan != FolderPlan() and not self._plan_file.path.exists():
                self._set_plan(replace(self._plan, over="a later run has taken the store"))
            return _POLL_SECONDS
        self._set_plan(plan)  # before an upload that may take long or fail: ranks wait for outcomes
        if plan.queue.request is not None:
            self._shares.upload(plan.queue.request, plan.conditional_put)
        return _POLL_SECONDS

    # ------------------------------------------------------------------ the leader

    def _lead(self) -> float:
        with self._lock:
            if not self._is_training or self._plan.over:
                return _POLL_SECONDS
        self._take()
        self._accept()
        checkpoint = self._plan.queue.first
        self._claim_checkpoint(checkpoint)
        if checkpoint is None:
            self._sweep()
            return _POLL_SECONDS
        try:
            return self._persist(checkpoint)
        except TakenError:
            raise
        except (GoneError, AlreadyExistsError) as error:
            self._write(self._plan.given_up(checkpoint, str(error)))
            return 0.0

    def _claim_checkpoint(self, checkpoint: CheckpointId | None) -> None:
        """Keep a script from deleting the checkpoint that is being uploaded, and release the one before."""
        if self._claimed is not None and self._claimed[0] != checkpoint:
            if (before := self._claimed[1]) is not None:
                before.release()
            self._claimed = None
        if self._claimed is None and checkpoint is not None:
            claim = None
            with contextlib.suppress(NotFoundError):  # nothing is written below a mount point
                self._folder.expect_present()
                claim = claim_checkpoint(self._folder.options.root, checkpoint)
            self._claimed = checkpoint, claim

    def _take(self) -> None:
        """Take the store, and find out what is to be uploaded. Only the first success has an effect."""
        with self._taking:
            if self._is_taken:
                return
            folder = self._folder
            self._store.take(folder.round, has_checkpoints=folder.has_checkpoints)
            sys.audit("holdfast.uploads.taken")
            remove_older(folder.committer.records_dir, folder.round)
            plan = self._plan_file.read() or FolderPlan()
            plan, left_out = plan.with_committed(self._missing())
            self._warn_of(left_out)
            self._write(replace(plan, conditional_put=self._store.has_conditional_put))
            self._is_taken = True

    def _missing(self) -> list[CheckpointId]:
        """Return the committed checkpoints that the store lacks, and those that are not queued yet.

        The store needs the folder's newest one, unless it has a newer one and this run did not restore it.
        It also needs those of this round, for which ranks may wait: an earlier persister may have been
        killed before it queued them.
        """
        stored = self._store.checkpoints()
        newest_stored = max(map(age_of, stored), default=(-1, -1))
        newest_first = candidates(self._folder.tier)
        found = {
            c
            for c in newest_first
            if (c == newest_first[0] or c.round == self._folder.round)
            and c not in stored
            and (age_of(c) > newest_stored or c == self._folder.protected)
        }
        with self._lock:
            return sorted(found.union(self._incoming), key=age_of)

    def _accept(self) -> None:
        """Queue what was committed. Checkpoints that wait behind newer ones for too long are left out."""
        with self._lock:
            incoming = tuple(self._incoming)
        plan, left_out = self._plan.with_committed(incoming)
        self._warn_of(left_out)
        if plan != self._plan:
            self._write(plan)
        with self._lock:
            self._incoming = [c for c in self._incoming if c not in incoming]

    def _warn_of(self, left_out: tuple[CheckpointId, ...]) -> None:
        if left_out:
            steps = ", ".join(str(checkpoint.step) for checkpoint in left_out[-5:])
            more = f" and {len(left_out) - 5} before" if len(left_out) > 5 else ""
            logger.warning(
                "steps %s%s are not uploaded to %s: they waited for the store and newer steps were saved",
                steps,
                more,
                self._store.url,
            )

    def _persist(self, checkpoint: CheckpointId) -> float:
        """Continue the upload of a checkpoint. Return the seconds after which to continue."""
        tier = self._shares.tier(self._plan.conditional_put)
        request = self._plan.queue.request or self._request(tier)
        self._shares.upload(request, self._plan.conditional_put)
        manifest = self._shares.manifest(checkpoint)
        stored = self._gathered(manifest)
        if stored is None:
            return _POLL_SECONDS
        sys.audit("holdfast.uploads.before_commit")
        self._store.expect_newest(self._folder.round)
        needs, bases = merged(stored)
        if not commit(tier, NAMESPACE, manifest, needs, bases):
            logger.warning(
                "%s refers to chunks that the store lost: uploading it whole", checkpoint
            )
            self._write(replace(self._plan, queue=self._plan.queue.requested_whole()))
            return 0.0
        sys.audit("holdfast.uploads.after_commit")
        self._write(self._plan.persisted(checkpoint))
        self._retain()
        return 0.0

    def _request(self, tier: ObjectTier) -> PersistRequest:
        """Request the upload of the first checkpoint of the queue from all persisters."""
        base, older = self._plan.queue.base(self._store.checkpoints()), tuple[CheckpointId, ...]()
        point = None
        if base is not None:
            point = RestorePoint(base.step, base.round)
            older = references_beside(tier, NAMESPACE, JOB_UID, base)
        queue, request = self._plan.queue.requested(point, older)
        self._write(replace(self._plan, queue=queue))
        return request

    def _gathered(self, manifest: Manifest) -> list[StoredAs] | None:
        """Return how the store holds each shard, or None while one is missing.

        Raises GoneError if a persister cannot upload its shard.
        """
        found: list[StoredAs] = []
        for named in manifest.shards:
            try:
                record = self._files.read(manifest.checkpoint, named.rank)
            except HoldfastError:
                return None
            shard = record.shard
            if shard.shard.blake3 != named.blake3:
                return None
            if record.failure:
                raise GoneError(record.failure)
            stored = shard.uploaded
            if stored is None or not self._plan.queue.counts(manifest.checkpoint, stored):
                return None
            found.append(stored)
        return found

    def _retain(self) -> None:
        """Delete the checkpoints of the store that are not kept."""
        protected, stored = self._folder.protected, self._store.checkpoints()
        needed: dict[RetentionReason, Collection[CheckpointId]] = {
            RetentionReason.PINNED: pinned(self._folder.options.root),
            RetentionReason.RESTORE_POINT: () if protected is None else (protected,),
            RetentionReason.UPLOADING: self.wanted,
        }
        tier = self._shares.tier(self._plan.conditional_put)
        for checkpoint in superseded(stored, Level.PERSISTED, self._keep_last, needed):
            # Another run may need what this one does not keep.
            self._store.expect_newest(self._folder.round)
            sys.audit("holdfast.uploads.before_delete")
            tier.delete_checkpoint(NAMESPACE, JOB_UID, checkpoint)

    def _sweep(self) -> None:
        """Delete at times what interrupted uploads and deletions have left in the store."""
        if time.monotonic() < self._sweep_at:
            return
        self._sweep_at = time.monotonic() + _SWEEP_SECONDS
        # Another run may be uploading again what this one takes for the rest of an old upload.
        self._store.expect_newest(self._folder.round)
        tier = self._shares.tier(self._plan.conditional_put)
        tier.abort_stale(NAMESPACE, JOB_UID, STALE_UPLOADS)
        tier.sweep(NAMESPACE, JOB_UID, self._folder.round, QUIET, lambda: self.wanted)

    # ------------------------------------------------------------------ outcomes

    def _write(self, plan: FolderPlan) -> None:
        self._plan_file.write(plan)
        self._set_plan(plan)

    def _set_plan(self, plan: FolderPlan) -> None:
        """Take over a plan, and send the outcomes that are new to the rank.

        A checkpoint that the plan has passed over, or that comes after the end, fails: its outcome was
        one of too many, or no process will write it.
        """
        with self._lock:
            self._plan = plan
            outcomes = plan.outcomes
            new = {c: message for c, message in outcomes.items() if c not in self._told}
            waiting = plan.queue.wanted
            passed = max(map(age_of, (*outcomes, *waiting)), default=(-1, -1))
            incoming = [c for c in self._incoming if c not in outcomes]
            self._incoming = []
            for checkpoint in incoming:
                if plan.over:
                    new[checkpoint] = not_uploaded(checkpoint, plan.over, STORE_TAKEN)
                elif checkpoint in waiting or age_of(checkpoint) > passed:
                    self._incoming.append(checkpoint)
                else:
                    new[checkpoint] = not_uploaded(checkpoint, LEFT_OUT)
            self._told = set(outcomes)
            pushes = tuple(self._pushes)
            self._lock.notify_all()
        for message in new.values():
            for push in pushes:
                push(message)
        if self._leads:
            for checkpoint in new:
                self._files.forget(checkpoint)

    def _end(self, error: Exception) -> None:
        """Upload nothing more, and fail what waits: the store belongs to another run or training."""
        logger.error("%s: %s", self._store.url, error)
        with self._lock:
            waiting = [*self._plan.queue.wanted, *self._incoming]
        plan = replace(self._plan, over=str(error))
        for checkpoint in dict.fromkeys(waiting):
            plan = plan.given_up(checkpoint, str(error), STORE_TAKEN)
        try:
            self._write(plan)
        except HoldfastError as failure:  # the run that took the store has removed the directory
            logger.info("%s", failure)
            self._set_plan(plan)
