"""Drill the checkpoints of each CheckpointStore: one short-lived pod at a time reads all bytes of one. Pure.

The pod runs `holdfast-sidecar drill` (model/command_pods.py). These are its rules: which checkpoint is next,
and what its status says afterwards. The pass over the store carries them out (loop/stores.py).

1. status.drills of the store names the checkpoint before its pod is created. So a newer checkpoint does not
   change what is under way, and two operators create the same pod.
2. Requests (spec.verify of a Checkpoint) come first. spec.verify of the store begins a round each `every`, in
   which `sample` checkpoints are drilled, one after the other.
3. Retention and deletes do not wait for a drill. The drill of a checkpoint that is being deleted ends without
   a result: what it finds is no damage.
4. A store that does not answer is no damage either: condition Verified becomes Unknown, and the round goes on
   RETRY later. A checkpoint that was found damaged stays so until a drill has read it to its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from holdfast_core.api import (
    DAMAGED,
    Checkpoint,
    CheckpointCondition,
    CheckpointPhase,
    CheckpointStatus,
    CheckpointStore,
    DrillStatus,
    Gang,
    StoreCondition,
    StoreDrills,
    changed,
)
from holdfast_core.contract import DrillContract, DrillExit, StoreVerb, drill_world_size
from holdfast_core.ids import JobUid
from holdfast_core.store_retention import is_stored, restored_instead
from holdfast_operator.decide.report.conditions import describe_instead
from holdfast_operator.model.actions import EmitEvent, EventKind
from holdfast_operator.model.command_pods import (
    CommandFailed,
    CommandReport,
    StoreCommand,
)
from holdfast_operator.model.job import is_within
from holdfast_operator.model.reasons import Reason

RETRY = timedelta(minutes=10)
"""Pause of a round after a drill that could not read its checkpoint."""
NOTHING_STORED_SECONDS = 60.0
"""Time after which a round is tried again that found no checkpoint in the store."""
_LEAST_SECONDS = 900
_SLOWEST_BYTES_PER_SECOND = 32 << 20
"""A drill may be ten times as slow as one in a cluster, which reads 0.3 GiB/s."""
_UNKNOWN_BYTES = 1 << 40
_PASSES_WITH_RESTORE = 3
"""The state is read once more, from windows, and each element that is compared from its sources."""
_UNAVAILABLE = frozenset({"UnavailableError", "AccessDeniedError"})
_GIB = 1 << 30
_TEXT = 1000


# --------------------------------------------------------------------------- which one is next


def next_drill(
    store: CheckpointStore,
    requested: Iterable[Checkpoint],
    stored: Iterable[Checkpoint],
    now: datetime,
) -> StoreDrills | None:
    """Return the status that names the checkpoint to drill now, or None if none is due.

    Args:
        requested: Checkpoints of the store with a request that is not fulfilled.
        stored: All Checkpoints of the store.
    """
    drills = store.status.drills or StoreDrills()
    asked = min((c for c in requested if _stays(c)), key=_request_order, default=None)
    if asked is not None and asked.spec.verify is not None:
        return _begun(drills, asked, now, asked.spec.verify.trigger)
    wanted = store.spec.verify
    if wanted is None or store.available is not True:
        return None
    if drills.round_at is None or not is_within(wanted.interval, drills.round_at, now):
        drills = changed(drills, round_at=now, left=wanted.sample, again_after=None)
    elif not drills.left or _pauses(drills, now):
        return None
    chosen = _chosen(drills, stored)
    return None if chosen is None else _begun(drills, chosen, now, "")


def next_drill_seconds(store: CheckpointStore, now: datetime) -> float | None:
    """Return the seconds until the next drill may be due, or None if only an event can make one due."""
    drills, wanted = store.status.drills or StoreDrills(), store.spec.verify
    if wanted is None or store.available is not True:
        return None
    due = now if drills.round_at is None else drills.round_at + wanted.interval
    if drills.left and drills.again_after is not None:
        due = min(due, drills.again_after)
    return max(NOTHING_STORED_SECONDS, min(due - now, wanted.interval).total_seconds())


def _pauses(drills: StoreDrills, now: datetime) -> bool:
    """Return whether a drill of the round failed a short time ago.

    A stamp further away than the pause was written with a clock that was wrong.
    """
    until = drills.again_after
    return until is not None and now < until <= now + RETRY


def _request_order(checkpoint: Checkpoint) -> tuple[str, str]:
    wanted = checkpoint.spec.verify
    return ("" if wanted is None else wanted.trigger, checkpoint.name)


def _chosen(drills: StoreDrills, stored: Iterable[Checkpoint]) -> Checkpoint | None:
    """Return the checkpoint whose last drill is the longest ago, none of this round.

    Every other drill takes the newest of those that were never drilled, from which a job would restore. The
    others take the one that was drilled, or saved, the longest ago: otherwise a job that saves often would
    keep its old checkpoints from ever being drilled.
    """
    began = drills.round_at
    found = [
        c
        for c in stored
        if is_stored(c)
        and (c.status.drill is None or began is None or c.status.drill.ended_at < began)
    ]
    never = [c for c in found if c.status.drill is None]
    if never and drills.count % 2 == 0:
        return max(never, key=lambda c: (_saved_at(c), c.name))
    return min(found, key=_last_read, default=None)


def _last_read(checkpoint: Checkpoint) -> tuple[datetime, str]:
    drill = checkpoint.status.drill
    return (_saved_at(checkpoint) if drill is None else drill.ended_at), checkpoint.name


def _saved_at(checkpoint: Checkpoint) -> datetime:
    return checkpoint.status.committed_at or checkpoint.created_at


def _begun(drills: StoreDrills, checkpoint: Checkpoint, now: datetime, trigger: str) -> StoreDrills:
    return changed(
        drills, checkpoint=checkpoint.name, uid=checkpoint.uid, since=now, trigger=trigger
    )


def is_wanted(checkpoint: Checkpoint | None, drills: StoreDrills) -> bool:
    """Return whether the drill that is under way still has its checkpoint, and it is not being deleted."""
    return checkpoint is not None and checkpoint.uid == drills.uid and _stays(checkpoint)


def _stays(checkpoint: Checkpoint) -> bool:
    """Return whether neither a person nor a retention deletes the checkpoint."""
    return not checkpoint.deleting and checkpoint.status.phase is not CheckpointPhase.DELETING


def drill_command(
    store: CheckpointStore, drills: StoreDrills, checkpoint: Checkpoint
) -> StoreCommand:
    """Return the command of the drill that is under way."""
    status, ranks = checkpoint.status, ranks_of(store, drills, checkpoint)
    contract = DrillContract(
        namespace=status.job_namespace or store.namespace,
        job_uid=JobUid(status.job_uid or ""),
        step=checkpoint.spec.step,
        round=status.round,
        manifest=status.manifest,
        world_size=ranks,
    )
    size = _UNKNOWN_BYTES if status.bytes is None else status.bytes
    passes = 1 if ranks is None else _PASSES_WITH_RESTORE
    return StoreCommand(
        verb=StoreVerb.DRILL,
        seed=f"{checkpoint.uid} {drills.count}",
        request=contract.to_json(),
        limit_seconds=_LEAST_SECONDS + passes * size // _SLOWEST_BYTES_PER_SECOND,
    )


def ranks_of(store: CheckpointStore, drills: StoreDrills, checkpoint: Checkpoint) -> int | None:
    """Return the number of ranks for which the state is assembled, or None."""
    asked, wanted = checkpoint.spec.verify, store.spec.verify
    by_request = bool(drills.trigger) and asked is not None
    if asked is not None and by_request:
        if not asked.restore or asked.world_size is not None:
            return asked.world_size
    elif wanted is None or not wanted.restore:
        return None
    return drill_world_size(checkpoint.status.world_size or 1)


# --------------------------------------------------------------------------- what it found


@dataclass(frozen=True, slots=True)
class DrillResult:
    """What a drill found."""

    exit: DrillExit
    reason: Reason
    message: str
    bytes: int = 0
    seconds: float = 0.0

    @property
    def verified(self) -> bool | None:
        """The value of condition Verified. None: nothing is known."""
        return None if self.exit is DrillExit.NOT_READ else self.exit is DrillExit.INTACT


def drill_result(state: CommandReport | CommandFailed) -> DrillResult:
    """Return what the end of a drill's pod means. A report of another form says nothing."""
    if isinstance(state, CommandFailed):
        return DrillResult(DrillExit.NOT_READ, Reason.NOT_READ, state.message[:_TEXT])
    data = state.data
    if "error" in data:
        down = state.text("error") in _UNAVAILABLE
        reason = Reason.STORE_UNAVAILABLE if down else Reason.NOT_READ
        return DrillResult(DrillExit.NOT_READ, reason, state.text("message")[:_TEXT])
    bad_count, read, seconds = (data.get(key) for key in ("badCount", "readBytes", "seconds"))
    if not (_is_count(bad_count) and _is_count(read) and isinstance(seconds, int | float)):
        text = "the drill's pod failed: its report has no numbers of bad parts, bytes and seconds"
        return DrillResult(DrillExit.NOT_READ, Reason.NOT_READ, text)
    size, took = int(read or 0), max(0.0, float(seconds))
    if bad_count:
        text = _damage(data.get("bad"), int(bad_count))
        return DrillResult(DrillExit.DAMAGED, Reason.DAMAGED, text, size, took)
    refused = state.text("notRestorable")
    if refused:
        text = f"every byte is intact, but the state cannot be assembled: {refused}"[:_TEXT]
        return DrillResult(DrillExit.NOT_RESTORABLE, Reason.NOT_RESTORABLE, text, size, took)
    text = "every byte in the object store matches its digest"
    return DrillResult(DrillExit.INTACT, Reason.INTACT, text, size, took)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _damage(bad: Any, count: int) -> str:
    """Name the first damaged part, and say how many more there are."""
    first = bad[0] if isinstance(bad, list) and bad and isinstance(bad[0], Mapping) else {}
    part, kind, message = (
        value if isinstance(value := first.get(key), str) else ""
        for key in ("part", "damage", "message")
    )
    text = f"{part or 'a part'}: {kind or 'Damaged'}: {message}"[:_TEXT].rstrip(": ")
    return text if count == 1 else f"{text} (and {count - 1} more parts)"


