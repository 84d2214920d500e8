"""Passes over a gang that failed: a new round, the end of the job, or a wait. Pure."""

from __future__ import annotations

from dataclasses import replace

from holdfast_core.api import JobCondition
from holdfast_operator.decide import checkpoints, lifecycle, new_rounds
from holdfast_operator.decide.facts import resize, restarts, times
from holdfast_operator.decide.facts.failure import Failure, is_disruption
from holdfast_operator.decide.facts.rules import Ruling, rule_on
from holdfast_operator.decide.facts.world import World
from holdfast_operator.decide.report import recovery
from holdfast_operator.decide.report.silence import silent_peer
from holdfast_operator.decide.report.status import Note
from holdfast_operator.decide.writes import (
    STARTING_SECONDS,
    WAITING_SECONDS,
    begin_round,
    committed,
    fail_job,
    with_status_write,
)
from holdfast_operator.model.actions import Decision, EmitEvent, EventKind
from holdfast_operator.model.job import JobMemory, Now
from holdfast_operator.model.reasons import Reason

ANSWER_SECONDS = 0.1
"""Shortest pause between passes while sidecars are called. A healthy sidecar answers within this time."""
PEERS_ANSWER_SECONDS = 3.0
"""Wait for the answers of sidecars before the status reports it."""


def plan(world: World, memory: JobMemory, now: Now, failures: tuple[Failure, ...]) -> Decision:
    """Return the decision of a pass that found these failures, of which there is at least one."""
    if not world.may_create_pods and any(f.replace_pod for f in failures):
        return _keep_pods(world, memory, now, failures[0])
    commit = checkpoints.committable(world)
    if commit is not None:  # the coordinator of the next round has no record of it
        return committed(world, memory, now, commit, [], None)
    if not is_disruption(failures):
        peer = silent_peer(world, memory, now)
        if peer is not None:
            return _await_peers(world, memory, now, failures[0], peer)
    taken_in = restarts.can_be_taken_in(world, failures)
    left = 0.0 if taken_in else restarts.gather_seconds(world, failures, memory, now)
    if left > 0:
        text = f"{failures[0].message}; further pods may be lost with it"
        return Decision.of((), left, text, memory)
    memory = times.with_cause(memory, now)
    refused = resize.failed_first_start(world, failures)
    if refused is not None:
        return _go_back(world, memory, now, refused)
    ruling = rule_on(world, failures)
    end = lifecycle.failure_of_job(world, ruling, now)
    if end is not None:
        return fail_job(world, memory, now, end)
    if taken_in:
        return _take_in(world, memory, now, ruling)
    delay = restarts.restart_delay_seconds(world, failures, now)
    if times.seconds_since(memory.failure_seen_at, now) < delay:
        return _back_off(world, memory, now, failures[0], delay)
    return _restart(world, memory, now, ruling)


def _restart(world: World, memory: JobMemory, now: Now, ruling: Ruling) -> Decision:
    failures = ruling.failures
    status = new_rounds.next_round(world, ruling, now)
    fault = recovery.fault_at(world, failures, memory)
    if status.last_recovery is not None:
        begun = recovery.begun(status.last_recovery, fault, memory, now)
        status = recovery.interrupted(status, memory).with_recovery(begun)
    gone = tuple(f.confirm_gone for f in failures if f.confirm_gone is not None)
    text = f"round {status.restart_round} begins: {new_rounds.cause_of(ruling)}"
    event = EmitEvent(EventKind.WARNING, failures[0].reason, text)
    return begin_round(world, memory, now, status, gone, event)


def _go_back(world: World, memory: JobMemory, now: Now, cause: Failure) -> Decision:
    """Begin a round with the number of workers before the resize that failed."""
    status = recovery.interrupted(new_rounds.round_of_way_back(world, cause, now), memory)
    found = status.condition(JobCondition.RESIZING)
    text = (
        f"round {status.restart_round} begins: {cause.message if found is None else found.message}"
    )
    event = EmitEvent(EventKind.WARNING, Reason.RESIZE_FAILED, text)
    return begin_round(world, memory, now, status, (), event)


def _take_in(world: World, memory: JobMemory, now: Now, ruling: Ruling) -> Decision:
    """Replace further lost pods in the present round, which has no restore point yet (ADR 0008)."""
    status = new_rounds.with_taken_in(world, ruling, now)
    gone = tuple(f.confirm_gone for f in ruling.failures if f.confirm_gone is not None)
    text = f"round {world.round} also replaces what was lost since: {new_rounds.cause_of(ruling)}"
    event = EmitEvent(EventKind.WARNING, ruling.failures[0].reason, text)
    memory = replace(memory, taken_in_at=now.monotonic, scheduled_at=None)
    return begin_round(world, memory, now, status, gone, event)


def _back_off(
    world: World, memory: JobMemory, now: Now, cause: Failure, delay_seconds: float
) -> Decision:
    text = f"{cause.message}; the next round begins after {delay_seconds:.0f} s"
    note = Note(Reason.BACKING_OFF, text)
    left = delay_seconds - times.seconds_since(memory.failure_seen_at, now)
    return with_status_write(world, memory, now, [], note, max(left, STARTING_SECONDS))


def _await_peers(
    world: World, memory: JobMemory, now: Now, cause: Failure, silent: str
) -> Decision:
    """Wait until every sidecar has answered after ranks failed.

    Most answer within milliseconds, so the status reports the wait only after
    PEERS_ANSWER_SECONDS.
    """
    pause = times.again_after(memory.failure_seen_at, ANSWER_SECONDS, now)
    if times.seconds_since(memory.failure_seen_at, now) < PEERS_ANSWER_SECONDS:
        text = f"{cause.message}; every sidecar is called to find out which of them answer"
        return Decision.of((), pause, text, memory)
    note = Note(Reason.BACKING_OFF, f"{cause.message}; {silent}")
    return with_status_write(world, memory, now, [], note, pause)


def _keep_pods(world: World, memory: JobMemory, now: Now, cause: Failure) -> Decision:
    """Keep the remaining pods of a gang without a store that lost pods while spec.suspend is true.

    They may hold the newest step, and no pod is created while spec.suspend is true.
    """
    note = Note(cause.reason, f"{cause.message}; no pod is created while spec.suspend is true")
    planned = checkpoints.plan(world, memory, now)
    actions, commit = list(planned.actions), checkpoints.committable(world)
    if commit is not None:
        return committed(world, planned.memory, now, commit, actions, note)
    return with_status_write(world, planned.memory, now, actions, note, WAITING_SECONDS)
