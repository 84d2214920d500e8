"""Measure how long each phase of a recovery took. Pure.

A recovery lasts from the fault until every rank has finished a step of the new round. Its phases follow each
other without a gap, so they are disjoint and their sum is the total:

1. detect: from the fault until this operator knew what was lost, which includes the wait for sidecars that
   did not answer and for further lost pods;
2. back_off: until the new round began (about 0 unless the gang waited after repeated failures);
3. seal: until every survivor was sealed, or the restore point was chosen without it;
4. schedule: until the sidecar of every member had started and the restore point was chosen;
5. rehydrate: until the shards were on the nodes;
6. rendezvous: until all ranks had met, and all time that no other phase measures;
7. first_step: until every rank had finished a step.

Phases 1 to 4 are measured on the monotonic clock of this process. The coordinator measures the durations of 5
and 7 on its own clock. They are limited to what is left of the total, and never decide an order. Phase 6 is
the rest.
"""

from __future__ import annotations

from datetime import datetime

from holdfast_core.api import RecoveryStatus, TrainingJobStatus, changed
from holdfast_core.ids import TierName
from holdfast_core.messages.schema import CoordinatorState
from holdfast_operator.decide.facts.evidence import Failure
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.job import JobMemory, Now, Seen
from holdfast_operator.model.reasons import Reason

_SILENT = frozenset({Reason.NODE_LOST, Reason.SIDECAR_UNREACHABLE})
"""Failures that are detected by the absence of answers. The fault is dated to the last sign of life."""
SHOWN_SECONDS = 0.05
"""Shortest phase that the line about a recovery names. A shorter one would be shown as 0.0 s."""


def fault_at(world: World, failures: tuple[Failure, ...]) -> float | None:
    """Return the estimated time of the fault in monotonic seconds, or None if there is no evidence.

    A fault happened between the last sign of life and the moment at which it was seen. The last sign of life
    is returned: the newest finished step of the gang, or newer evidence about a worker that failed. With long
    steps the estimate may be early by up to one step.
    """
    seen = world.memory.failure_seen_at
    if seen is None:
        return None
    signs = [None if world.memory.progress is None else world.memory.progress[1]]
    for failure in failures:
        signs.extend(_signs(world, failure))
    known = [min(sign, seen) for sign in signs if sign is not None]
    return max(known, default=None)


def _signs(world: World, failure: Failure) -> list[float | None]:
    member, pod = world.member(failure.worker), world.pod(failure.worker)
    if failure.reason in _SILENT:
        node = None if pod is None or pod.node is None else world.observed.nodes.get(pod.node)
        answered_at = (
            None if member is None or member.sidecar is None else member.sidecar.answered_at
        )
        return [None if node is None else node.renewed_at, answered_at]
    if pod is not None and pod.leaving:
        return [world.memory.seen_at(Seen.LEAVING, pod.uid)]
    if pod is not None and pod.trainer_finished_at is not None and failure.replace_pod:
        return [_on_our_clock(pod.trainer_finished_at, world.now)]
    return [world.memory.sound_at]


def _on_our_clock(finished_at: datetime, now: Now) -> float:
    """Convert the kubelet's stamp of the trainer container's end to this process's monotonic clock.

    The clock of the node may be wrong. The caller limits the time to that at which the failure was seen, and
    ignores one before the newest sign of life.
    """
    return now.monotonic - (now.utc - finished_at).total_seconds()


def begun(recovery: RecoveryStatus, fault: float | None, world: World) -> RecoveryStatus:
    """Return the record of a round that begins now, with the phases before the round."""
    memory, now = world.memory, world.now
    seen = now.monotonic if memory.failure_seen_at is None else memory.failure_seen_at
    known = seen if memory.cause_known_at is None else memory.cause_known_at
    measured = fault is not None or known > seen
    return changed(recovery, begun_at=now.utc).with_phases(
        detect=_between(seen if fault is None else fault, known) if measured else None,
        back_off=_between(known, now.monotonic),
    )


def closed(recovery: RecoveryStatus, state: CoordinatorState, world: World) -> RecoveryStatus:
    """Return the complete record of a round in which every rank has finished a step or returned 0."""
    if state.restored_from is not None:  # a sidecar of an earlier version does not report it
        recovery = changed(recovery, sources={str(t): n for t, n in state.restored_from.items()})
    before = sum(recovery.phase_seconds.get(phase, 0.0) for phase in ("detect", "back_off"))
    known = _milestones(recovery, world.memory)
    if known is None:
        return _closed_by_another(recovery, state, world.now, before)
    sealed, scheduled, begin = known
    end = max(scheduled, started_training_at(state, world))
    left = end - scheduled
    rehydrate = min(left, state.rehydrate_seconds or 0.0)
    first_step = min(left - rehydrate, state.first_step_seconds or 0.0)
    whole = recovery.with_phases(
        seal=_between(begin, sealed),
        schedule=_between(sealed, scheduled),
        rehydrate=round(rehydrate, 3),
        rendezvous=round(max(0.0, left - rehydrate - first_step), 3),
        first_step=round(first_step, 3),
    )
    return changed(whole, total_seconds=round(sum(whole.phases().values()), 3))