def drilled_status(
    checkpoint: Checkpoint,
    result: DrillResult,
    drills: StoreDrills,
    ranks: int | None,
    now: datetime,
) -> CheckpointStatus:
    """Return the status of a Checkpoint after its drill."""
    status = checkpoint.status
    known = status.drill
    gib = result.bytes / _GIB
    drill = DrillStatus(
        ended_at=now,
        trigger=drills.trigger or ("" if known is None else known.trigger),
        bytes=result.bytes,
        seconds=round(result.seconds, 3),
        gib_per_second=round(gib / result.seconds, 3) if result.seconds else 0.0,
        world_size=ranks,
    )
    status = changed(status, drill=drill)
    kinds, verified = CheckpointCondition, result.verified
    if verified is None and checkpoint.damaged:
        return status
    status = status.with_condition(kinds.VERIFIED, verified, result.reason, result.message, now)
    if verified is None:
        return status
    mark = status.condition(kinds.QUARANTINED)
    if result.exit is DrillExit.DAMAGED and not status.is_true(kinds.QUARANTINED):
        text = f"a drill found damage: {result.message}"
        status = status.with_condition(kinds.QUARANTINED, True, DAMAGED, text, now)
    elif result.exit is not DrillExit.DAMAGED and mark is not None and mark.reason == DAMAGED:
        text = "a later drill found it intact"
        status = status.with_condition(kinds.QUARANTINED, False, Reason.RELEASED, text, now)
    refused = status.condition(kinds.RESTORABLE)
    found = result.exit is DrillExit.INTACT and not status.is_true(kinds.QUARANTINED)
    if found and refused is not None and refused.is_false:
        status = status.with_condition(kinds.RESTORABLE, True, result.reason, result.message, now)
    return changed(status, verified_at=now)


