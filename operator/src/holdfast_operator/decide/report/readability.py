"""Leave a job alone while one of its pods cannot be parsed, and report it in condition Readable. Pure.

Such a pod is missing among the job's pods, but it must not be treated as gone (ADR 0002).
"""

from __future__ import annotations

from holdfast_core.api import JobCondition
from holdfast_operator.decide.facts.world import World
from holdfast_operator.decide.report.status import Note, set_condition
from holdfast_operator.model.actions import Action, Decision, EmitEvent, EventKind, WriteStatus
from holdfast_operator.model.job import JobMemory, Now, Unreadable
from holdfast_operator.model.reasons import Reason

WAITING_SECONDS = 10.0
POD_KIND = "Pod"


def plan(world: World, memory: JobMemory, now: Now) -> Decision | None:
    """Return the whole decision of the pass while a pod of the job cannot be parsed, else None.

    The first pass in which all pods can be parsed again sets Readable=True, and does nothing else.
    """
    job = world.observed.job
    hidden = [u for u in world.observed.unreadable if u.kind == POD_KIND]
    known = job.status.condition(JobCondition.READABLE)
    if not hidden:
        if known is None or not known.is_false:
            return None
        note = Note(Reason.READ_AGAIN, "the job and its pods can be read")
        return _written(world, memory, now, True, note, ())
    note = Note(Reason.CANNOT_READ, _text(hidden))
    if known is not None and known.is_false and known.message == note.message:
        return Decision.of((), WAITING_SECONDS, note.message, memory)
    event = EmitEvent(EventKind.WARNING, note.reason, note.message)
    return _written(world, memory, now, False, note, (event,))


def _text(hidden: list[Unreadable]) -> str:
    first = min(hidden, key=lambda u: u.name)
    others = f" (and {len(hidden) - 1} more pods)" if len(hidden) > 1 else ""
    return (
        f"pod {first.name}{others} cannot be read: {first.problem}; the operator does not delete, "
        "write or start anything of the job until the pod can be read"
    )


def _written(
    world: World, memory: JobMemory, now: Now, value: bool, note: Note, events: tuple[Action, ...]
) -> Decision:
    job = world.observed.job
    status = set_condition(job.status, JobCondition.READABLE, value, note, now, job.generation)
    write = WriteStatus(job.resource_version, status)
    return Decision.of((write, *events), WAITING_SECONDS if events else 0.0, note.message, memory)
