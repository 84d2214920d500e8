"""Delete data in a store by short-lived pods (decide/deletions.py), and let go of what cannot be deleted.

One pod runs for a store at a time. An object waits for RELEASE_SECONDS without progress of its store at the
longest: a store that is down must not prevent the deletion of a namespace. Then the object goes, the data
stays, and an Event says where.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from holdfast_core import logs
from holdfast_core.api import (
    Checkpoint,
    CheckpointPhase,
    CheckpointStore,
)
from holdfast_core.clock import Clock
from holdfast_core.contract import StoreVerb
from holdfast_core.names import first_of, job_prefix
from holdfast_operator.apply.command_runs import LOOK_AGAIN_SECONDS, CommandRuns
from holdfast_operator.decide.checkpoints import WRITES_PER_PASS, moved
from holdfast_operator.decide.deletions import (
    FOREIGN,
    Deletion,
    Estate,
    StoredObjects,
    deletions,
    estates,
    held,
    is_foreign,
    obstacle,
)
from holdfast_operator.decide.ends import RELEASE_SECONDS, kept_data
from holdfast_operator.kube.api import ConflictError
from holdfast_operator.kube.cluster import Cluster, Events
from holdfast_operator.model.actions import EventKind
from holdfast_operator.model.command_pods import (
    CommandFailed,
    CommandFailure,
    CommandState,
    CommandUnderway,
    StoreCommand,
)
from holdfast_operator.model.job import Now
from holdfast_operator.model.reasons import Reason
from holdfast_operator.watch.cache import ClusterCache

WAITING_SECONDS = 10.0
"""Time after which a pass looks again at what waits for a gang, a store or another pod to end."""
AGAIN_SECONDS = (5.0, 120.0)
"""Shortest and longest wait after a pod that failed. It doubles with each failure."""
LIMIT_SECONDS = 600
Release = Callable[[str, str, str], Awaitable[None]]
"""Removes our finalizer from the Checkpoint of this namespace, name and uid, and deletes it."""


@dataclass(slots=True)
class _Progress:
    """What this process remembers of the deletions in one store."""

    store: str
    """uid of the store: what was to be deleted in one that is gone may be kept in the next of its name."""
    running: Deletion | None = None
    runs: int = 0
    moved_at: float = 0.0
    """When a pod last succeeded."""
    failures: int = 0
    again_at: float = 0.0
    why: str = ""
    """Why the newest pod failed, or does not run."""
    emptied: set[str] = field(default_factory=set)
    """Contracts of deleted jobs that a pod has carried out. Their objects are still being deleted."""
    seen: dict[str, float] = field(default_factory=dict)
    """Monotonic seconds since which this process sees a deleted object, or pods of a deleted job, by uid."""


@dataclass(frozen=True, slots=True)
class Deletions:
    """Reconciler of the deletions in CheckpointStores."""

    cluster: Cluster
    cache: ClusterCache
    events: Events
    commands: CommandRuns
    release: Release
    clock: Clock
    _progress: dict[tuple[str, str], _Progress] = field(default_factory=dict)
    """By namespace and name of the store."""

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """Run one pass. Return the seconds after which the next one is due, or None. Raises HoldfastError."""
        group = self.cache.checkpoints.of("delete", namespace, name)
        await self._hold(group)
        store = self.cache.stores.get(namespace, name)
        if store is None or store.deleting:
            return await self._without_store(namespace, name, group)
        stored = self._gather(namespace, group)
        progress = self._progress_in(namespace, name, store.uid)
        await self._let_late_ones_go(stored, progress)
        if progress.running is None:
            found = await self._due(store, stored, progress) if group else None
            if found is None:
                await self.commands.end(store, StoreVerb.DELETE)  # of an earlier process
                going = any(c.status.phase is CheckpointPhase.DELETING or c.deleting for c in group)
                return WAITING_SECONDS if going or estates(stored) else None
            progress.running = found
            progress.runs += 1
        return await self._look(store, progress)

    def _progress_in(self, namespace: str, name: str, uid: str) -> _Progress:
        known = self._progress.get((namespace, name))
        if known is None or known.store != uid:
            known = self._progress[namespace, name] = _Progress(uid)
        return known

    async def _hold(self, group: tuple[Checkpoint, ...]) -> None:
        """Add our finalizer to the objects whose data is to go with them, whatever the state of the job.

        An object that has changed meanwhile causes an event, and with it another pass.
        """
        for checkpoint in [c for c in group if c.lacks_finalizer][:WRITES_PER_PASS]:
            finalizers = [*checkpoint.metadata.finalizers, Checkpoint.FINALIZER]
            with suppress(ConflictError):
                await self.cluster.patch(
                    Checkpoint.KIND,
                    checkpoint.namespace,
                    checkpoint.name,
                    checkpoint.resource_version,
                    {"metadata": {"finalizers": finalizers}},
                )

    async def _due(
        self, store: CheckpointStore, stored: StoredObjects, progress: _Progress
    ) -> Deletion | None:
        """Return what the next pod deletes. What has failed does not keep other jobs from their turn."""
        if store.available is False:
            progress.why = f"CheckpointStore {store.name} is not available"
            return None
        if self.clock.monotonic() < progress.again_at:
            return None
        wanted = [*deletions(stored), *await self._of_estates(store, stored, progress)]
        return wanted[progress.failures % len(wanted)] if wanted else None

    def _gather(self, namespace: str, group: tuple[Checkpoint, ...]) -> StoredObjects:
        names = {c.job for c in group}
        objects = [c for job in names for c in self.cache.checkpoints.of(namespace, job)]
        gangs = {g.uid: g for job in names for g in self.cache.jobs.of_name(namespace, job)}
        names_by_uid = {uid: c.job for c in objects if (uid := c.status.job_uid) is not None}
        cache = self.cache
        return StoredObjects(
            tuple(objects),
            gangs,
            {uid: cache.cloned(namespace, job, uid) for uid, job in names_by_uid.items()},
            {uid for uid in names_by_uid if cache.pods.workers(namespace, uid)},
        )

    # ------------------------------------------------------------------ what cannot be deleted

    async def _without_store(
        self, namespace: str, name: str, group: tuple[Checkpoint, ...]
    ) -> float | None:
        """Let go of all objects if the store does not exist, and of late ones if it cannot be parsed."""
        stored = self._gather(namespace, group)
        hidden = self.cache.unreadable.get(CheckpointStore.KIND, namespace, name)
        if hidden is not None:
            progress = self._progress_in(namespace, name, hidden.uid)
            progress.why = f"CheckpointStore {name} cannot be read"
            await self._let_late_ones_go(stored, progress)
        else:
            self._progress.pop((namespace, name), None)
            for checkpoint in held(stored)[:WRITES_PER_PASS]:
                await self._let_go(checkpoint, f"CheckpointStore {name} does not exist")
        return WAITING_SECONDS if held(stored) else None

    async def _let_late_ones_go(self, stored: StoredObjects, progress: _Progress) -> None:
        now, waiting = self.clock.monotonic(), held(stored)
        present = {*stored.with_pods, *(c.uid for c in waiting)}
        progress.seen = {uid: at for uid, at in progress.seen.items() if uid in present}
        busy = () if progress.running is None else [c.uid for c in progress.running.objects]
        late = [
            c
            for c in waiting
            if c.uid not in busy
            and not is_foreign(stored, c)
            and now - max(progress.seen.setdefault(c.uid, now), progress.moved_at)
            >= RELEASE_SECONDS
        ]
        for checkpoint in [c for c in waiting if is_foreign(stored, c)][:WRITES_PER_PASS]:
            await self._let_go(checkpoint, FOREIGN)
        for checkpoint in late[:WRITES_PER_PASS]:
            why = obstacle(stored, checkpoint) or progress.why or "no pod could delete it"
            await self._let_go(checkpoint, f"{why}, for {RELEASE_SECONDS:.0f} s")

    async def _let_go(self, checkpoint: Checkpoint, why: str) -> None:
        await self.release(checkpoint.namespace, checkpoint.name, checkpoint.uid)
        text = kept_data(checkpoint, why)
        if text is not None:
            await self.events.emit(checkpoint, EventKind.WARNING, Reason.DATA_KEPT, text)
            logs.warning(text, namespace=checkpoint.namespace)

    # ------------------------------------------------------------------ the pod

    async def _look(self, store: CheckpointStore, progress: _Progress) -> float:
        """Start the pod, or look at it, and carry out what its end means."""
        wanted = progress.running
        assert wanted is not None
        state = await self.commands.run(store, _command(wanted, progress.runs))
        if state is None or isinstance(state, CommandUnderway):
            return LOOK_AGAIN_SECONDS
        why = _failure(state)
        if why is None:
            await self._succeeded(store, wanted, progress)
        else:
            await self._failed(store, wanted, progress, state, why)
        progress.running = None
        await self.commands.end(store, StoreVerb.DELETE)
        return LOOK_AGAIN_SECONDS

    async def _succeeded(self, store: CheckpointStore, done: Deletion, progress: _Progress) -> None:
        progress.moved_at, progress.failures = self.clock.monotonic(), 0
        progress.again_at, progress.why = 0.0, ""
        if done.contract.keep is None:
            for checkpoint in done.objects:
                await self.release(checkpoint.namespace, checkpoint.name, checkpoint.uid)
        else:
            progress.emptied.add(done.contract.to_json())
        steps = first_of([str(c.id) for c in done.objects])
        text = f"the data of job {done.job} (uid {done.contract.job_uid}) is deleted: {steps}"
        await self.events.emit(store, EventKind.NORMAL, Reason.DATA_DELETED, text)
        logs.info(text, namespace=store.namespace, store=store.name)

    async def _failed(
        self,
        store: CheckpointStore,
        wanted: Deletion,
        progress: _Progress,
        state: CommandState,
        why: str,
    ) -> None:
        progress.again_at = self.clock.monotonic() + wait_seconds(progress.failures)
        progress.failures += 1
        progress.why = why
        text = f"deleting data of job {wanted.job} failed, and is tried again: {why}"
        await self.events.emit(store, EventKind.WARNING, Reason.DELETE_FAILED, text)
        logs.warning(text, namespace=store.namespace, store=store.name)
        if _never_starts(state) and wanted.contract.keep is None:
            for checkpoint in wanted.objects:
                await self._let_go(checkpoint, why)

    # ------------------------------------------------------------------ jobs that are gone

    async def _of_estates(
        self, store: CheckpointStore, stored: StoredObjects, progress: _Progress
    ) -> list[Deletion]:
        """Return what pods delete of deleted jobs. Mark, and after the deed delete, their objects."""
        due: list[Deletion] = []
        left = estates(stored)
        progress.emptied &= {e.deletion().contract.to_json() for e in left}
        for estate in left:
            if self._may_change(store.namespace, estate, stored, progress):
                continue
            if await self.cluster.job_exists(store.namespace, estate.job, estate.job_uid):
                continue  # the copies lag, and nothing undoes a deletion
            unmarked, found = estate.unmarked(), estate.deletion()
            if unmarked:
                await self._mark(estate, unmarked[:WRITES_PER_PASS])
            elif found.contract.to_json() not in progress.emptied:
                due.append(found)
            else:
                for checkpoint in estate.doomed[:WRITES_PER_PASS]:
                    await self.cluster.delete(
                        Checkpoint.KIND, checkpoint.namespace, checkpoint.name, checkpoint.uid
                    )
        return due

    def _may_change(
        self, namespace: str, estate: Estate, stored: StoredObjects, progress: _Progress
    ) -> bool:
        """Return whether pods of the job may still write, or an object that cannot be parsed may be pinned.

        A job that cannot be parsed exists.
        """
        prefix, hidden = job_prefix(estate.job, estate.job_uid), self.cache.unreadable
        uids = {u.uid for u in hidden.all() if u.namespace == namespace}
        if estate.job_uid in uids or hidden.of(Checkpoint.KIND, namespace, prefix):
            return True
        if estate.job_uid not in stored.with_pods:
            return False
        now = self.clock.monotonic()
        return now - progress.seen.setdefault(estate.job_uid, now) < RELEASE_SECONDS

    async def _mark(
        self, estate: Estate, unmarked: list[tuple[Checkpoint, CheckpointPhase]]
    ) -> None:
        now = Now(self.clock.monotonic(), self.clock.utc_now())
        for checkpoint, phase in unmarked:
            message = ""
            if phase is CheckpointPhase.DELETING:
                message = f"its job was deleted, and retention.whenDeleted was {estate.policy}"
            status = moved(checkpoint, phase, now, message=message)
            await self.cluster.write_status(checkpoint, status)


def wait_seconds(failures: int) -> float:
    """Return the wait after a pod that failed, which so many others have failed before in a row."""
    shortest, longest = AGAIN_SECONDS
    return min(shortest * 2.0 ** min(failures, 10), longest)


def _command(wanted: Deletion, run: int) -> StoreCommand:
    contract = wanted.contract.to_json()
    return StoreCommand(StoreVerb.DELETE, f"{run} {contract}", contract, LIMIT_SECONDS)


def _failure(state: CommandState) -> str | None:
    """Return why a pod that has ended did not delete everything, or None if it did."""
    if isinstance(state, CommandFailed):
        return state.message
    assert not isinstance(state, CommandUnderway)
    if isinstance(state.data.get("deleted"), int):
        return None
    return (state.problem or "the report says neither what was deleted nor why not")[:1000]


def _never_starts(state: CommandState) -> bool:
    """Return whether no later pod can succeed: the namespace is going, and takes no pod any more."""
    if not isinstance(state, CommandFailed) or state.failure is not CommandFailure.REFUSED:
        return False
    return "being terminated" in state.message
