"""Report what spec.failurePolicy led to, parts of it without effect, and missing checkpoints. Pure."""

from __future__ import annotations

from holdfast_core.api import FailureRule, JobCondition, TrainingJobStatus, changed
from holdfast_operator.decide.facts import apart
from holdfast_operator.decide.facts.apart import with_released
from holdfast_operator.decide.facts.node_failures import (
    failed_nodes,
    no_node_is_left,
    with_failures_of_window,
)
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.job import JobMemory, Now
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.wording import first_cause, first_of

NAMED_CHECKPOINTS = 8


def with_policy(
    status: TrainingJobStatus, world: World, memory: JobMemory, now: Now
) -> TrainingJobStatus:
    """Return the status with the conditions about failurePolicy and missing checkpoints up to date."""
    status = _with_avoided_nodes(status, world, memory, now)
    status = with_missing(with_quarantine(status, world, now), world, now)
    return _with_rules(status, world, now)


def _with_avoided_nodes(
    status: TrainingJobStatus, world: World, memory: JobMemory, now: Now
) -> TrainingJobStatus:
    """Return the status with the failures of the window, and with condition NodesAvoided.

    A job that never avoided a node does not get the condition.
    """
    kind, job = JobCondition.NODES_AVOIDED, world.observed.job
    status = with_failures_of_window(status, world, now)
    nodes = failed_nodes(world, status)
    if nodes and no_node_is_left(memory, now):
        text = (
            f"no node took a pod that avoids {first_of(nodes)}: these nodes are used again, and their "
            "failures are forgotten"
        )
        status = changed(status, node_failures=())
        note = (False, Reason.NO_NODE_LEFT, text)
    elif nodes and world.nodes_are_fixed:
        why = "the template sets spec.nodeName"
        if job.spec.template is None:
            why = "another controller creates the pods"
        text = f"{why}, so pods cannot avoid {first_of(nodes)}"
        note = (False, Reason.NO_NODE_LEFT, text)
    elif nodes:
        text = f"workers failed on {first_of(nodes)}: new pods are created on other nodes"
        note = (True, Reason.NODES_FAILED, text)
    elif status.is_true(kind):
        note = (False, Reason.NODES_USED, "the failures on nodes are older than avoidNodes.window")
    else:
        return status
    value, reason, text = note
    return status.with_condition(kind, value, reason, text, now.utc, job.generation)


def with_quarantine(status: TrainingJobStatus, world: World, now: Now) -> TrainingJobStatus:
    """Return the status without released checkpoints, and with condition Quarantined.

    A job that never quarantined a checkpoint does not get the condition.
    """
    status = with_released(status, world)
    kind = JobCondition.QUARANTINED
    reason, text = Reason.RELEASED, "no checkpoint is quarantined"
    if status.quarantined:
        newest = status.quarantined[-NAMED_CHECKPOINTS:]
        named = ", ".join(f"step {q.step} of round {q.round}" for q in newest)
        reason = Reason.QUARANTINED
        text = (
            f"{named}: ranks that restored it failed before they had finished a step. It is kept and not "
            "restored. failurePolicy.releasedSteps releases it"
        )
    elif status.condition(kind) is None:
        return status
    found = bool(status.quarantined)
    return status.with_condition(kind, found, reason, text, now.utc, world.observed.job.generation)


def describe_wait(world: World) -> str | None:
    """Return why the gang waits for its restore point, if no place has a good copy of it."""
    point, state = world.status.restore_point, world.coordinator
    if state is None or point is None or not apart.restore_point_is_missing(world):
        return None
    return (
        f"no place has a good copy of step {point.step} of round {point.round}, from which the gang is to "
        f"continue: {first_cause(state.cannot_restore)}. The gang waits, and continues by itself when the "
        "checkpoint is there again: restore the objects, or correct bucket and prefix of the store. Nothing "
        "else is deleted meanwhile"
    )


def with_missing(status: TrainingJobStatus, world: World, now: Now) -> TrainingJobStatus:
    """Return the status with condition CheckpointMissing, which a job gets when it first misses one.

    status.missing ends when the gang trains, because it descends from another checkpoint then. After the end
    of the job it ends when every worker has its shards of the restore point again.
    """
    kind, generation = JobCondition.CHECKPOINT_MISSING, world.observed.job.generation
    present = status.restart_round == world.status.restart_round
    found = status.is_true(JobCondition.RUNNING) or (
        status.completion_time is not None and apart.restore_point_is_there(world)
    )
    if present and status.missing and found:
        status = changed(status, missing=())
    text = describe_wait(world) if present else None
    if text is None and status.missing:
        names = ", ".join(f"step {m.step} of round {m.round}" for m in status.missing)
        text = f"no place has a good copy of {names}"
    text = text or apart.newest_is_missing(world)
    if text is not None:
        reason = Reason.CHECKPOINT_MISSING
        return status.with_condition(kind, True, reason, text[:1024], now.utc, generation)
    state = world.coordinator
    known = state is not None and (
        found if world.observed.job.spec.store is None else state.newest_is_stored
    )
    if not status.is_true(kind) or not known:
        return status
    text = "the checkpoints that the status names are there"
    reason = Reason.CHECKPOINTS_FOUND
    return status.with_condition(kind, False, reason, text, now.utc, generation)


def _with_rules(status: TrainingJobStatus, world: World, now: Now) -> TrainingJobStatus:
    """Return the status with condition FailureRulesApply, which a job without such a rule does not get.

    The job continues as if the rule were missing.
    """
    job = world.observed.job
    idle = never_applies(job.spec.failure_policy.rules)
    kind = JobCondition.FAILURE_RULES_APPLY
    if not idle and status.condition(kind) is None:
        return status
    reason, text = Reason.RULES_APPLY, "each rule of failurePolicy.rules can match"
    if idle:
        names = ", ".join(f"failurePolicy.rules[{i}]" for i in idle)
        reason = Reason.RULE_NEVER_MATCHES
        text = (
            f"{names} can never match, because the rules before match all of its values: remove it, or "
            "move it before them. The job goes on as if the rule were missing"
        )
    return status.with_condition(kind, not idle, reason, text, now.utc, job.generation)


def never_applies(rules: tuple[FailureRule, ...]) -> tuple[int, ...]:
    """Return the indexes of the rules that cannot apply, because rules before them match all their values."""
    before: set[object] = set()
    found = []
    for index, rule in enumerate(rules):
        values = _values(rule)
        if values <= before:
            found.append(index)
        before |= values
    return tuple(found)


def _values(rule: FailureRule) -> set[object]:
    """Return what the rule matches. Values of different kinds are never equal."""
    conditions = {(c.type, c.status) for c in rule.on_pod_conditions}
    return {*rule.on_exit_codes, *rule.on_reasons, *conditions}