def interrupted(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with the phases of the recovery of `memory.round`, which ends before it is complete.

    Its record gets the phases that are over, and no total. A complete record is not changed.
    """
    memory = world.memory
    record = next((r for r in status.recoveries if r.round == memory.round), None)
    if record is None or record.total_seconds is not None or memory.seen_at(Seen.CHOSEN) is None:
        return status
    times = _milestones(record, memory)
    if times is None:
        return status
    sealed, scheduled, begin = times
    known = record.with_phases(
        seal=_between(begin, sealed),
        schedule=None if memory.seen_at(Seen.SCHEDULED) is None else _between(sealed, scheduled),
    )
    recoveries = tuple(known if r is record else r for r in status.recoveries)
    return changed(status, recoveries=recoveries)


def describe(recovery: RecoveryStatus) -> str:
    """Return one line about a complete recovery, for the log and for an Event.

    Phases that took less than SHOWN_SECONDS are left out.
    """
    parts = _begin(recovery)
    if recovery.total_seconds is not None:
        parts.append(f"{recovery.total_seconds:.1f} s in total")
    parts.append(_restored(recovery))
    return ", ".join((*parts, *_lost_steps(recovery)))


def describe_interrupted(recovery: RecoveryStatus, cause: str) -> str:
    """Return one line about a recovery that `cause` ended before every rank had finished a step."""
    return ", ".join((*_begin(recovery), *_lost_steps(recovery), f"interrupted by {cause}"))


def _begin(recovery: RecoveryStatus) -> list[str]:
    """Return the round with what was lost, and the phases."""
    lost = _lost(recovery)
    parts = [f"round {recovery.round}: {recovery.reason}{f' ({lost})' if lost else ''}"]
    parts.extend(
        f"{seconds:.1f} s {phase.replace('_', ' ')}"
        for phase, seconds in recovery.phases().items()
        if seconds >= SHOWN_SECONDS
    )
    return parts


def _lost_steps(recovery: RecoveryStatus) -> list[str]:
    steps = recovery.lost_steps
    return [] if steps is None else [f"{steps} step{'' if steps == 1 else 's'} lost"]


def _lost(recovery: RecoveryStatus) -> str:
    workers = ", ".join(map(str, recovery.workers))
    named = [f"worker{'s' if len(recovery.workers) > 1 else ''} {workers}"] if workers else []
    return ", ".join((*named, *recovery.nodes))


def _restored(recovery: RecoveryStatus) -> str:
    if recovery.restored_step is None:
        return "started without a checkpoint"
    counts = recovery.sources or {}
    tiers = " and ".join(f"{tier} x{counts[tier]}" for tier in TierName if tier in counts)
    return f"restored step {recovery.restored_step}" + (f" from {tiers}" if tiers else "")


def _milestones(recovery: RecoveryStatus, memory: JobMemory) -> tuple[float, float, float] | None:
    """Return when the survivors were sealed, when the pods had started, and when the round began.

    None: another operator process began the round.
    """
    begin = None if recovery.round is None else memory.begun.get(recovery.round)
    if memory.round != recovery.round or begin is None:
        return None
    chosen = memory.seen_at(Seen.CHOSEN) or begin
    # A survivor that never answers is not sealed when the restore point is chosen without it.
    sealed = max(begin, memory.seen_at(Seen.SEALED) or chosen)
    scheduled = max(sealed, chosen, memory.seen_at(Seen.SCHEDULED) or sealed)
    return sealed, scheduled, begin


def _closed_by_another(
    recovery: RecoveryStatus, state: CoordinatorState, now: Now, before: float
) -> RecoveryStatus:
    """Return the complete record of a round that another operator process began.

    The times that the other process measured are lost. The total is computed from the UTC stamp of the
    round's begin, and is never less than the sum of the known phases.
    """
    rehydrate, rendezvous = state.rehydrate_seconds, state.rendezvous_seconds
    if rendezvous is not None:
        rendezvous = max(0.0, rendezvous - (rehydrate or 0.0))
    known = before + sum(t or 0.0 for t in (rehydrate, rendezvous, state.first_step_seconds))
    total = None
    if recovery.begun_at is not None:
        total = max(known, before + (now.utc - recovery.begun_at).total_seconds())
    phases = recovery.with_phases(
        rehydrate=rehydrate, rendezvous=rendezvous, first_step=state.first_step_seconds
    )
    return changed(phases, total_seconds=None if total is None else round(total, 3))


def started_training_at(state: CoordinatorState, world: World) -> float:
    """Return the monotonic time at which every rank had finished a step.

    It is now, unless the gang has finished training already. Then it is the time at which the restore point
    was seen and the pods had started, plus the durations that the coordinator measured since.
    """
    memory, now = world.memory, world.now
    chosen = memory.seen_at(Seen.CHOSEN)
    if not state.finished or chosen is None:
        return now.monotonic
    since = max(chosen, memory.seen_at(Seen.SCHEDULED) or chosen)
    took = (state.rendezvous_seconds or 0.0) + (state.first_step_seconds or 0.0)
    return min(now.monotonic, since + took)


def _between(start: float, end: float) -> float:
    return round(max(0.0, end - start), 3)
