"""Conditions about failurePolicy, missing checkpoints, silence, hangs, stragglers and readability. Pure.

Hangs (ADR 0014): an honest pause that the script does not announce ends as a hang at the same step in each
round. So each such restart doubles the limits, until the pause fits in or a user has announced it. It does
not double the limit of a gang whose ranks all wait for others: that is a deadlock, and it spends the budget
of restarts.

Stragglers: nothing restarts because of a straggler: the gang trains, only slower, and the cause may be the
data, the script or a neighbour on the node.

Readable: a job is left alone while one of its pods cannot be parsed. Such a pod is missing among the job's
pods, but it must not be treated as gone (ADR 0002).
"""

from __future__ import annotations

from holdfast_core.api import (
    MAX_STRAGGLERS,
    Checkpoint,
    CheckpointCondition,
    FailureRule,
    HangsStatus,
    JobCondition,
    TrainingJobStatus,
    changed,
    with_status,
)
from holdfast_core.clock import stamp
from holdfast_core.contract import CONTROL_PORT, SIDECAR_CONTAINER
from holdfast_core.ids import CheckpointId, Rank, Step, Worker
from holdfast_core.messages.schema import Straggler
from holdfast_core.names import first_of
from holdfast_core.store_retention import restored_instead
from holdfast_operator.decide.facts import readable, rollback
from holdfast_operator.decide.facts.evidence import ALL_LOST_SECONDS
from holdfast_operator.decide.facts.nodes import (
    failed_nodes,
    no_node_is_left,
    with_failures_of_window,
)
from holdfast_operator.decide.facts.world import (
    MemberState,
    Note,
    World,
    has_no_gang,
    make_room,
    quota_text,
    restore_point_is_missing,
)
from holdfast_operator.model.actions import (
    Action,
    Decision,
    EmitEvent,
    WriteStatus,
    normal,
    warning,
)
from holdfast_operator.model.job import PodPhase, Reachable, Unreadable
from holdfast_operator.model.reasons import Reason, first_cause

NAMED_CHECKPOINTS = 8


