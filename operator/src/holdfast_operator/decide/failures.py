"""The rules for a gang that failed: which failure, which rule, which restart. Pure.

`find` observes the failures, and `plan` applies the rules in their order. Each chapter of this file is one
step of that way, and KINDS says what the rules read of each failure.

Which failure
1. Disruptions (lost node, deleted pod, eviction) are checked before exit codes and never count. An eviction
   because of the pod's own limit is none: the next pod would exceed it, too.
2. A container that the kubelet cannot start for want of its image or its configuration is not a failure.
   The job waits without a restart.
3. The restart of a sidecar container alone is not a failure. ROUND is sent to the sidecar again.
4. While a gang trains, a pod that is deleted or evicted has its grace period to save, stop and flush.
5. A pod of this round that has not started is not a failure, whatever its node: it holds no data.
6. A grant that is taken back stops a restore, and the next round waits for it.
7. A sidecar that does not answer is not a failure by itself (ADR 0007). If no sidecar of the job answers,
   the cause is probably the network, and the job waits. Otherwise the pod is replaced only if the newest
   committed step is known to be readable without it (readable.py).

Which rule, and which restart (`plan`); the first that fits decides the pass
1. No pod may be created, because a job without a store is to be suspended: its other pods stay.
2. A commit is not in the status yet: the status records it first.
3. Ranks failed, and a peer's node may be lost: wait for the answers of all sidecars.
4. Pods were lost, and more may be lost with them: wait GATHER_SECONDS, or until a pod has flushed.
5. The gang fails before its first step with a new number of workers: a round with the number before.
6. A rule of failurePolicy.rules fails the job (`rule_on`).
7. Too many checkpoints are quarantined, or maxRestarts is spent: the job fails.
8. The round has no restore point yet: it also replaces what was lost since (ADR 0008).
9. The gang fails repeatedly from one step: back-off (evidence.py).
10. A new round, in place: only the pods that failures replace are new (writes.py). It quarantines a
    checkpoint after quarantineAfter failures (evidence.py), and its pods avoid nodes on which workers
    failed (nodes.py).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace

from holdfast_core.api import MAX_QUARANTINED, FailureAction, FailureRule, JobCondition
from holdfast_core.ids import Worker
from holdfast_operator.decide import checkpoints, ends, writes
from holdfast_operator.decide.facts import evidence, readable, sizes
from holdfast_operator.decide.facts.evidence import ALL_LOST_SECONDS, CANNOT_START, Failure, Ruling
from holdfast_operator.decide.facts.nodes import leaving_taint
from holdfast_operator.decide.facts.world import (
    MemberState,
    Note,
    World,
    again_after,
    restore_point_is_missing,
)
from holdfast_operator.decide.report import recovery
from holdfast_operator.decide.report.conditions import silent_peer
from holdfast_operator.decide.writes import (
    STARTING_SECONDS,
    WAITING_SECONDS,
    begin_round,
    committed,
    fail_job,
    with_status_write,
)
from holdfast_operator.model.actions import Decision, warning
from holdfast_operator.model.job import Done, PodPhase, PodView, Seen
from holdfast_operator.model.reasons import Reason, first_cause, how_it_ended

ENDING_SECONDS = 60.0
"""Time in which all pods of a gang end after the first of them has succeeded."""
SIDECAR_SILENT_SECONDS = 90.0
"""Time without an answer after which a sidecar counts as failed. It is longer than
restore_point.HOLDERS_SECONDS, so that the restore point is chosen before a pod is replaced."""
MAX_TRAINER_RESTARTS = 2
"""Restarts of a trainer container after which its pod is replaced. The kubelet's back-off then grows to
minutes, and a new pod starts sooner."""
OOM_KILLED = "OOMKilled"
"""The kubelet's reason for a container that the kernel ended because its memory ran out."""
_EVICTED = frozenset({"Evicted", "Preempting", "Preempted", "TerminationByKubelet", "Shutdown"})
GATHER_SECONDS = 0.3
"""Time from the first lost pod until the next round begins. Pods that are lost together are seen one after
another. Without this wait, each pod that was seen after the round had begun would cost a round of its own."""
DRAIN_POLL_SECONDS = 1.0
"""Pause between passes while a lost pod waits for another one that still saves and flushes."""
ANSWER_SECONDS = 0.1
"""Shortest pause between passes while sidecars are called. A healthy sidecar answers within this time."""
PEERS_ANSWER_SECONDS = 3.0
"""Wait for the answers of sidecars before the status reports it."""


