"""Update the memory that an operator process keeps between passes (JobMemory). Pure.

Only waits and measured durations depend on it. They start again after a restart of the operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from holdfast_operator.decide.facts.apart import restore_point_is_missing
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.job import JobMemory, Now, PodPhase, Seen

LONGEST_PAUSE_SECONDS = 5.0
_OF_JOB = frozenset({Seen.ANSWERING, Seen.UNSCHEDULED, Seen.BOUND, Seen.DELETING})
"""States that may outlast a round. The others are seen anew in each round."""
_OF_ROUND = frozenset({Seen.SEALED, Seen.SCHEDULED, Seen.CHOSEN})
"""States that are known until the round ends, even if they do not hold any more."""


def advance(world: World, now: Now) -> JobMemory:
    """Return the memory for this pass.

    States that are seen for the first time get the time of this pass. What belongs to an older round is
    dropped.
    """
    memory = old = world.observed.memory
    round_, at = world.status.restart_round, now.monotonic
    if old.round != round_ or old.round_seen_at is None:
        memory = JobMemory(
            round=round_,
            round_seen_at=at,
            seen={k: t for k, t in old.seen.items() if k[0] in _OF_JOB},
            begun={r: t for r, t in old.begun.items() if r == round_},
            levels_written_at=old.levels_written_at,
            counted_at=old.counted_at,
            save_requests=old.save_requests,
        )
    kept = {k: t for k, t in memory.seen.items() if k[0] in _OF_ROUND}
    memory = replace(
        memory,
        seen=kept | {k: memory.seen.get(k, at) for k in _holding(world, memory)},
        announced=_announced(world, memory),
        unstarted=world.unstarted,
    )
    if round_ is None:
        return memory
    if memory.counted_at is None:
        memory = replace(memory, counted_at=at)
    trained = _trained(world)
    if trained is not None and (memory.progress is None or trained != memory.progress[0]):
        memory = replace(memory, progress=(trained, at))
    return _with_copies(memory, world, now)


def _holding(world: World, memory: JobMemory) -> Iterator[tuple[Seen, str]]:
    """Yield the states that hold now, each with the uid of its object or ""."""
    members, observed, round_ = world.members, world.observed, world.status.restart_round
    pods = [m.pod for m in members if m.pod is not None]
    succeeded = sum(p.phase is PodPhase.SUCCEEDED for p in pods)
    waiting = bool(world.unscheduled)
    states = {
        Seen.ANSWERING: any(m.reachable for m in members),
        Seen.UNSCHEDULED: waiting,
        Seen.LACKING: waiting and not world.nodes_become_free,
        Seen.AVOIDING: any(p.unscheduled and p.failed_nodes for p in pods),
        Seen.ROOM: bool(world.placeholders_with_nodes),
        Seen.ENDING: 0 < succeeded < len(members),
        Seen.MISSING: restore_point_is_missing(world),
        # A member without a pod has nothing to seal: another controller creates its pod when it likes.
        Seen.SEALED: round_ is not None
        and memory.seen_at(Seen.SEALED) is None
        and all(m.pod is None or m.sealed_for(round_) for m in members),
        Seen.SCHEDULED: round_ is not None
        and memory.seen_at(Seen.SCHEDULED) is None
        and all(m.pod is not None and (m.pod.sidecar_started or m.reachable) for m in members),
        Seen.CHOSEN: round_ is not None and world.status.restore_point is not None,
    }
    yield from ((state, "") for state, holds in states.items() if holds)
    for pod in observed.pods:
        if pod.leaving:
            yield Seen.LEAVING, pod.uid
        if pod.node is not None and pod.alive and not pod.started:
            yield Seen.BOUND, pod.uid
    yield from (
        (Seen.DELETING, c.uid) for c in observed.checkpoints if c.deleting and c.has_finalizer
    )


def _announced(world: World, memory: JobMemory) -> tuple[tuple[str, str], ...]:
    announced = dict(memory.announced)
    announced.update((pod.name, pod.disruption) for pod in world.observed.pods if pod.disrupted)
    return tuple(announced.items())


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
            cause_known_at=None,
            sound_at=now.monotonic,
        )
    if memory.failure_seen_at is None:
        return replace(memory, failure_seen_at=now.monotonic)
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
