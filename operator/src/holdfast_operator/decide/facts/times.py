"""Update the memory that an operator process keeps between passes (JobMemory). Pure.

Only waits and measured durations depend on it. They start again after a restart of the operator.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast_operator.decide.facts.apart import restore_point_is_missing
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.job import JobMemory, Now, PodPhase

LONGEST_PAUSE_SECONDS = 5.0


def advance(world: World, now: Now) -> JobMemory:
    """Return the memory for this pass.

    States that are seen for the first time get the time of this pass. What belongs to an older round is
    dropped.
    """
    old = world.observed.memory
    status = world.status
    at = now.monotonic
    memory = old
    if old.round != status.restart_round or old.round_seen_at is None:
        memory = JobMemory(
            round=status.restart_round,
            round_seen_at=at,
            begun_at=old.begins_at if old.begins == status.restart_round else None,
            levels_written_at=old.levels_written_at,
            counted_at=old.counted_at,
            save_requests=old.save_requests,
            answering_since=old.answering_since,
            unscheduled_since=old.unscheduled_since,
            bound_since=old.bound_since,
            checkpoints_deleting=old.checkpoints_deleting,
        )
    began = None if status.restart_round is None else at
    members = world.members
    waiting = bool(world.unscheduled)
    succeeded = {m.pod is not None and m.pod.phase is PodPhase.SUCCEEDED for m in members}
    avoiding = any(m.pod is not None and m.pod.unscheduled and m.pod.failed_nodes for m in members)
    memory = replace(
        memory,
        counted_at=began if memory.counted_at is None else memory.counted_at,
        answering_since=_since(memory.answering_since, any(m.reachable for m in members), at),
        leaving_since=_leaving(world, memory, at),
        bound_since=_bound(world, memory, at),
        announced=_announced(world, memory),
        ending_since=_since(memory.ending_since, len(succeeded) == 2, at),
        avoiding_since=_since(memory.avoiding_since, avoiding, at),
        missing_since=_since(memory.missing_since, restore_point_is_missing(world), at),
        unscheduled_since=_since(memory.unscheduled_since, waiting, at),
        lacking_since=_since(memory.lacking_since, waiting and not world.nodes_become_free, at),
        room_since=_since(memory.room_since, bool(world.placeholders_with_nodes), at),
        unstarted=world.unstarted,
        checkpoints_deleting=_deleting(world, memory, at),
    )
    if status.restart_round is None:
        return memory
    round_ = status.restart_round
    # A member without a pod has nothing to seal: another controller creates its pod when it likes.
    if memory.sealed_at is None and all(m.pod is None or m.sealed_for(round_) for m in members):
        memory = replace(memory, sealed_at=at)
    if memory.scheduled_at is None and all(
        m.pod is not None and (m.pod.sidecar_started or m.reachable) for m in members
    ):
        memory = replace(memory, scheduled_at=at)
    trained = _trained(world)
    if trained is not None and trained != memory.trained:
        memory = replace(memory, trained=trained, progress_at=at)
    memory = _with_copies(memory, world, now)
    if memory.chosen_seen_at is None and status.restore_point is not None:
        memory = replace(memory, chosen_seen_at=at)
    return memory


def _leaving(world: World, memory: JobMemory, at: float) -> tuple[tuple[str, float], ...]:
    known = dict(memory.leaving_since)
    return tuple((pod.uid, known.get(pod.uid, at)) for pod in world.observed.pods if pod.leaving)


def _bound(world: World, memory: JobMemory, at: float) -> tuple[tuple[str, float], ...]:
    known = dict(memory.bound_since)
    pods = world.observed.pods
    waiting = (p for p in pods if p.node is not None and p.alive and not p.started)
    return tuple((pod.uid, known.get(pod.uid, at)) for pod in waiting)


def _announced(world: World, memory: JobMemory) -> tuple[tuple[str, str], ...]:
    announced = dict(memory.announced)
    announced.update((pod.name, pod.disruption) for pod in world.observed.pods if pod.disrupted)
    return tuple(announced.items())


def _deleting(world: World, memory: JobMemory, at: float) -> tuple[tuple[str, float], ...]:
    known = dict(memory.checkpoints_deleting)
    return tuple(
        (c.uid, known.get(c.uid, at))
        for c in world.observed.checkpoints
        if c.deleting and c.has_finalizer
    )


def _since(begun: float | None, holds: bool, at: float) -> float | None:
    """Return when a state began that holds now, or None if it does not hold."""
    if not holds:
        return None
    return at if begun is None else begun


def _with_copies(memory: JobMemory, world: World, now: Now) -> JobMemory:
    """Measure how long a step takes from its local commit until all of its copies are durable."""
    state = world.coordinator
    copies = world.copies
    newest = None if state is None or state.last_local is None else state.last_local.step
    if state is None or newest is None or copies <= 0:
        return memory
    copied = None if state.last_replicated is None else state.last_replicated.step
    if memory.copying is not None and copied is not None and copied >= memory.copying[0]:
        took = now.monotonic - memory.copying[1]
        longest = max(memory.flush_seconds, took)
        memory = replace(memory, copying=None, flush_seconds=longest)
    if memory.copying is None and (copied is None or newest > copied):
        memory = replace(memory, copying=(newest, now.monotonic))
    return memory


def _trained(world: World) -> int | None:
    state = world.coordinator
    return None if state is None or state.progress is None else state.progress.total_steps


def with_failure(memory: JobMemory, failing: bool, now: Now) -> JobMemory:
    """Set the time at which a failure was first seen, or clear it if there is no failure any more."""
    if not failing:
        return replace(
            memory,
            failure_seen_at=None,
            failure_seen_utc=None,
            cause_known_at=None,
            sound_at=now.monotonic,
        )
    if memory.failure_seen_at is None:
        return replace(memory, failure_seen_at=now.monotonic, failure_seen_utc=now.utc)
    return memory


def with_cause(memory: JobMemory, now: Now) -> JobMemory:
    """Set the time at which it was first known what is lost, that is, no further evidence is waited for."""
    if memory.cause_known_at is not None:
        return memory
    return replace(memory, cause_known_at=now.monotonic)


def again_after(since: float | None, shortest: float, now: Now) -> float:
    """Return the seconds until the next pass of a wait that began at `since`.

    The result is a tenth of the wait's age, between `shortest` and LONGEST_PAUSE_SECONDS. Events cause
    earlier passes.
    """
    return min(max(seconds_since(since, now) / 10, shortest), LONGEST_PAUSE_SECONDS)


def seconds_since(start: float | None, now: Now) -> float:
    """Return the seconds since `start`, or 0 if `start` is None."""
    return 0.0 if start is None else now.monotonic - start