@dataclass(frozen=True, slots=True)
class FailureKind:
    """What the rules read of a failure's reason."""

    lost: bool = False
    """Whether more pods are often lost with it, so that the next round waits for them."""
    removed: bool = False
    """Whether its pod was deleted or evicted. Other pods of the gang may then still save and flush."""
    of_node: bool = False
    """Whether it counts as a failure of the worker's node (nodes.py)."""
    of_checkpoint: bool = False
    """Whether it counts against the checkpoint that the ranks restored (evidence.py)."""
    of_another: bool = False
    """Whether ranks that fail beside it fail because of it, and not because of the checkpoint."""
    of_store: bool = False
    """Whether no rank ran because the restore point could not be read. Such a restart does not count towards
    maxRestarts, because an outage of the store would otherwise fail the job."""


KINDS = {
    Reason.STATUS_BEHIND: FailureKind(),
    Reason.NODE_LOST: FailureKind(lost=True, of_node=True),
    Reason.POD_EVICTED: FailureKind(lost=True, removed=True),
    Reason.POD_LOST: FailureKind(lost=True, removed=True),
    Reason.OOM_KILLED: FailureKind(of_node=True, of_another=True),
    Reason.TRAINER_RESTARTING: FailureKind(of_node=True),
    Reason.POD_FAILED: FailureKind(of_node=True),
    Reason.GRANT_MISSING: FailureKind(of_another=True, of_store=True),
    Reason.CHECKPOINT_MISSING: FailureKind(of_another=True, of_store=True),
    Reason.RESTORE_FAILED: FailureKind(of_another=True, of_store=True),
    Reason.RANK_FAILED: FailureKind(of_node=True, of_checkpoint=True),
    Reason.HUNG: FailureKind(of_node=True),
    Reason.SIDECAR_UNREACHABLE: FailureKind(of_node=True),
    Reason.POD_SUCCEEDED_EARLY: FailureKind(),
    # The gang was asked to stop, and starts again in its pods (ends.stopped_for_nothing).
    Reason.RESUMED: FailureKind(),
    Reason.NOT_PERSISTED: FailureKind(),
}
"""The failures, causes before consequences. A new round takes the reason of its first failure."""


# --------------------------------------------------------------------------- which failure


def find(world: World) -> tuple[Failure, ...]:
    """Return all failures that make a new round necessary, causes before consequences."""
    found = [Failure(Reason.STATUS_BEHIND, t, disruption=True) for t in _status_behind(world)]
    of_members = (_of_member(world, member) for member in world.members)
    found += [failure for failure in of_members if failure is not None]
    found += [*_of_ranks(world), *_of_hang(world), *_of_restore(world), *_of_grant(world)]
    return tuple(sorted(found, key=_severity)) or ends.stopped_for_nothing(world)


def _severity(failure: Failure) -> int:
    return list(KINDS).index(failure.reason)


def _status_behind(world: World) -> Iterator[str]:
    """Yield the evidence that the status is older than the gang, because etcd was restored."""
    sealed, birth = world.highest_sealed, world.highest_birth
    if sealed is not None and sealed > world.round:
        yield f"a sidecar is sealed for round {sealed}, but the status is in round {world.round}"
    if birth is not None and birth > world.round:
        yield f"a pod was created in round {birth}, but the status is in round {world.round}"
    # Once it has a restore point, the round has checkpoints of its own.
    saved = world.highest_saved if world.status.restore_point is None else None
    if saved is not None and saved >= world.round:
        yield f"the store has a checkpoint of round {saved}, but the status is in round {world.round}"
    for pod in world.observed.pods:
        if pod.birth_round == world.round and world.is_ahead(pod):
            yield f"pod {pod.name} was created, but by the status worker {pod.worker} has an older pod"


