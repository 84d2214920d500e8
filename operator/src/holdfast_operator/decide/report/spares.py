"""Condition SparesReady: how many spare pods are ready, and what the others wait for (ADR 0015). Pure."""

from __future__ import annotations

from holdfast_core.api import JobCondition, TrainingJobStatus
from holdfast_operator.decide.facts.failure import CANNOT_START
from holdfast_operator.decide.facts.world import MemberState, World, has_no_gang
from holdfast_operator.decide.spares import has_room, ready_spares
from holdfast_operator.model.job import Now
from holdfast_operator.model.reasons import Reason


def with_spares_ready(status: TrainingJobStatus, world: World, now: Now) -> TrainingJobStatus:
    """Return the status with condition SparesReady. A job that never had spares does not get it."""
    wanted = world.observed.job.spec.spares
    known = status.condition(JobCondition.SPARES_READY)
    if (wanted == 0 and known is None) or has_no_gang(status):
        return status
    ready = 0 if status.spares is None else status.spares.ready
    reason, text = Reason.SPARES_READY, f"{ready} of {wanted} spare pods are ready"
    if ready < wanted:
        reason, text = Reason.SPARES_WAIT, f"{text}: {_waits_for(status, world)}"
    generation = world.observed.job.generation
    return status.with_condition(
        JobCondition.SPARES_READY, ready >= wanted, reason, text[:1024], now.utc, generation
    )


def _waits_for(status: TrainingJobStatus, world: World) -> str:
    """Return what the first spare waits for that is not ready."""
    if world.wanted_spares == 0:
        return (
            "a job in a queue of Kueue has none, because its pod group has a fixed number of pods"
        )
    if not has_room(world):
        return "a worker has no node, so the spares are deleted to make room for it"
    if not status.is_true(JobCondition.RUNNING):
        return "spares are created while the gang trains"
    ready = {s.worker for s in ready_spares(world, status)}
    spare = next((s for s in world.spares if s.worker not in ready), None)
    if spare is None or spare.pod is None:
        return world.observed.memory.create_refused or "the next one is being created"
    return f"pod {spare.pod.name} {_state(spare)}"


def _state(spare: MemberState) -> str:
    pod = spare.pod
    assert pod is not None
    if pod.waiting_reason in CANNOT_START:
        return f"cannot start: {pod.waiting_reason}: {pod.waiting_message}"
    if pod.node is None:
        return f"is not scheduled: {pod.message}".rstrip(": ")
    if spare.node_lost:
        return f"is on node {pod.node}, which is lost"
    if not spare.reachable:
        return f"starts on node {pod.node}, or its sidecar does not answer"
    return f"on node {pod.node} has not imported torch yet, or its node is not to be used"
