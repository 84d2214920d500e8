"""Release deleted Checkpoint objects whose data cannot be deleted. Pure.

Otherwise their finalizer would block the deletion of their namespace. Only a sidecar of the job can delete
data in the object store. If the job is over, suspended or gone, no sidecar will do it: the operator removes
the finalizer immediately, and the data stays. While the job may still order the delete, the object waits for
RELEASE_SECONDS. An Event reports what stays in the store, and where.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_core.api import Checkpoint
from holdfast_operator.decide.facts.times import seconds_since
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.actions import Action, Delete, EmitEvent, EventKind
from holdfast_operator.model.job import JobMemory, Now, Seen
from holdfast_operator.model.reasons import Reason

RELEASE_SECONDS = 600.0
"""Longest wait for the delete in the store. A store that is unavailable for longer must not prevent the
deletion of a namespace."""

RELEASES_PER_PASS = 32
"""Largest number of Checkpoints of one kind that a pass releases. Each release causes another pass."""


def hanging(checkpoints: Iterable[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Return the Checkpoints that a user has deleted and that our finalizer keeps."""
    return tuple(c for c in checkpoints if c.deleting and c.has_finalizer)


def release_all(world: World, why: str) -> list[Action]:
    """Return actions that release all deleted Checkpoints under the job's name.

    The caller has checked that no sidecar of the job will delete data any more.
    """
    return _released(hanging(_of_name(world)), why)


def overdue(world: World, memory: JobMemory, now: Now) -> list[Action]:
    """Return actions that release deleted Checkpoints whose data will probably not be deleted.

    They are those of this job that have waited for RELEASE_SECONDS, and all of a former job of its name.
    """
    own = {c.uid for c in world.own_checkpoints}
    known = hanging(_of_name(world))
    late = tuple(
        c
        for c in known
        if c.uid in own
        and seconds_since(memory.seen_at(Seen.DELETING, c.uid), now) >= RELEASE_SECONDS
    )
    former = tuple(c for c in known if c.uid not in own)
    waited = f"no sidecar could delete it in the object store for {RELEASE_SECONDS:.0f} s"
    return [*_released(late, waited), *_released(former, "the job that saved it no longer exists")]


def kept_data(checkpoint: Checkpoint, why: str) -> str | None:
    """Describe the data that stays in the object store. None: there is none, or it had to be kept."""
    if not checkpoint.deletes_data or not checkpoint.persisted:
        return None
    where = f"{checkpoint.status.job_namespace}/{checkpoint.status.job_uid}"
    return (
        f"Checkpoint {checkpoint.name} is deleted, but the data of step {checkpoint.spec.step} of round "
        f"{checkpoint.status.round} is not: {why}. The data remains in the object store under {where}/ "
        "below the prefix of the CheckpointStore; delete it there if nothing else needs it"
    )


def _of_name(world: World) -> list[Checkpoint]:
    """Return the Checkpoints under the job's name.

    Those of a living gang of the other kind are left out: its sidecars may still delete their data.
    """
    name, other = world.observed.job.name, world.observed.same_name
    theirs = None if other is None else other.uid
    return [
        c
        for c in world.observed.checkpoints
        if c.job == name and (theirs is None or c.status.job_uid != theirs)
    ]


def _released(checkpoints: tuple[Checkpoint, ...], why: str) -> list[Action]:
    actions: list[Action] = []
    for checkpoint in checkpoints[:RELEASES_PER_PASS]:
        actions.append(Delete(Checkpoint.KIND, checkpoint.name, checkpoint.uid, why))
        text = kept_data(checkpoint, why)
        if text is not None:
            actions.append(EmitEvent(EventKind.WARNING, Reason.DATA_KEPT, text))
    return actions