def _of_member(world: World, member: MemberState) -> Failure | None:
    pod = member.pod
    if world.awaits_start(member):
        return None  # it holds no data: nodes.py replaces it in this round
    if pod is None:
        name = world.source.gone_name(member.worker, member.birth_round)
        announced = dict(world.memory.announced).get(name or "")
        worker = f"worker {member.worker}, created in round {member.birth_round}"
        failure = _lost(Reason.POD_LOST, f"the pod of {worker} no longer exists", member)
        if announced is not None:
            failure = _lost(Reason.POD_EVICTED, announced, member)
        return replace(failure, confirm_gone=name)
    if member.node_lost:
        return _of_lost_node(world, member, pod)
    if pod.leaving and ends.may_drain(world, pod):
        return None
    if pod.disrupted or (
        pod.phase is PodPhase.FAILED and pod.reason in _EVICTED and not pod.exceeded_own_limit
    ):
        return _lost(Reason.POD_EVICTED, pod.disruption, member)
    if pod.terminating:
        text = f"pod {pod.name} is being deleted{_node_leaves(world, pod)}"
        return _lost(Reason.POD_LOST, text, member)
    return _of_container(world, member, pod)


def _lost(reason: Reason, text: str, member: MemberState) -> Failure:
    """Return the failure of a member whose pod was taken away."""
    return Failure(reason, text, member.worker, disruption=True, replace_pod=True)


def _ended(reason: Reason, text: str, pod: PodView) -> Failure:
    """Return the failure of a pod whose trainer ended by itself and does not start in it again."""
    return Failure(reason, text, pod.worker, exit_code=pod.trainer_exit_code, replace_pod=True)


def _node_leaves(world: World, pod: PodView) -> str:
    node = world.observed.nodes.get(pod.node or "")
    taint = None if node is None else leaving_taint(pod, node)
    return "" if taint is None else f", and its node {pod.node} has the taint {taint}"


def _of_lost_node(world: World, member: MemberState, pod: PodView) -> Failure | None:
    """Return the failure of a member on a lost node, or None while the gang waits for the node.

    A pod that may hold the last copy of every committed step stays a member, because its node may come back.
    If other members answer, a round that keeps the pod begins, and their inventories show what they hold.
    """
    node = world.observed.nodes[pod.node or ""]
    text = f"node {pod.node} of pod {pod.name} {node.lost_because}, and the pod's sidecar does not answer"
    failure = _lost(Reason.NODE_LOST, text, member)
    if not pod.alive:
        return failure  # a user deleted it, or it has ended
    if _control_plane_may_be_cut_off(world):
        return None
    lost = [m.worker for m in world.members if m.node_lost]
    if readable.lost_can_be_given_up(world, lost):
        return failure
    if world.status.restore_point is None or not any(m.reachable for m in world.members):
        return None
    return replace(failure, replace_pod=False)


def _control_plane_may_be_cut_off(world: World) -> bool:
    silent = [m for m in world.members if m.node_lost and m.sidecar is not None]
    if any(m.reachable for m in world.members) or len({m.node for m in silent}) < 2:
        return False
    newest = max(
        (m.sidecar.unreachable_since or 0.0 for m in silent if m.sidecar is not None), default=0.0
    )
    return world.seconds_since(newest) < ALL_LOST_SECONDS


def _of_container(world: World, member: MemberState, pod: PodView) -> Failure | None:
    oom = pod.reason == OOM_KILLED
    if pod.phase is PodPhase.FAILED:
        text = f"pod {pod.name} failed: {pod.reason or 'no reason given'}: {pod.message}"
        if oom:
            text = f"pod {pod.name} failed: {out_of_memory(pod)}"
        elif world.fixed_node is not None and not pod.trainer_ran:
            # No scheduler has compared the pod with the node, so its kubelet may have rejected the pod.
            text = f"{text.rstrip(': ')}. {world.fixed_node_advice}"
        return _ended(Reason.OOM_KILLED if oom else Reason.POD_FAILED, text.rstrip(": "), pod)
    if pod.phase is PodPhase.SUCCEEDED:
        return _of_succeeded(world, member, pod)
    if pod.waiting_reason in CANNOT_START:
        return None
    restarts = pod.trainer_restarts > MAX_TRAINER_RESTARTS
    if restarts and readable.answering_can_be_replaced(world, [member.worker]):
        text = f"the trainer of pod {pod.name} restarted {pod.trainer_restarts} times"
        text += f": {out_of_memory(pod)}" if oom else ""
        return _ended(Reason.OOM_KILLED if oom else Reason.TRAINER_RESTARTING, text, pod)
    return _of_sidecar(world, member, pod)


