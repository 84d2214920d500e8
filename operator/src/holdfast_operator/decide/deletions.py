"""Which data of deleted Checkpoints and deleted jobs a pod deletes in the object store. Pure.

The sidecars of a gang that trains delete what a person or retention deletes (checkpoints.py). Without a gang,
a pod with the keys of the store does it (loop/deletions.py):

1. A Checkpoint with deletionPolicy DeleteData was deleted, and its job is over, suspended or gone. Our
   finalizer holds the object until the data is deleted, or cannot be.
2. A job was deleted whose retention.whenDeleted is DeleteData or KeepLast. Its Checkpoints outlive it and
   name the policy, so that a job that was deleted while no operator ran is found as well. No finalizer holds
   the job or these objects. They are marked as Deleting before the deed, so that no other job starts from
   them, and they are deleted after it.

What is pinned, and what another job starts from, stays in both cases. A suspended job also keeps what it
would resume from. Without the job, only the object that recorded its commit proves that the job was one of
this cluster (`Checkpoint.saved_here`). The data of an import, and of a copy that a backup has restored,
stays: the job may train in another cluster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from holdfast_core.api import (
    Checkpoint,
    CheckpointCondition,
    CheckpointPhase,
    Gang,
    JobCondition,
    WhenDeleted,
)
from holdfast_core.contract import DeleteContract
from holdfast_core.ids import CheckpointId, JobUid, age_of
from holdfast_core.retention import RetentionReason
from holdfast_core.store_retention import is_stored, needed_in_store, newest_record
from holdfast_operator.decide.ends import hanging, has_data
from holdfast_operator.decide.facts.world import is_over
from holdfast_operator.model.reasons import Reason

MAX_BATCH = 200
"""Largest number of checkpoints that one pod deletes. Each takes about six requests."""
MAX_KEPT = 2000
"""Largest number of checkpoints that a request names as kept. It is one variable of the pod, and the kernel
starts no program with a string of more than 128 KiB in its environment."""


@dataclass(frozen=True, slots=True)
class StoredObjects:
    """What is known of the Checkpoints of one store."""

    checkpoints: tuple[Checkpoint, ...]
    """All Checkpoints of the jobs that may have something to delete."""
    gangs: Mapping[JobUid, Gang]
    """The gangs of the namespace that exist and have one of these names."""
    cloned: Mapping[JobUid, frozenset[str]]
    """By job: the names of the Checkpoints from which other jobs start."""
    with_pods: Collection[JobUid]
    """Jobs of which there are pods, which may still write to the store."""

    def of_jobs(self) -> dict[JobUid, list[Checkpoint]]:
        """Return the Checkpoints that record commits, by job."""
        found = defaultdict[JobUid, list[Checkpoint]](list)
        for checkpoint in self.checkpoints:
            uid = checkpoint.status.job_uid
            if uid is not None and checkpoint.id is not None:
                found[uid].append(checkpoint)
        return found


@dataclass(frozen=True, slots=True)
class Deletion:
    """Data of one job that one pod deletes."""

    job: str
    objects: tuple[Checkpoint, ...]
    """The objects that go when the data is deleted."""
    contract: DeleteContract


def held(stored: StoredObjects) -> list[Checkpoint]:
    """Return the deleted Checkpoints with data that our finalizer keeps and no gang deletes."""
    return [
        c
        for c in hanging(stored.checkpoints)
        if has_data(c) and not _has_gang(stored.gangs.get(c.status.job_uid or JobUid("")))
    ]


def deletions(stored: StoredObjects) -> list[Deletion]:
    """Return what pods delete of single Checkpoints, at most MAX_BATCH each."""
    found = defaultdict[JobUid, list[Checkpoint]](list)
    for checkpoint in (*held(stored), *_pruned(stored)):
        uid = checkpoint.status.job_uid
        if uid is not None and obstacle(stored, checkpoint) is None:
            found[uid].append(checkpoint)
    return [
        Deletion(objects[0].job, tuple(batch), _contract(stored, uid, batch))
        for uid, objects in found.items()
        if (batch := objects[:MAX_BATCH])
    ]


def _pruned(stored: StoredObjects) -> list[Checkpoint]:
    """Return the Checkpoints that the retention had marked when their job ended."""
    return [
        c
        for c in stored.checkpoints
        if c.status.phase is CheckpointPhase.DELETING
        and not c.deleting
        and c.persisted
        and (gang := stored.gangs.get(c.status.job_uid or JobUid(""))) is not None
        and is_over(gang.status)
        and not any(c.id in ids for ids in needed_in_store(gang, [c], ()).values())
    ]


def is_foreign(stored: StoredObjects, checkpoint: Checkpoint) -> bool:
    """Return whether nothing proves that a job of this cluster saved the checkpoint."""
    return not checkpoint.saved_here and checkpoint.status.job_uid not in stored.gangs


FOREIGN = (
    "it was imported, or a backup has restored its object, and its job may train in another cluster"
)


def obstacle(stored: StoredObjects, checkpoint: Checkpoint) -> str | None:
    """Return why the data of a deleted Checkpoint must stay for now, or None."""
    uid = checkpoint.status.job_uid
    if uid is None:
        return "it does not say which job saved it"
    if is_foreign(stored, checkpoint):
        return FOREIGN
    if checkpoint.name in stored.cloned[uid]:
        return "another job starts from it"
    gang = stored.gangs.get(uid)
    if gang is None or gang.deleting or is_over(gang.status):
        return None
    needed = needed_in_store(gang, [checkpoint], ())
    keeps = (RetentionReason.QUARANTINED, RetentionReason.NEWEST_PERSISTED)
    if any(checkpoint.id in needed[reason] for reason in keeps):
        return "the suspended job needs it to resume"
    return None


def _contract(stored: StoredObjects, uid: JobUid, batch: list[Checkpoint]) -> DeleteContract:
    gang = stored.gangs.get(uid)
    ended = gang is None or gang.deleting or is_over(gang.status)
    return DeleteContract(
        namespace=batch[0].status.job_namespace or batch[0].namespace,
        job_uid=uid,
        checkpoints=_ids(batch),
        ended=ended and uid not in stored.with_pods,
    )


def _ids(checkpoints: Iterable[Checkpoint]) -> tuple[CheckpointId, ...]:
    return tuple(id_ for c in checkpoints if (id_ := c.id) is not None)


def _has_gang(gang: Gang | None) -> bool:
    """Return whether sidecars may order the delete, now or in a later round."""
    if gang is None or gang.deleting or is_over(gang.status):
        return False
    return not (gang.spec.suspend and gang.status.is_true(JobCondition.SUSPENDED))


# --------------------------------------------------------------------------- jobs that are gone


@dataclass(frozen=True, slots=True)
class Estate:
    """What a deleted job has left in the store, and what its policy says about it."""

    job: str
    job_uid: JobUid
    kept: tuple[Checkpoint, ...]
    doomed: tuple[Checkpoint, ...]
    policy: WhenDeleted

    def unmarked(self) -> list[tuple[Checkpoint, CheckpointPhase]]:
        """Return the objects whose phase does not say yet what becomes of them, with the right phase."""
        deleting, committed = CheckpointPhase.DELETING, CheckpointPhase.COMMITTED
        wanted = [(c, deleting) for c in self.doomed] + [(c, committed) for c in self.kept]
        return [(c, phase) for c, phase in wanted if c.status.phase is not phase]

    def deletion(self) -> Deletion:
        """Return the deletion of all that is not kept, whether an object names it or not.

        Where too many are kept, it is the deletion of the first of those that objects name.
        """
        first, keep = self.doomed[0], _ids(self.kept)
        namespace = first.status.job_namespace or first.namespace
        if len(keep) <= MAX_KEPT:
            contract = DeleteContract(namespace, self.job_uid, keep=keep, ended=True)
            return Deletion(self.job, self.doomed, contract)
        batch = self.doomed[:MAX_BATCH]
        is_last = len(batch) == len(self.doomed)
        contract = DeleteContract(namespace, self.job_uid, _ids(batch), ended=is_last)
        return Deletion(self.job, batch, contract)


def estates(stored: StoredObjects) -> list[Estate]:
    """Return what deleted jobs have left that their policy deletes. Nothing is returned that is complete."""
    found = []
    for uid, objects in stored.of_jobs().items():
        newest = newest_record(objects)
        policy = None if newest is None else newest.status.when_deleted
        if uid in stored.gangs or policy in (None, WhenDeleted.RETAIN):
            continue
        if any(is_foreign(stored, c) for c in objects):
            continue
        kept = _kept(objects, stored.cloned[uid], policy)
        # The newest one has the policy, so its object goes last.
        doomed = tuple(
            c
            for c in sorted(objects, key=_age)
            if c.persisted and c.name not in kept and not c.deleting
        )
        if doomed:
            left = tuple(c for c in objects if c.name in kept)
            found.append(Estate(doomed[0].job, uid, left, doomed, WhenDeleted(policy)))
    return found


def _kept(objects: Iterable[Checkpoint], cloned: Collection[str], policy: WhenDeleted) -> set[str]:
    """Return the names of the objects whose data stays."""
    kept = {c.name for c in objects if c.spec.pin or c.name in cloned}
    if policy is WhenDeleted.KEEP_LAST:
        there = [c for c in objects if is_stored(c)]
        good = [c for c in there if not _is_bad(c)]
        last = newest_record(good or there)
        kept |= set() if last is None else {last.name}
    return kept


def _age(checkpoint: Checkpoint) -> tuple[int, int]:
    return (-1, -1) if checkpoint.id is None else age_of(checkpoint.id)


def _is_bad(checkpoint: Checkpoint) -> bool:
    """Return whether a job would not have restored the checkpoint.

    A store that was missing says nothing of it: its objects say for a while that the store is not there.
    """
    restorable = checkpoint.status.condition(CheckpointCondition.RESTORABLE)
    return checkpoint.status.is_true(CheckpointCondition.QUARANTINED) or (
        restorable is not None
        and restorable.is_false
        and restorable.reason != Reason.STORE_NOT_FOUND
    )