def with_avoided_nodes(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with the failures of the window, and with condition NodesAvoided.

    A job that never avoided a node does not get the condition.
    """
    kind, job = JobCondition.NODES_AVOIDED, world.job
    status = with_failures_of_window(status, world)
    nodes = failed_nodes(world, status)
    if nodes and no_node_is_left(world):
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
    return world.with_condition(status, kind, value, reason, text)


def with_quarantine(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status without released checkpoints, and with condition Quarantined.

    A job that never quarantined a checkpoint does not get the condition.
    """
    status = readable.with_damaged(readable.with_released(status, world), world)
    kind = JobCondition.QUARANTINED
    reason, text = Reason.RELEASED, "no checkpoint is quarantined"
    if status.quarantined:
        reason, text = _quarantine(status, world)
    elif status.condition(kind) is None:
        return status
    found = bool(status.quarantined)
    return world.with_condition(status, kind, found, reason, text)


def _quarantine(status: TrainingJobStatus, world: World) -> tuple[Reason, str]:
    """Return why checkpoints are quarantined."""
    bad = readable.damaged(world)
    causes = {
        "ranks that restored it failed before they had finished a step": [
            q for q in status.quarantined if q not in bad
        ],
        "a drill found damage in the object store": [q for q in status.quarantined if q in bad],
    }
    texts = []
    for cause, found in causes.items():
        if found:
            newest = found[-NAMED_CHECKPOINTS:]
            named = ", ".join(f"step {q.step} of round {q.round}" for q in newest)
            texts.append(f"{named}: {cause}")
    text = (
        f"{'; '.join(texts)}. It is kept and not restored. failurePolicy.releasedSteps releases it"
    )
    newest_bad = max((q for q in status.quarantined if q in bad), default=None)
    if newest_bad is None:
        return Reason.QUARANTINED, text
    job = with_status(world.job, status)
    instead = restored_instead(job, world.own_checkpoints, newest_bad)
    return Reason.QUARANTINED, f"{text}. In the object store, {describe_instead(instead)}"


def describe_instead(checkpoint: Checkpoint | None) -> str:
    """Say which checkpoint in the object store a job would restore."""
    if checkpoint is None:
        return "no other checkpoint is left to restore"
    return f"the job would restore step {checkpoint.spec.step} of round {checkpoint.status.round}"


def describe_wait(world: World) -> str | None:
    """Return why the gang waits for its restore point, if no place has a good copy of it."""
    point = world.status.restore_point
    if point is None or not restore_point_is_missing(world):
        return None
    cause = first_cause(world.state.cannot_restore)
    return (
        f"no place has a good copy of step {point.step} of round {point.round}, from which the gang is to "
        f"continue: {cause}. The gang waits, and continues by itself when the "
        "checkpoint is there again: restore the objects, or correct bucket and prefix of the store. Nothing "
        "else is deleted meanwhile"
    )


def with_missing(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with condition CheckpointMissing, which a job gets when it first misses one.

    status.missing ends when the gang trains, because it descends from another checkpoint then. After the end
    of the job it ends when every worker has its shards of the restore point again. When no sidecar is left,
    it ends when drills have found intact what was missing.
    """
    kind = JobCondition.CHECKPOINT_MISSING
    if status.completion_time is not None and world.coordinator is None:
        last = status.last_persisted
        named = {*status.missing, *(() if last is None else (last.id,))}
        if not status.is_true(kind) or named - _found_by_drills(world):
            return status
        found_text = "drills have found the checkpoints that the status names"
        status = changed(status, missing=())
        return world.with_condition(status, kind, False, Reason.CHECKPOINTS_FOUND, found_text)
    present = status.restart_round == world.status.restart_round
    restored = not world.state.cannot_restore and world.state.restored_from is not None
    found = status.is_true(JobCondition.RUNNING) or (
        status.completion_time is not None and restored
    )
    if present and status.missing and found:
        status = changed(status, missing=())
    text = describe_wait(world) if present else None
    if text is None and status.missing:
        names = ", ".join(f"step {m.step} of round {m.round}" for m in status.missing)
        text = f"no place has a good copy of {names}"
    text = text or readable.newest_is_missing(world)
    if text is not None:
        reason = Reason.CHECKPOINT_MISSING
        return world.with_condition(status, kind, True, reason, text)
    is_local = world.spec.store is None
    known = (world.coordinator is not None and found) if is_local else world.state.newest_is_stored
    if not status.is_true(kind) or not known:
        return status
    text = "the checkpoints that the status names are there"
    reason = Reason.CHECKPOINTS_FOUND
    return world.with_condition(status, kind, False, reason, text)


def _found_by_drills(world: World) -> set[CheckpointId]:
    """Return the checkpoints that could not be restored until a drill found them intact."""
    return {
        id_
        for c in world.own_checkpoints
        if (id_ := c.id) is not None
        if (known := c.status.condition(CheckpointCondition.RESTORABLE)) is not None
        if known.is_true and known.reason == Reason.INTACT
    }


def with_lost_checkpoints(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with condition CheckpointsLost, which a job gets when it first waits for a person.

    It is true until the gang has a restore point, whatever the pods wait for meanwhile.
    """
    kind, running = JobCondition.CHECKPOINTS_LOST, status.condition(JobCondition.RUNNING)
    if running is not None and running.reason == Reason.CHECKPOINTS_LOST:
        return world.with_condition(status, kind, True, running.reason, running.message)
    if not status.is_true(kind) or status.restore_point is None:
        return status
    found = Note(Reason.CHECKPOINTS_FOUND, "a checkpoint of the job was found")
    if running is not None and running.reason == Reason.STARTED_OVER:
        found = Note(running.reason, running.message)
    return world.with_condition(status, kind, False, *found)


def with_rollback(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with condition RolledBack, which a job gets with its first order to go back.

    An order that was withdrawn before a round carried it out leaves the condition False.
    """
    kind, order = JobCondition.ROLLED_BACK, world.spec.rollback
    step = None if order is None else order.step
    if order is None or step is None:
        if status.condition(kind) is None or status.is_true(kind):
            return status
        note = Note(Reason.ROLLBACK_WITHDRAWN, "spec.rollback names no step")
        return world.with_condition(status, kind, False, *note)
    later = [e for e in status.lineage if e.round > order.round]
    found = next((e for e in later if e.base is not None and e.base.step == step), None)
    if found is not None:
        text = f"round {found.round} started from step {step}, as spec.rollback says"
        return world.with_condition(status, kind, True, Reason.ROLLED_BACK, text)
    if order.stands(status.lineage):
        text = f"the next round starts from step {step}"
        note = rollback.obstacle(world, step) or Note(Reason.ROLLING_BACK, text)
        return world.with_condition(status, kind, False, *note)
    newest = status.lineage[-1].round if status.lineage else None
    text = (
        f"spec.rollback names round {order.round}, and the newest round of the lineage is {newest}, which "
        f"did not start from step {step}. To go back to it now: `kubectl holdfast restore "
        f"{world.job.name}@{step} -n {world.job.namespace}`"
    )
    return world.with_condition(status, kind, False, Reason.ROLLBACK_OUTDATED, text)


def with_held_uploads(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with condition UploadsHeld, which a job gets when a quota is first reached."""
    kind = JobCondition.UPLOADS_HELD
    uploads = not has_no_gang(status) or status.is_true(JobCondition.PODS_KEPT)
    if uploads and world.reached_quotas:
        text = (
            f"the next upload waits: {quota_text(world)}. Saves on nodes and at peers go on, and the upload "
            f"goes on by itself when there is room. {make_room(world)}"
        )
        return world.with_condition(status, kind, True, Reason.QUOTA_REACHED, text)
    if not status.is_true(kind):
        return status
    text = "no upload of the job waits for a quota of the store"
    return world.with_condition(status, kind, False, Reason.WITHIN_QUOTA, text)


def with_rules(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with condition FailureRulesApply, which a job without such a rule does not get.

    The job continues as if the rule were missing.
    """
    idle = never_applies(world.spec.failure_policy.rules)
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
    return world.with_condition(status, kind, not idle, reason, text)


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


# --------------------------------------------------------------------------- SidecarsUnreachable


REPORTED_AFTER_SECONDS = 30.0
"""Time without an answer after which the condition reports a sidecar. The restart of a sidecar container
takes less time, and is not reported."""
LEASE_MARGIN_SECONDS = 5.0
"""Margin on suspectAfterSeconds, because the operator notices a stopped lease a little later than that."""


def silent_peer(world: World) -> str | None:
    """Return why failed ranks do not begin a round yet: a peer's node may be lost. None: they do.

    When such a node closes its connections, the other ranks fail within seconds, but its lease counts as
    stopped only after suspectAfterSeconds. A round that began before could only wait for that node. It would
    be an additional round and count towards maxRestarts (ADR 0008).
    """
    failed_at = world.memory.failure_seen_at
    if failed_at is None or not world.state.dead:
        return None
    seconds = world.spec.node_loss.suspect_after_seconds + LEASE_MARGIN_SECONDS
    for member in world.members:
        answered_at = None if member.sidecar is None else member.sidecar.answered_at
        if member.pod is None or not _may_answer(member) or answered_at is None:
            continue
        if answered_at < failed_at and world.now.monotonic - failed_at < seconds:
            return (
                f"the sidecar of pod {member.pod.name} has not answered since then, so its node "
                "may be lost. The next round begins when it answers or its node counts as lost, "
                f"after {seconds:.0f} s at most"
            )
    return None


def with_silence(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with the present condition SidecarsUnreachable.

    The condition turns False only when every sidecar has answered, or the job has ended or is suspended. An
    operator that has just started has called no sidecar yet, so it keeps the condition of its predecessor.
    """
    old = status.condition(JobCondition.SIDECARS_UNREACHABLE)
    silent = [m for m in world.members if _is_silent(m, world)]
    if status.completion_time is not None or status.is_true(JobCondition.SUSPENDED):
        silent, settled = [], True
    else:
        settled = all(m.reachable for m in world.members if _may_answer(m))
    if silent:
        since = world.now.utc if old is None or not old.is_true else old.last_transition_time
        note = Note(_reason(world), _silence_text(world, silent, stamp(since)))
        return world.with_condition(status, JobCondition.SIDECARS_UNREACHABLE, True, *note)
    if old is None or not old.is_true or not settled:
        return status
    note = Note(Reason.SIDECARS_ANSWER, "every sidecar whose pod runs answers the operator")
    return world.with_condition(status, JobCondition.SIDECARS_UNREACHABLE, False, *note)


def _may_answer(member: MemberState) -> bool:
    pod = member.pod
    return pod is not None and pod.alive and pod.phase is PodPhase.RUNNING


def _is_silent(member: MemberState, world: World) -> bool:
    sidecar = member.sidecar
    return (
        _may_answer(member)
        and sidecar is not None
        and sidecar.reachable is Reachable.NO
        and world.seconds_since(sidecar.unreachable_since) >= REPORTED_AFTER_SECONDS
    )


def _reason(world: World) -> Reason:
    answering = any(m.reachable for m in world.members)
    return Reason.SOME_SIDECARS_SILENT if answering else Reason.NO_SIDECAR_ANSWERS


def _silence_text(world: World, silent: list[MemberState], since: str) -> str:
    names = [m.pod.name for m in silent if m.pod is not None]
    listed = first_of(names)
    because = next((m.sidecar.unreachable_because for m in silent if m.sidecar is not None), "")
    found = f": {because}" if because else ""
    return (
        f"{len(silent)} of {len(world.members)} sidecars have not answered the operator since "
        f"{since}{found}. For this reason alone the operator deletes no pod and begins no round, "
        "and running ranks continue. Check that NetworkPolicies and the pod network let the "
        f"operator reach TCP port {CONTROL_PORT} in namespace {world.job.namespace}, and the logs of "
        f"container {SIDECAR_CONTAINER}. To give up the steps that only a silent pod has, delete "
        f"the pod. Pods: {listed}{_lost_nodes(world)}"
    )


def _lost_nodes(world: World) -> str:
    """Return which nodes of the gang are lost and what follows, or ""."""
    lost = {m.worker: m.node for m in world.members if m.node_lost}
    if not lost:
        return ""
    if readable.lost_can_be_given_up(world, list(lost)):
        then = f"A round on other nodes begins {ALL_LOST_SECONDS:.0f} s after their last answers"
    else:
        then = (
            "No committed step is known to be anywhere else, so their pods stay, and the job goes on when "
            "the nodes are back. If they never come back, delete these pods: the steps that only they have "
            "are lost then, and the gang goes on as failurePolicy.startOver says"
        )
    return f". Nodes that are lost: {first_of(sorted(set(map(str, lost.values()))))}. {then}"


# --------------------------------------------------------------------------- HangsRepeat


MAX_DOUBLINGS = 6
"""Number of doublings of the limits, at most: half an hour becomes 32 hours."""
_MAX_CAUSE_CHARACTERS = 600


def factor(status: TrainingJobStatus) -> float:
    """Return by what the limits of ranks that may be at work are multiplied in this round."""
    return 1.0 if status.hangs is None else 2.0 ** min(status.hangs.restarts, MAX_DOUBLINGS)


def with_hang(status: TrainingJobStatus, world: World, cause: str) -> TrainingJobStatus:
    """Return the status of a round that begins because the gang hangs.

    The condition is true from the second hang at the same step on.

    Args:
        cause: Message of the hang.
    """
    progress = None if world.coordinator is None else world.coordinator.progress
    if progress is None:
        return status
    step, known = progress.last, status.hangs
    again = known is not None and step <= known.step
    hangs = (
        changed(known, restarts=known.restarts + 1)
        if known is not None and again
        else HangsStatus(step=step, restarts=1)
    )
    if known is not None and not again:
        status = _passed(status, known.step, world)
    status = changed(status, hangs=hangs)
    if not again:
        return status
    text = (
        f"no step followed step {hangs.step} in {hangs.restarts} rounds in a row: "
        f"{cause[:_MAX_CAUSE_CHARACTERS]}. Until a step follows, the limits of ranks that do not wait for "
        f"others are {factor(status):.0f} times as long. If the ranks were at work, announce it around that "
        'code: `with checkpointer.paused("an evaluation"):`. Or set failurePolicy.hangs.seconds to more than '
        "it takes"
    )
    return world.with_condition(status, JobCondition.HANGS_REPEAT, True, Reason.HUNG, text)


def with_passed_hangs(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status without hangs at a step that all ranks have passed."""
    hangs = status.hangs
    if hangs is None or status.step is None or status.step <= hangs.step:
        return status
    return _passed(changed(status, hangs=None), hangs.step, world)


def _passed(status: TrainingJobStatus, step: Step, world: World) -> TrainingJobStatus:
    kind = JobCondition.HANGS_REPEAT
    if not status.is_true(kind):
        return status
    text = f"a step followed step {step}"
    return world.with_condition(status, kind, False, Reason.RECOVERED, text)


# --------------------------------------------------------------------------- stragglers


_PARTS = {"Input": "mostly for its input", "Forward": "mostly for its forward passes"}
"""Text for the slow part. A newer sidecar may report others."""
_MEASURED_STEPS = 32
"""Steps whose median a rank reports. Only later ones count as those of a straggler in a row."""


def with_stragglers(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with the stragglers that the coordinator has found, and the known ones.

    A known straggler stays while nothing shows that it is over: through restarts of the gang, while the
    coordinator is silent, and until every rank has finished as many steps of the round as it takes to find
    the straggler again. A restart would otherwise repeat the Event about it. It ends with the pod of its
    worker: the new pod may be on another node.
    """
    steps = world.spec.failure_policy.stragglers.effective_steps
    if has_no_gang(status) or not steps:
        return changed(status, stragglers=())
    known = {rank for rank in status.stragglers if _has_its_pod(rank, status, world)}
    state, point = world.coordinator, status.restore_point
    if state is None or state.round != status.restart_round or point is None:
        return changed(status, stragglers=tuple(sorted(known)))
    found = {s.rank for s in state.stragglers if _worker(s.rank, world) < len(world.members)}
    finished = -1 if state.progress is None else state.progress.first
    if finished < (point.step or 0) + steps + _MEASURED_STEPS:
        found |= known
    return changed(status, stragglers=tuple(sorted(found)[:MAX_STRAGGLERS]))


def _worker(rank: Rank, world: World) -> Worker:
    return Worker(rank // world.spec.procs_per_worker)


def _has_its_pod(rank: Rank, status: TrainingJobStatus, world: World) -> bool:
    """Return whether the worker of this rank keeps its pod, also in the round that `status` begins."""
    worker = _worker(rank, world)
    return status.members[worker : worker + 1] == world.status.members[worker : worker + 1] != ()


def straggler_events(
    before: TrainingJobStatus, after: TrainingJobStatus, world: World
) -> list[EmitEvent]:
    """Return a Warning for each rank that is a straggler now, and a Normal Event for each that was one.

    The end of a round is no such change.
    """
    found = () if world.coordinator is None else world.coordinator.stragglers
    events = [
        warning(Reason.STRAGGLER, _describe(s, world))
        for s in found
        if s.rank in after.stragglers and s.rank not in before.stragglers
    ]
    if has_no_gang(after) or before.restart_round != after.restart_round:
        return events
    return events + [
        normal(
            Reason.STRAGGLER_RECOVERED,
            f"{_place(rank, world)} is no straggler any more",
        )
        for rank in before.stragglers
        if rank not in after.stragglers
    ]


def _describe(straggler: Straggler, world: World) -> str:
    part = _PARTS.get(straggler.slow_part, straggler.slow_part)
    return (
        f"{_place(straggler.rank, world)} takes {straggler.factor:g} times as long for its part of a step as "
        f"the median, {part}, since step {straggler.since}"
    )


def _place(rank: Rank, world: World) -> str:
    return f"rank {rank} of {world.place(_worker(rank, world))}"


# --------------------------------------------------------------------------- Readable


WAITING_SECONDS = 10.0
POD_KIND = "Pod"


def unreadable_pass(world: World) -> Decision | None:
    """Return the whole decision of the pass while a pod of the job cannot be parsed, else None.

    The first pass in which all pods can be parsed again sets Readable=True, and does nothing else.
    """
    hidden = [u for u in world.observed.unreadable if u.kind == POD_KIND]
    known = world.job.status.condition(JobCondition.READABLE)
    if not hidden:
        if known is None or not known.is_false:
            return None
        note = Note(Reason.READ_AGAIN, "the job and its pods can be read")
        return _written(world, True, note, ())
    note = Note(Reason.CANNOT_READ, _hidden_text(hidden))
    if known is not None and known.is_false and known.message == note.message:
        return Decision.of((), WAITING_SECONDS, note.message)
    event = warning(note.reason, note.message)
    return _written(world, False, note, (event,))


def _hidden_text(hidden: list[Unreadable]) -> str:
    first = min(hidden, key=lambda u: u.name)
    others = f" (and {len(hidden) - 1} more pods)" if len(hidden) > 1 else ""
    return (
        f"pod {first.name}{others} cannot be read: {first.problem}; the operator does not delete, "
        "write or start anything of the job until the pod can be read"
    )


def _written(world: World, value: bool, note: Note, events: tuple[Action, ...]) -> Decision:
    status = world.with_condition(world.job.status, JobCondition.READABLE, value, *note)
    write = WriteStatus(status)
    return Decision.of((write, *events), WAITING_SECONDS if events else 0.0, note.message)
