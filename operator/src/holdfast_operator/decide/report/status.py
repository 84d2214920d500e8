"""Derive conditions, levels, goodput and the phase from the observation. Pure.

`refresh` is applied to every status that is written, whatever the reason for the write, so the one write of a
pass contains all changes. A change of levels alone is written at most every LEVELS_EVERY_SECONDS.
"""

from __future__ import annotations

import math

from holdfast_core.api import GoodputStatus, JobCondition, JobPhase, TrainingJobStatus, changed
from holdfast_core.ids import Step, TierName
from holdfast_core.messages.schema import Failure
from holdfast_operator.decide.facts.nodes import with_leaving_nodes
from holdfast_operator.decide.facts.queue import with_queue
from holdfast_operator.decide.facts.scheduling import with_scheduling
from holdfast_operator.decide.facts.sizes import wanted_workers
from holdfast_operator.decide.facts.spares import with_spares, with_spares_ready
from holdfast_operator.decide.facts.spec import store_problem, with_spec_applied
from holdfast_operator.decide.facts.world import Note, World, has_no_gang
from holdfast_operator.decide.report import conditions, recovery
from holdfast_operator.decide.report.adoption import with_adoption
from holdfast_operator.model.reasons import Reason

LEVELS_EVERY_SECONDS = 10.0
"""Shortest interval between writes of levels. Otherwise each step of each job would cause a write in etcd."""


_PHASES = {
    JobCondition.FAILED: JobPhase.FAILED,
    JobCondition.COMPLETE: JobPhase.SUCCEEDED,
    JobCondition.SUSPENDED: JobPhase.SUSPENDED,
    JobCondition.RESTARTING: JobPhase.RESTARTING,
    JobCondition.RUNNING: JobPhase.RUNNING,
}
"""The phase for the first of these conditions that is true."""


def compute_phase(status: TrainingJobStatus) -> JobPhase:
    """Return the phase, a summary of the conditions for users. No decision reads it."""
    begun = JobPhase.PENDING if status.restart_round is None else JobPhase.STARTING
    return next((phase for kind, phase in _PHASES.items() if status.is_true(kind)), begun)


def refresh(world: World, status: TrainingJobStatus, note: Note | None = None) -> TrainingJobStatus:
    """Return `status` with everything that follows from the observation brought up to date.

    `note` is the reason and message of Running=False. Without it a running job stays Running.
    """
    for measure in (with_levels, _with_goodput, _with_flush, _with_recovery_closed):
        status = measure(status, world)
    status = _with_running(status, world, note)
    for report in _CONDITIONS:
        status = report(status, world)
    total = len(status.members) or world.spec.workers
    missing = wanted_workers(world.job, status) < world.spec.workers
    return changed(
        status,
        ready_workers=f"{_ready(world, status, total)}/{world.spec.workers if missing else total}",
        phase=compute_phase(status),
        observed_generation=world.job.generation,
    )


def _ready(world: World, status: TrainingJobStatus, total: int) -> int:
    """Return the number of workers that train, or have finished with the job."""
    if status.is_true(JobCondition.COMPLETE):
        return total
    # Pods end after the last write of a job that has no gang any more, and would be shown as ready for good.
    if status.restart_round is None or has_no_gang(status):
        return 0
    return sum(1 for m in world.members if m.pod is not None and m.pod.ready and m.alive)


def refresh_kept(world: World, status: TrainingJobStatus) -> TrainingJobStatus:
    """Return the status of a failed job whose pods stay, with what its sidecars report of checkpoints."""
    status = _with_tier_conditions(with_levels(status, world), world)
    return conditions.with_missing(status, world)