def _of_succeeded(world: World, member: MemberState, pod: PodView) -> Failure | None:
    """Return the failure of a member whose containers returned 0 although the gang has not finished, or None.

    The launchers of a gang return together, after its last step, so the other pods have ENDING_SECONDS to
    follow. A script that catches its launcher's error and returns 0 would otherwise leave them waiting.
    """
    if world.status.restore_point is None:
        text = f"pod {pod.name} ended before round {world.round} began to run"
        return _lost(Reason.POD_SUCCEEDED_EARLY, text, member)
    waited = world.seconds_seen(Seen.ENDING)
    if waited < ENDING_SECONDS:
        return None
    text = (
        f"the containers of pod {pod.name} returned 0, and other pods of the gang still run {waited:.0f} s "
        "later. A trainer container must return what `holdfast run` returns"
    )
    return _ended(Reason.POD_SUCCEEDED_EARLY, text, pod)


def _of_sidecar(world: World, member: MemberState, pod: PodView) -> Failure | None:
    """Return the failure of a member whose sidecar has not answered for SIDECAR_SILENT_SECONDS, or None.

    It matters only until the gang trains, because a gang that trains does not need the operator. It counts
    only while other sidecars answer, and only if no committed step would be lost with the pod.
    """
    sidecar, answering_since = member.sidecar, world.memory.seen_at(Seen.ANSWERING)
    if (
        sidecar is None
        or sidecar.unreachable_since is None
        or answering_since is None
        or member.reachable
        or world.status.is_true(JobCondition.RUNNING)
        or pod.phase is not PodPhase.RUNNING
    ):
        return None
    silent = world.seconds_since(max(sidecar.unreachable_since, answering_since))
    if silent < SIDECAR_SILENT_SECONDS:
        return None
    if not readable.silent_can_be_lost(world, [m.worker for m in world.members if not m.reachable]):
        return None
    text = f"the sidecar of pod {pod.name} has not answered for {silent:.0f} s"
    return Failure(Reason.SIDECAR_UNREACHABLE, text, member.worker, replace_pod=True)


def out_of_memory(pod: PodView) -> str:
    """Describe the end of a container that the kernel ended as a whole.

    The kernel does this when the container's memory is at its limit, so the limit is the peak.
    """
    limit = pod.memory_limit
    if limit is None:
        return "its container ran out of memory. It has no limit, so the node ran out of memory"
    return f"its container ran out of memory at its limit of {limit}"


def _of_ranks(world: World) -> list[Failure]:
    found = []
    for dead in world.state.dead if world.status.restore_point is not None else ():
        pod = world.pod(dead.worker)
        # The kubelet shows the newest end of the container, which may belong to an earlier round. The ranks
        # that the kernel ended with their launcher have this code.
        ended = dead.code == -signal.SIGKILL and pod is not None and pod.reason == OOM_KILLED
        text = f"rank {dead.rank} {how_it_ended(dead)}"
        if ended and pod is not None and not dead.out_of_memory:
            text += f": {out_of_memory(pod)}"
        oom = ended or bool(dead.out_of_memory)
        reason = Reason.OOM_KILLED if oom else Reason.RANK_FAILED
        found.append(Failure(reason, text, dead.worker, exit_code=dead.code))
    return found


def _of_restore(world: World) -> list[Failure]:
    """Return a failure if the restore point cannot be read and a new round may help.

    A round that waits for a missing restore point goes on by itself when the restore point is there again
    (readable.py). It ends if ranks have ended for want of it, or if there is another checkpoint.
    """
    state = world.state
    if not state.cannot_restore:
        return []
    cause = first_cause(state.cannot_restore)
    if not restore_point_is_missing(world):
        return [Failure(Reason.RESTORE_FAILED, cause)]
    if not state.dead and not readable.leaves_missing_restore_point(world):
        return []
    return [Failure(Reason.CHECKPOINT_MISSING, cause)]


def _of_grant(world: World) -> list[Failure]:
    """Return a failure if the gang restores a Checkpoint of another namespace whose grant was taken back.

    The next round stops the restore, and waits for a grant before it chooses the Checkpoint again. Ranks that
    train have read it already.
    """
    point, foreign, state = world.status.restore_point, world.observed.foreign, world.state
    if foreign is None or foreign.granted or point is None or point.job_uid is None:
        return []
    if state.running or state.last_local is not None or world.status.is_true(JobCondition.RUNNING):
        return []
    name = world.spec.source_checkpoint
    text = (
        f"the CheckpointGrant for Checkpoint {name} of namespace {foreign.namespace} was taken back"
    )
    return [Failure(Reason.GRANT_MISSING, text, disruption=True)]


