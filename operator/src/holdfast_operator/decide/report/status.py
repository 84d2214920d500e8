"""How conditions, levels, goodput and the phase follow from what was observed. Pure.

`refresh` is applied to every status that is written, whatever the reason of the write: so one write
a pass carries everything. Levels alone are written at most every LEVELS_EVERY_SECONDS.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from holdfast_core.api import CheckpointStore, JobCondition, JobPhase
from holdfast_core.ids import Step, TierName
from holdfast_core.messages.schema import Failure, RestorePoint
from holdfast_operator.decide.facts.world import World
from holdfast_operator.decide.report import recovery
from holdfast_operator.model.job import (
    Condition,
    GoodputView,
    JobMemory,
    JobStatusView,
    Now,
)
from holdfast_operator.model.reasons import Reason

LEVELS_EVERY_SECONDS = 10.0
"""etcd must not see a write for every step of every job."""
MAX_MESSAGE_CHARACTERS = 1024


@dataclass(frozen=True, slots=True)
class Note:
    """Why the round does not run yet: reason and message of Running=False."""

    reason: str
    message: str


def set_condition(
    status: JobStatusView,
    kind: JobCondition,
    value: bool | None,
    note: Note,
    now: Now,
    generation: int,
) -> JobStatusView:
    """The status with that condition; the transition stamp moves only when the value does."""
    old = status.condition(kind)
    moved = old is None or old.status is not value
    new = Condition(
        type=kind,
        status=value,
        reason=note.reason,
        message=note.message[:MAX_MESSAGE_CHARACTERS],
        last_transition=now.utc if moved or old is None else old.last_transition,
        observed_generation=generation,
    )
    if old is None:
        return replace(status, conditions=(*status.conditions, new))
    return replace(
        status, conditions=tuple(new if c.type == kind else c for c in status.conditions)
    )


def compute_phase(status: JobStatusView) -> str:
    """For people only."""
    if status.is_true(JobCondition.FAILED):
        return JobPhase.FAILED
    if status.is_true(JobCondition.COMPLETE):
        return JobPhase.SUCCEEDED
    if status.is_true(JobCondition.SUSPENDED):
        return JobPhase.SUSPENDED
    if status.is_true(JobCondition.RESTARTING):
        return JobPhase.RESTARTING
    if status.is_true(JobCondition.RUNNING):
        return JobPhase.RUNNING
    return JobPhase.PENDING if status.restart_round is None else JobPhase.STARTING


def refresh(
    world: World, now: Now, memory: JobMemory, status: JobStatusView, note: Note | None = None
) -> JobStatusView:
    """`status` with everything brought up to date that follows from the observation."""
    job = world.observed.job
    status = with_levels(status, world)
    status = _with_goodput(status, world, memory, now)
    status = _with_recovery_closed(status, world, memory, now)
    status = _with_running(status, world, memory, now, note)
    status = _with_tier_conditions(status, world, now)
    ready = sum(1 for m in world.members if m.pod is not None and m.pod.ready and m.alive)
    return replace(
        status,
        workers_ready=ready if status.restart_round is not None else 0,
        workers_total=job.spec.workers,
        phase=compute_phase(status),
        observed_generation=job.generation,
    )


def with_levels(status: JobStatusView, world: World) -> JobStatusView:
    """Step and levels as the coordinator of this very round tells them; they never go down here."""
    state = world.coordinator
    if state is None or status.restart_round != state.round or status.restore_point is None:
        return status
    trained = [p.step for p in state.progress]
    step = min(trained) if trained else None
    return replace(
        status,
        step=_higher(status.step, step),
        last_committed_step=_higher(status.last_committed_step, _step(state.last_local)),
        last_replicated_step=_higher(status.last_replicated_step, _step(state.last_replicated)),
        # No promises: as the coordinator tells them, also when they go down.
        last_memory_step=status.last_memory_step
        if state.last_memory is None
        else state.last_memory.step,
        steps_dropped=state.steps_dropped,
    )


def _step(point: RestorePoint | None) -> Step | None:
    return None if point is None else point.step


def _higher(old: Step | None, new: Step | None) -> Step | None:
    if old is None or new is None:
        return new if old is None else old
    return max(old, new)


def _with_running(
    status: JobStatusView, world: World, memory: JobMemory, now: Now, note: Note | None
) -> JobStatusView:
    generation = world.observed.job.generation
    if (
        status.restart_round is None
        or status.is_true(JobCondition.SUSPENDED)
        or status.is_true(JobCondition.COMPLETE)
        or status.is_true(JobCondition.FAILED)
    ):
        return status
    state = world.coordinator
    begun = status.restart_round == world.status.restart_round
    if begun and state is not None and state.running and status.restore_point is not None:
        words = f"round {status.restart_round}: every rank has finished a step"
        status = set_condition(
            status, JobCondition.RUNNING, True, Note(Reason.TRAINING, words), now, generation
        )
        if status.condition(JobCondition.RESTARTING) is not None:
            done = Note(Reason.RECOVERED, f"round {status.restart_round} runs")
            status = set_condition(status, JobCondition.RESTARTING, False, done, now, generation)
        return status
    if status.is_true(JobCondition.RUNNING) and note is None:
        # The coordinator is silent for the moment: that alone does not stop training.
        return status
    why = note or Note(Reason.STARTING, f"round {status.restart_round} starts")
    return set_condition(status, JobCondition.RUNNING, False, why, now, generation)


def _with_recovery_closed(
    status: JobStatusView, world: World, memory: JobMemory, now: Now
) -> JobStatusView:
    """Record what the recovery took, once every rank has finished a step, or has returned 0.

    Round 0 recovers from nothing.
    """
    begun = status.last_recovery
    state = world.coordinator
    if begun is None or begun.round != status.restart_round or begun.total_seconds is not None:
        return status
    if state is None or state.round != begun.round or status.restore_point is None:
        return status
    if not (state.running or state.finished):
        return status
    return replace(status, last_recovery=recovery.closed(begun, state, memory, now))


def _with_goodput(
    status: JobStatusView, world: World, memory: JobMemory, now: Now
) -> JobStatusView:
    """Time since the last count goes to training while Running holds, else to recovery.

    The write that ends the job counts, too: a job of a few seconds may have no other.
    """
    if status.restart_round is None or world.status.completion_time is not None:
        return status
    old = status.goodput or GoodputView()
    elapsed = 0.0 if memory.counted_at is None else max(0.0, now.monotonic - memory.counted_at)
    trained = min(elapsed, _training_seconds(world, memory, now))
    blocked = blocked_seconds(world)
    new = replace(
        old,
        training_seconds=old.training_seconds + trained,
        recovery_seconds=old.recovery_seconds + elapsed - trained,
        checkpoint_seconds=old.checkpoint_seconds
        + (0.0 if blocked is None else max(0.0, blocked - memory.blocked_counted_seconds)),
    )
    return replace(status, goodput=with_ratio(new))


def _training_seconds(world: World, memory: JobMemory, now: Now) -> float:
    """For how long the gang has trained in this round, at the least."""
    if world.status.is_true(JobCondition.RUNNING):
        return math.inf
    state = world.coordinator
    if state is None or world.status.restore_point is None:
        return 0.0
    return now.monotonic - recovery.started_training_at(state, memory, now)


def with_ratio(goodput: GoodputView) -> GoodputView:
    """Share of all time that went into training that was kept and not blocked by saves."""
    total = goodput.training_seconds + goodput.recovery_seconds
    kept = goodput.training_seconds - goodput.checkpoint_seconds - goodput.lost_work_seconds
    return replace(goodput, ratio=1.0 if total <= 0 else min(1.0, max(0.0, kept / total)))


def blocked_seconds(world: World) -> float | None:
    """Trainer time that saves have cost in this round: the gang waits for its slowest rank."""
    state = world.coordinator
    if state is None or not state.progress:
        return None
    return max(p.blocked_seconds for p in state.progress)


def _with_tier_conditions(status: JobStatusView, world: World, now: Now) -> JobStatusView:
    job = world.observed.job
    state = world.coordinator
    failures = () if state is None else state.failures
    local = next((f for f in failures if f.tier is not TierName.OBJECT), None)
    if local is not None:
        note = Note(local.reason, _located(world, local))
        status = set_condition(
            status, JobCondition.LAST_CHECKPOINT_SUCCEEDED, False, note, now, job.generation
        )
    elif state is not None and state.last_local is not None and state.last_local.step is not None:
        note = Note(Reason.COMMITTED, "the newest save is committed")
        status = set_condition(
            status, JobCondition.LAST_CHECKPOINT_SUCCEEDED, True, note, now, job.generation
        )
    if job.spec.store is None:
        return status
    store = world.observed.store
    remote = next((f for f in failures if f.tier is TierName.OBJECT), None)
    hidden = world.observed.cannot_read(CheckpointStore.KIND, job.spec.store)
    if hidden is not None:
        words = f"CheckpointStore {job.spec.store} cannot be read: {hidden.problem}"
        healthy, note = False, Note(Reason.CANNOT_READ, words)
    elif store is None:
        words = f"CheckpointStore {job.spec.store} is not there"
        healthy, note = False, Note(Reason.STORE_NOT_FOUND, words)
    elif store.available is False:
        healthy, note = False, Note(Reason.STORE_UNAVAILABLE, store.message)
    elif remote is not None:
        healthy, note = False, Note(remote.reason, _located(world, remote))
    elif store.available is None:
        return status
    else:
        healthy, note = True, Note(Reason.STORE_HEALTHY, f"CheckpointStore {store.name} works")
    return set_condition(
        status, JobCondition.REMOTE_TIER_HEALTHY, healthy, note, now, job.generation
    )


def _located(world: World, failure: Failure) -> str:
    """The message of a failure with the worker and the node that it is of."""
    if failure.worker is None:
        return failure.message
    member = world.member(failure.worker)
    pod = None if member is None else member.pod
    node = "" if pod is None or pod.node is None else f" on node {pod.node}"
    return f"worker {failure.worker}{node}: {failure.message}"


def must_write(old: JobStatusView, new: JobStatusView, memory: JobMemory, now: Now) -> bool:
    """Changed truths at once; levels, goodput and mere words when the last write is old enough.

    Goodput alone is written only while Running holds: a job that waits for days would otherwise write
    the time that it waited every ten seconds. The next write of another truth carries it.
    """
    if _durable(old) != _durable(new):
        return True
    running = new.is_true(JobCondition.RUNNING)
    if old == (new if running else replace(new, goodput=old.goodput)):
        return False
    last = memory.levels_written_at
    return last is None or now.monotonic - last >= LEVELS_EVERY_SECONDS


def _durable(status: JobStatusView) -> JobStatusView:
    return replace(
        status,
        step=None,
        # The first commit is a truth of its own: from then on the job never starts from nothing.
        last_committed_step=None if status.last_committed_step is None else Step(0),
        last_replicated_step=None,
        last_memory_step=None,
        steps_dropped=None,
        goodput=None,
        conditions=tuple(replace(c, message="", observed_generation=0) for c in status.conditions),
    )


def after_write(memory: JobMemory, world: World, now: Now) -> JobMemory:
    """Memory once a status write was asked for: goodput up to now is in it."""
    blocked = blocked_seconds(world)
    return replace(
        memory,
        levels_written_at=now.monotonic,
        counted_at=now.monotonic,
        blocked_counted_seconds=memory.blocked_counted_seconds if blocked is None else blocked,
    )