def _with_flush(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return `status` with the longest flush, from which the grace period of new pods follows."""
    memory = world.memory
    if memory.flush_seconds <= 0:
        return status
    longest = max(math.ceil(memory.flush_seconds), status.flush_seconds or 0)
    return changed(status, flush_seconds=longest)


def with_levels(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return `status` with the step and the levels that the coordinator of its round reports.

    Committed levels and the step never go down here.
    """
    state = world.coordinator
    if state is None or status.restart_round != state.round or status.restore_point is None:
        return status
    step = None if state.progress is None else state.progress.first
    return changed(
        status,
        step=_higher(status.step, step),
        last_committed_step=_higher(status.last_committed_step, world.local_step),
        last_replicated_step=_higher(status.last_replicated_step, world.copied_step),
    )


def _higher(old: Step | None, new: Step | None) -> Step | None:
    return max((s for s in (old, new) if s is not None), default=None)


def _with_running(status: TrainingJobStatus, world: World, note: Note | None) -> TrainingJobStatus:
    if status.restart_round is None or has_no_gang(status):
        return status
    begun = status.restart_round == world.status.restart_round
    if begun and world.state.running and status.restore_point is not None:
        text = f"round {status.restart_round}: every rank has finished a step"
        status = world.with_condition(status, JobCondition.RUNNING, True, Reason.TRAINING, text)
        if status.condition(JobCondition.RESTARTING) is not None:
            done = Note(Reason.RECOVERED, f"round {status.restart_round} runs")
            status = world.with_condition(status, JobCondition.RESTARTING, False, *done)
        return status
    if status.is_true(JobCondition.RUNNING) and note is None:
        # A coordinator that does not answer does not mean that training has stopped.
        return status
    why = note or Note(Reason.STARTING, f"round {status.restart_round} starts")
    return world.with_condition(status, JobCondition.RUNNING, False, *why)


def _with_recovery_closed(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Complete the record of the recovery once every rank has finished a step or returned 0.

    The first round has no such record.
    """
    begun = status.last_recovery
    state = world.coordinator
    if begun is None or begun.round != status.restart_round or begun.total_seconds is not None:
        return status
    if state is None or state.round != begun.round or status.restore_point is None:
        return status
    if not (state.running or state.finished):
        return status
    return status.with_recovery(recovery.closed(begun, state, world))


def _with_goodput(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Add the time since the last count to training if the gang trained, else to recovery.

    The write that ends the job counts as well, because a job of a few seconds may have no other.
    """
    if status.restart_round is None or world.status.completion_time is not None:
        return status
    old = status.goodput or GoodputStatus(ratio=1.0)
    elapsed = max(0.0, world.seconds_since(world.memory.counted_at))
    trained = min(elapsed, _training_seconds(world))
    blocked = blocked_seconds(world)
    new = changed(
        old,
        training_seconds=old.training_seconds + trained,
        recovery_seconds=old.recovery_seconds + elapsed - trained,
        checkpoint_seconds=old.checkpoint_seconds
        + (0.0 if blocked is None else max(0.0, blocked - world.memory.blocked_counted_seconds)),
    )
    return changed(status, goodput=with_ratio(new))


def _training_seconds(world: World) -> float:
    """Return for how long the gang has trained in this round at least, infinite if Running is True."""
    if world.status.is_true(JobCondition.RUNNING):
        return math.inf
    state = world.coordinator
    if state is None or world.status.restore_point is None:
        return 0.0
    return world.now.monotonic - recovery.started_training_at(state, world)


def with_ratio(goodput: GoodputStatus) -> GoodputStatus:
    """Set the ratio, the share of all time that was training, without lost work and blocking saves."""
    total = goodput.training_seconds + goodput.recovery_seconds
    kept = goodput.training_seconds - goodput.checkpoint_seconds - goodput.lost_work_seconds
    return changed(goodput, ratio=1.0 if total <= 0 else min(1.0, max(0.0, kept / total)))


def blocked_seconds(world: World) -> float | None:
    """Return the seconds for which saves blocked training in this round, or None without progress.

    It is the maximum over the ranks, because the gang waits for its slowest rank.
    """
    progress = world.state.progress
    return None if progress is None else progress.blocked_seconds


def _with_tier_conditions(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    failures = world.state.failures
    local = next((f for f in failures if f.tier is not TierName.OBJECT), None)
    if local is not None:
        note = Note(local.reason, _located(world, local))
        status = world.with_condition(status, JobCondition.LAST_CHECKPOINT_SUCCEEDED, False, *note)
    elif world.local_step is not None:
        note = Note(Reason.COMMITTED, "the newest save is committed")
        status = world.with_condition(status, JobCondition.LAST_CHECKPOINT_SUCCEEDED, True, *note)
    if world.spec.store is None:
        return status
    problem, refused = store_problem(world), world.observed.memory.record_refused
    unprobed = problem is not None and problem.reason == Reason.STORE_NOT_PROBED
    remote = next((f for f in failures if f.tier is TierName.OBJECT), None)
    if problem is not None and not unprobed:
        healthy, note = False, problem
    elif refused:
        text = (
            f"{refused}. Until it is written, later uploads are not recorded, "
            "old checkpoints stay in the store, and the job does not end"
        )
        healthy, note = False, Note(Reason.CREATE_REFUSED, text)
    elif remote is not None:
        healthy, note = False, Note(remote.reason, _located(world, remote))
    elif unprobed:
        return status
    else:
        text = f"CheckpointStore {world.spec.store} passed its probe"
        healthy, note = True, Note(Reason.STORE_HEALTHY, text)
    return world.with_condition(status, JobCondition.REMOTE_TIER_HEALTHY, healthy, *note)


def _located(world: World, failure: Failure) -> str:
    """Return the message of a failure, preceded by its worker and node."""
    worker, text = failure.worker, failure.message
    return text if worker is None else f"{world.place(worker)}: {text}"


_CONDITIONS = (
    _with_tier_conditions,
    conditions.with_avoided_nodes,
    conditions.with_quarantine,
    conditions.with_missing,
    conditions.with_rules,
    conditions.with_passed_hangs,
    with_spec_applied,
    with_leaving_nodes,
    conditions.with_stragglers,
    with_scheduling,
    with_queue,
    with_adoption,
    with_spares,
    with_spares_ready,
)
"""What every status that is written reports of the observation, in this order, after condition Running."""


def must_write(world: World, new: TrainingJobStatus) -> bool:
    """Return whether the new status must be written now.

    Changes of levels, ready workers, goodput and messages wait until the last write is LEVELS_EVERY_SECONDS
    old, or `routine_seconds` if that is longer. A new operator process waits as long after it first sees the
    job: the writes of a thousand jobs would delay the passes that matter by half a minute. All other changes
    are written immediately. A change of goodput alone is written only while Running is True. Otherwise a job
    that waits for days would cause a write every ten seconds.
    """
    old, memory = world.status, world.memory
    if _durable(old) != _durable(new):
        return True
    running = new.is_true(JobCondition.RUNNING)
    if old == (new if running else changed(new, goodput=old.goodput)):
        return False
    last = memory.round_seen_at if memory.levels_written_at is None else memory.levels_written_at
    every = max(LEVELS_EVERY_SECONDS, world.observed.routine_seconds)
    return last is None or world.seconds_since(last) >= every


def _durable(status: TrainingJobStatus) -> tuple[object, ...]:
    """Return the parts of the status whose changes may not wait for LEVELS_EVERY_SECONDS."""
    conditions = tuple(
        (c.type, c.status, c.reason, c.last_transition_time) for c in status.conditions
    )
    rest = changed(
        status,
        ready_workers=(status.ready_workers or "").partition("/")[2],  # the ready ones may wait
        step=None,
        # The first commit must not wait: once it is recorded, the job never starts without a checkpoint.
        last_committed_step=None if status.last_committed_step is None else Step(0),
        last_replicated_step=None,
        flush_seconds=None,
        goodput=None,
        conditions=(),
    )
    return rest, conditions


def remember_write(world: World) -> None:
    """Remember that the status is written, with the goodput up to now."""
    at, blocked = world.now.monotonic, blocked_seconds(world)
    world.remember(levels_written_at=at, counted_at=at)
    if blocked is not None:
        world.remember(blocked_counted_seconds=blocked)