def ended(store: CheckpointStore, known: bool | None, now: datetime) -> StoreDrills:
    """Return the status of the store after a drill.

    Args:
        known: Whether the drill had a result. None: its checkpoint is gone, and it counts in no round.
    """
    drills = store.status.drills or StoreDrills()
    of_round = not drills.trigger and known
    return changed(
        drills,
        checkpoint="",
        uid="",
        since=None,
        trigger="",
        count=drills.count + 1,
        left=max(0, drills.left - 1) if of_round else drills.left,
        again_after=now + RETRY if known is False and not drills.trigger else drills.again_after,
    )


def unavailable(store: CheckpointStore) -> CommandReport:
    """Return the report of a drill that does not run, because its store is not available."""
    known = store.status.condition(StoreCondition.AVAILABLE)
    text = "" if known is None else known.message
    message = f"the store is not available: {text}"
    return CommandReport({"error": "UnavailableError", "message": message})


def drill_event(
    checkpoint: Checkpoint, result: DrillResult, job: Gang | None, own: Iterable[Checkpoint]
) -> EmitEvent:
    """Return the Event about the end of a drill.

    Args:
        job: The job of the checkpoint, if it exists.
        own: The Checkpoints of that job.
    """
    text, id_ = result.message, checkpoint.id
    if result.exit is DrillExit.INTACT:
        text = f"{text}: {result.bytes / _GIB:.3f} GiB in {result.seconds:.1f} s"
    if result.exit is DrillExit.DAMAGED and id_ is not None:
        instead = restored_instead(job, own, id_)
        text = f"{text}. It is quarantined; {describe_instead(instead)}"
    bad = result.exit in (DrillExit.DAMAGED, DrillExit.NOT_RESTORABLE)
    kind = EventKind.WARNING if bad or result.verified is None else EventKind.NORMAL
    return EmitEvent(kind, result.reason, text)