def _of_hang(world: World) -> list[Failure]:
    """Return a failure of each worker that the gang waits for, or one of the gang if none is known."""
    hang, procs = world.state.hang, world.spec.procs_per_worker
    if not hang or world.status.restore_point is None:
        return []
    late = sorted({Worker(rank // procs) for rank in world.state.late})
    known = [Failure(Reason.HUNG, hang, w) for w in late if w < len(world.members)]
    return known or [Failure(Reason.HUNG, hang)]


# --------------------------------------------------------------------------- which rule, which restart


def plan(world: World, failures: tuple[Failure, ...]) -> Decision:
    """Return the decision of a pass that found these failures, of which there is at least one.

    The numbers are those of the module's docstring.
    """
    cause, disrupted = failures[0], any(f.disruption for f in failures)
    if not world.may_create_pods and any(f.replace_pod for f in failures):  # 1
        return _keep_pods(world, cause)
    commit = checkpoints.committable(world)
    if commit is not None:  # 2: the coordinator of the next round has no record of it
        return committed(world, commit, [], None)
    peer = None if disrupted else silent_peer(world)
    if peer is not None:  # 3
        return _await_peers(world, cause, peer)
    taken_in = _can_be_taken_in(world, failures)
    left = 0.0 if taken_in else _gather_seconds(world, failures)
    if left > 0:  # 4
        text = f"{cause.message}; further pods may be lost with it"
        return Decision.of((), left, text)
    if world.memory.cause_known_at is None:
        world.remember(cause_known_at=world.now.monotonic)
    refused = None if disrupted else _of_first_start(world, failures)
    if refused is not None:  # 5
        return writes.go_back(world, refused)
    ruling = rule_on(world, failures)
    end = _end_of_job(world, ruling)
    if end is not None:  # 6 and 7
        return fail_job(world, end)
    if taken_in:  # 8
        return _take_in(world, ruling)
    delay = 0.0 if disrupted else evidence.delay_seconds(world)
    if world.seconds_since(world.memory.failure_seen_at) < delay:  # 9
        return _back_off(world, cause, delay)
    return _restart(world, ruling)  # 10


def _keep_pods(world: World, cause: Failure) -> Decision:
    """Keep the remaining pods of a gang without a store that lost pods while spec.suspend is true.

    They may hold the newest step, and no pod is created while spec.suspend is true.
    """
    note = Note(cause.reason, f"{cause.message}; no pod is created while spec.suspend is true")
    actions, commit = checkpoints.plan(world), checkpoints.committable(world)
    if commit is not None:
        return committed(world, commit, actions, note)
    return with_status_write(world, actions, note, WAITING_SECONDS)


def _await_peers(world: World, cause: Failure, silent: str) -> Decision:
    """Wait until every sidecar has answered after ranks failed.

    Most answer within milliseconds, so the status reports the wait only after
    PEERS_ANSWER_SECONDS.
    """
    pause = again_after(world, world.memory.failure_seen_at, ANSWER_SECONDS)
    if world.seconds_since(world.memory.failure_seen_at) < PEERS_ANSWER_SECONDS:
        text = f"{cause.message}; every sidecar is called to find out which of them answer"
        return Decision.of((), pause, text)
    note = Note(Reason.BACKING_OFF, f"{cause.message}; {silent}")
    return with_status_write(world, [], note, pause)


def _can_be_taken_in(world: World, failures: tuple[Failure, ...]) -> bool:
    """Return whether the present round can also replace the pods of these failures.

    Until a round has a restore point, its sidecars know its number only, and no rank runs. A new pod needs a
    new name, so each lost pod must be of an older round. A failure that keeps its pod needs a new round.
    """
    if world.status.restore_point is not None or world.round == 0:
        return False
    for failure in failures:
        member = world.member(failure.worker)
        if not KINDS[failure.reason].lost or not failure.replace_pod or member is None:
            return False
        if member.birth_round >= world.round:
            return False
    return True


def _gather_seconds(world: World, failures: tuple[Failure, ...]) -> float:
    """Return the seconds for which the next round waits for further lost pods.

    The wait counts from the first failure or the first deletion of a lost pod that was seen. So a pod whose
    gang has saved and stopped after its deletion delays nothing. The result is 0 if no pod is lost, or if no
    other pod is left. While another pod still saves and flushes, the round does not begin: it would end
    the flush.
    """
    if all(KINDS[f.reason].removed for f in failures) and ends.drains(world):
        return DRAIN_POLL_SECONDS
    lost = {f.worker for f in failures if KINDS[f.reason].lost}
    if not lost or not any(m.alive and m.worker not in lost for m in world.members):
        return 0.0
    pods = (m.pod for m in world.members if m.worker in lost)
    leaving = (world.memory.seen_at(Seen.LEAVING, pod.uid) for pod in pods if pod is not None)
    seen = [at for at in (*leaving, world.memory.failure_seen_at) if at is not None]
    return max(0.0, GATHER_SECONDS - world.seconds_since(min(seen, default=None)))


def _of_first_start(world: World, failures: tuple[Failure, ...]) -> Failure | None:
    """Return the failure for which the gang goes back to the number of workers before, or None.

    The ranks have restored a checkpoint of another number of ranks, and failed by themselves or for want of
    memory before one of them had finished a step.
    """
    if not sizes.is_untried(world.status) or evidence.trained_since_restored(world):
        return None
    oom = next((f for f in failures if f.reason is Reason.OOM_KILLED), None)
    return oom or _rank_that_failed(failures)


def _rank_that_failed(failures: tuple[Failure, ...]) -> Failure | None:
    """Return the first rank that failed by itself, or None if the cause lies outside of the ranks.

    Ranks that were killed from outside or ran out of memory are no evidence against the checkpoint that they
    restored, and ranks that fail beside them lost their peer. Ranks that cannot read the restore point did
    not run from it (readable.py).
    """
    killed = (-signal.SIGKILL, -signal.SIGTERM)
    if any(KINDS[f.reason].of_another or f.exit_code in killed for f in failures):
        return None
    return next((f for f in failures if KINDS[f.reason].of_checkpoint), None)


def rule_on(world: World, failures: tuple[Failure, ...]) -> Ruling:
    """Return what failurePolicy.rules and KINDS make of these failures, of which there is at least one.

    1. If one of the failures is a disruption, only the disruptions are compared with the rules: ranks that
       fail with one are its consequence.
    2. The rules are tried in their order. The first that matches one of these failures applies, whichever
       rank failed first. So the order of the rules decides if several ranks end with different codes.
    3. Without a rule that matches, the gang restarts.
    """
    ruling = Ruling(
        failures,
        ignored=KINDS[failures[0].reason].of_store,
        failed_from=evidence.failed_from(world) if _rank_that_failed(failures) else None,
    )
    compared = [f for f in failures if f.disruption] or list(failures)
    for index, rule in enumerate(world.spec.failure_policy.rules):
        found = [f for f in compared if _matches(rule, f, world)]
        if found:
            note = f"failurePolicy.rules[{index}] applies ({rule.action})"
            ruling = replace(ruling, action=rule.action, matched=found[0], note=note)
            ruling = _with_action(world, ruling, {f.worker for f in found if f.worker is not None})
            break
    return replace(ruling, blamed=_blamed(ruling))


def _matches(rule: FailureRule, failure: Failure, world: World) -> bool:
    if rule.on_exit_codes:
        code = failure.exit_code  # as shells and kubelets report it: 128 + n for an end by signal n
        return (code if code is None or code >= 0 else 128 - code) in rule.on_exit_codes
    if rule.on_reasons:
        return failure.reason.value in rule.on_reasons
    pod = world.pod(failure.worker)
    return pod is not None and any(
        (c.type, c.status) in pod.conditions for c in rule.on_pod_conditions
    )


def _with_action(world: World, ruling: Ruling, matched: set[Worker]) -> Ruling:
    """Return the ruling with what the rule's action does to the workers that it matches."""
    match ruling.action:
        case FailureAction.RESTART_GANG | FailureAction.FAIL_JOB:
            return ruling
        case FailureAction.IGNORE:
            return replace(ruling, ignored=True)
        case FailureAction.RESTART_POD:
            return _with_new_pods(world, ruling, matched)
        case FailureAction.AVOID_NODE:
            return replace(_with_new_pods(world, ruling, matched), avoided=frozenset(matched))


def _with_new_pods(world: World, ruling: Ruling, matched: set[Worker]) -> Ruling:
    """Return the ruling that also replaces the pods of these workers.

    The pods stay if the newest committed step is not known to be readable without them, or if the gang fails
    from this step and an older one is not. They stay while no pod can be created (World.may_replace_pods).
    """
    gone = {f.worker for f in ruling.failures if f.replace_pod and f.worker is not None}
    workers, away = matched - gone, matched | gone
    if not workers:
        return ruling
    why = ""
    if not world.may_create_pods:
        why = "no pod is created while spec.suspend is true"
    elif not world.may_replace_pods:
        why = "the API server refuses the pods of the present template"
    elif not readable.answering_can_be_replaced(world, away):
        why = "the newest committed step is not known to be readable without them"
    elif not readable.older_is_kept(world, away, ruling.failed_from):
        why = "they have the checkpoint that follows if the gang fails from this one again"
    if why:
        return replace(ruling, note=f"{ruling.note}; the pods stay, because {why}")
    failures = tuple(
        replace(f, replace_pod=f.replace_pod or f.worker in workers) for f in ruling.failures
    )
    return replace(ruling, failures=failures)


def _blamed(ruling: Ruling) -> dict[Worker, Failure]:
    """Return the workers whose nodes are blamed, each with its first failure (nodes.py)."""
    if ruling.action is FailureAction.IGNORE:
        return {}
    return {
        f.worker: f
        for f in reversed(ruling.failures)
        if f.worker is not None
        and (
            f.worker in ruling.avoided
            or (KINDS[f.reason].of_node and f.disruption == ruling.disruption)
        )
    }


def _end_of_job(world: World, ruling: Ruling) -> Note | None:
    """Return why the job fails instead of restarting, or None if it restarts."""
    newest, policy = ruling.failures[0].message, world.spec.failure_policy
    if ruling.action is FailureAction.FAIL_JOB and ruling.matched is not None:
        return Note(Reason.FAILURE_RULE, f"{ruling.note}: {ruling.matched.message}")
    if ruling.ignored:
        return None
    id_, quarantined = ruling.failed_from, world.status.quarantined
    due = id_ is not None and evidence.is_due(world, evidence.kept_restarts(world), id_)
    if due and len(quarantined) >= MAX_QUARANTINED:
        text = (
            f"{len(quarantined)} checkpoints are quarantined, and ranks failed again before they had "
            f"finished a step: {newest}"
        )
        return Note(Reason.NO_PROGRESS, text)
    if not ruling.disruption and evidence.budget_spent(world):
        window = int(policy.window_length.total_seconds())
        return Note(
            Reason.BACKOFF_LIMIT_EXCEEDED,
            f"more than {policy.max_restarts} restarts within {window} s, or since the newest committed "
            f"step; the newest: {newest}",
        )
    return None


def _take_in(world: World, ruling: Ruling) -> Decision:
    """Replace further lost pods in the present round, which has no restore point yet (ADR 0008)."""
    record, cause = world.status.last_recovery, ruling.failures[0]
    order: list[str] = [str(r) for r in KINDS]
    known = [r for r in (record.reason if record else "", cause.reason) if r in order]
    status = writes.with_taken_in(world, ruling, min(known, key=order.index))
    text = f"round {world.round} also replaces what was lost since: {ruling.text}"
    event = warning(cause.reason, text)
    seen = {k: at for k, at in world.memory.seen.items() if k[0] is not Seen.SCHEDULED}
    world.remember(seen=seen)
    world.remember_done(Done.TAKEN_IN)
    return begin_round(world, status, event, ruling.confirm_gone)


def _back_off(world: World, cause: Failure, delay_seconds: float) -> Decision:
    text = f"{cause.message}; the next round begins after {delay_seconds:.0f} s"
    note = Note(Reason.BACKING_OFF, text)
    left = delay_seconds - world.seconds_since(world.memory.failure_seen_at)
    return with_status_write(world, [], note, max(left, STARTING_SECONDS))


def _restart(world: World, ruling: Ruling) -> Decision:
    status = writes.next_round(world, ruling)
    fault = recovery.fault_at(world, ruling.failures)
    if status.last_recovery is not None:
        status = status.with_recovery(recovery.begun(status.last_recovery, fault, world))
    text = f"round {status.restart_round} begins: {ruling.text}"
    event = warning(ruling.failures[0].reason, text)
    return begin_round(world, status, event, ruling.confirm_gone)
