"""Find pods without a node, in no queue or not started, and say when they are created again. Pure.

Two gangs that each hold half of the nodes would wait for each other without an end. So a gang that is not
scheduled within scheduleTimeoutSeconds gives all of its nodes back, and tries again after a back-off
(ADR 0011). The back-offs of two jobs differ, so that one of them finds all nodes free.

A kubelet repeats a start that fails without an end, and only its Events name the cause, which the operator
does not read. So the status says what the pod mounts. A cause that lies in the node ends on another one.

In Kueue, the pods of a gang join a pod group (ADR 0012). The present pods are the record of the group, so
nothing in the status can contradict them:
1. A pod that has started, or is of an earlier round, cannot change its group. The new pods of the gang join
   this group.
2. If there is no such pod, the group is a new one, which is named by the workers and the present round. It
   has the queue and the priority of the pods that exist already, else those of the job's labels.
3. A pod that has not started and is in another group is deleted, and created again in the same round under
   the same name. This costs no round (World.awaits_start).
So a group whose pods have all ended is not used again: Kueue may have finished it, or may be about to delete
its Workload, with which it deletes all pods that have joined meanwhile.

Kueue keeps its finalizer until the pod is replaced, its group has finished or its Workload is deleted. For
the pods of a job that is deleted, suspended or over, none of that may happen, and a pod on a lost node never
becomes Failed. So a pod that is being deleted loses the finalizer, and then ends as it would without Kueue:
its kubelet or a forced delete removes the object, and Kueue counts it until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from holdfast_core.api import (
    MAX_NODE_FAILURES,
    Gang,
    JobCondition,
    NodeFailure,
    TrainingJob,
    TrainingJobStatus,
    changed,
)
from holdfast_core.contract import NODE_VOLUME
from holdfast_core.ids import RestartRound, Worker
from holdfast_core.names import first_of, pod_group_name
from holdfast_operator.decide.facts import readable
from holdfast_operator.decide.facts.evidence import share_of
from holdfast_operator.decide.facts.nodes import MAX_NODES, failed_nodes
from holdfast_operator.decide.facts.world import MemberState, World, has_no_gang, is_over
from holdfast_operator.model import labels
from holdfast_operator.model.actions import Delete, ReleasePod
from holdfast_operator.model.job import PodGroup, PodPhase, PodView, Seen, queue_of
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.template import items_of, pod_spec

FIRST_BACK_OFF_SECONDS = 60.0
MAX_BACK_OFF_SECONDS = 900.0
NAMED_PODS = 4
"""Number of pods whose names a message contains."""
NAMED_AFTER_SECONDS = 30.0
"""Time after which a pod that has not started on its node is named."""
_SOURCES = {
    "secret": ("Secret", "secretName"),
    "configMap": ("ConfigMap", "name"),
    "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"),
    "nfs": ("NFS server", "server"),
    "csi": ("CSI driver", "driver"),
    "hostPath": ("path of the node", "path"),
}
"""Sources of volumes that may be missing, each with its name in messages and the field that names it."""


def timed_out(world: World) -> bool:
    """Return whether pods of the gang have been without nodes for scheduleTimeoutSeconds."""
    limit = world.spec.schedule_timeout_seconds
    waited = world.seconds_seen(Seen.UNSCHEDULED)
    return limit > 0 and waited >= limit and waits_for_nodes(world)


def waits_for_nodes(world: World) -> bool:
    """Return whether pods of the gang have no nodes.

    A gang whose ranks train has all of its pods: the watch of pods is then behind.
    """
    return bool(world.unscheduled) and not world.state.running


def lost_if_deleted(world: World) -> str | None:
    """Describe the committed work that would be lost with all pods of a gang that is not scheduled.

    A pod of this round has never started, so the gang has not trained in this round: its newest committed
    step is the restore point, once that is chosen.
    """
    point = world.status.restore_point
    if point is None:
        return readable.lost_with_all_pods(world)
    if point.step is None or point.job_uid is not None:
        return None
    persisted = readable.stored(world)
    if persisted is not None and persisted.step >= point.step:
        return None
    return f"step {point.step} is committed on the nodes only"


def describe(world: World) -> str:
    """Return which pods have no node, and why: the scheduler's message, or the error of their creation."""
    waiting = world.unscheduled
    names = [world.source.identity(m.worker, m.birth_round) for m in waiting]
    pods = (m.pod for m in waiting)
    reasons = (world.observed.memory.create_refused if p is None else p.message for p in pods)
    why = next((text for text in reasons if text), "the scheduler has not said why")
    return (
        f"{len(names)} of {len(world.members)} pods have no node "
        f"({first_of(names, NAMED_PODS)}): {why}"
    )


def claim_of(job: Gang, pod: PodView) -> str:
    """Return which claim a message of the scheduler about volumes means, and how to look at it.

    The scheduler names neither a claim nor its storage class.
    """
    claim = job.spec.checkpoint.node.volume.claim
    if claim is None or "volume" not in pod.message.lower():
        return ""
    return (
        f". Its claim is {pod.name}-{NODE_VOLUME} of storage class {claim.storage_class_name}: "
        f"see kubectl describe pvc -n {job.namespace}"
    )


def timeouts(world: World) -> int:
    """Return the number of tries in a row that ended with the time-out."""
    return 0 if world.status.scheduling is None else world.status.scheduling.timeouts


def next_try(world: World) -> datetime:
    """Return when the pods of a gang that gives its nodes back now are created again.

    The back-off is between a half and the whole of 1, 2, 4 and so on minutes, up to MAX_BACK_OFF_SECONDS.
    """
    whole = min(FIRST_BACK_OFF_SECONDS * 2.0 ** min(timeouts(world), 10), MAX_BACK_OFF_SECONDS)
    return world.now.utc + timedelta(seconds=whole * (1 + share_of(world)) / 2)


def seconds_until_next_try(world: World) -> float | None:
    """Return the seconds until the pods are created, 0 if that is due, or None if no back-off was begun.

    A stamp further away than the longest back-off was written with a clock that was wrong.
    """
    scheduling = world.status.scheduling
    if scheduling is None or scheduling.retry_at is None:
        return None
    left = (scheduling.retry_at - world.now.utc).total_seconds()
    return left if 0 < left <= MAX_BACK_OFF_SECONDS else 0.0


# --------------------------------------------------------------------------- pods that do not start


def describe_late(world: World, seconds: float = NAMED_AFTER_SECONDS) -> str | None:
    """Return which pods have not started on their nodes for so many seconds, or None."""
    late = _late(world, seconds)
    if not late:
        return None
    named = first_of([f"{pod.name} on node {pod.node}" for _, pod in late])
    pod = late[0][1]
    waits = pod.waiting_reason or "ContainerCreating"
    text = f"pods have not started for more than {seconds:.0f} s: {named}. {waits}"
    if pod.waiting_message:
        text += f": {pod.waiting_message}"
    if ("PodReadyToStartContainers", "False") in pod.conditions:
        text += " (a volume is not mounted, or the network of the pod is not set up)"
    mounts = _mounts(world)
    text += f". They mount {first_of(mounts)}" if mounts else ""
    _, kept = _to_avoid(world)
    text += f". {kept}" if kept else ""
    text += f". {world.fixed_node_advice}" if world.fixed_node is not None else ""
    return f"{text}. `kubectl describe pod {pod.name}` shows what the kubelet says"


def with_late_nodes(world: World) -> TrainingJobStatus:
    """Return the status in which the nodes are avoided on which pods have not started in time.

    It is the same status if there are none, or if no affinity can keep pods off a node. If pods wait on more
    than half of the gang's nodes, the cause may be one that all nodes share. So the pods of one node are
    tried on others first (ADR 0008).
    """
    nodes, _ = _to_avoid(world)
    status = world.status
    if not nodes:
        return status
    new = [
        NodeFailure(
            node=node,
            at=world.now.utc,
            late_in_round=world.round,
            by_rule=True,
        )
        for node in nodes
    ]
    return changed(status, node_failures=(*status.node_failures, *new)[-MAX_NODE_FAILURES:])


def _to_avoid(world: World) -> tuple[list[str], str]:
    """Return the nodes to avoid because of late pods, and why late pods stay on others, or "".

    No more nodes are recorded than are avoided afterwards. Otherwise their pods would neither start nor be
    created again, and each pass would record them again.
    """
    limit = world.spec.start_timeout_seconds
    if not limit or world.nodes_are_fixed or not world.may_replace_pods:
        return [], ""
    avoided = failed_nodes(world, world.status)
    late = sorted(_nodes(_late(world, limit)) - set(avoided))
    if not late:
        return [], ""
    # Pods that wait for the same reason become late at different moments, as they were created.
    waiting = _nodes(_late(world, limit / 2))
    used = _nodes((m, m.pod) for m in world.members if m.pod is not None)
    # The pods of a node that was tried first may have no node yet, so that node counts as well.
    tried = _tried(world)
    if len(waiting | tried) > 1 and 2 * len(waiting | tried) > len(used | tried):
        if not tried:
            return late[:1], ""
        if not _start_elsewhere(world, tried):
            where = f"They wait on {len(waiting)} of the gang's {len(used)} nodes"
            first = f"the pods of {first_of(sorted(tried))}"
            if all(p.failed_nodes.isdisjoint(tried) for _, p in _late(world, limit)):
                return [], f"{where}. So {first} are tried on other nodes first"
            return [], (
                f"{where}, and {first} have not started on other nodes either. So the cause is probably no "
                "node, and the pods stay. Look for what they have in common: the image, a claim, a Secret, "
                "the network"
            )
    room = max(0, MAX_NODES - len(avoided))
    why = "" if len(late) <= room else f"A pod avoids {MAX_NODES} nodes at most, so some pods stay"
    return late[:room], why


def _tried(world: World) -> frozenset[str]:
    """Return the nodes on which pods of this round have not started, so that they are tried on others."""
    return frozenset(f.node for f in world.status.node_failures if f.late_in_round == world.round)


def _start_elsewhere(world: World, tried: frozenset[str]) -> bool:
    """Return whether a pod that was created again to avoid one of these nodes has started."""
    return any(p.started and not p.failed_nodes.isdisjoint(tried) for p in world.pods)


def _nodes(pods: Iterable[tuple[MemberState, PodView]]) -> set[str]:
    return {pod.node for _, pod in pods if pod.node is not None}


def _late(world: World, seconds: float) -> list[tuple[MemberState, PodView]]:
    return [
        (m, m.pod)
        for m in world.members
        if m.pod is not None
        and (since := world.memory.seen_at(Seen.BOUND, m.pod.uid)) is not None
        and not m.node_lost
        and world.awaits_start(m)
        and world.seconds_since(since) >= seconds
    ]


def _mounts(world: World) -> list[str]:
    """Return what the volumes of the template refer to."""
    found = []
    for _, volume in items_of(pod_spec(world.job), "volumes", "spec"):
        for key, (kind, name) in _SOURCES.items():
            source = volume.get(key)
            if isinstance(source, Mapping) and source.get(name):
                found.append(f"{kind} {source[name]}")
    return found


# --------------------------------------------------------------------------- the condition


def with_scheduling(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with condition Unschedulable. A gang that is scheduled in time does not get it."""
    kind = JobCondition.UNSCHEDULABLE
    if status.restart_round != world.status.restart_round or has_no_gang(status):
        return status
    lost = None
    if timed_out(world):
        lost = lost_if_deleted(world)
    if lost is not None:
        text = f"{describe(world)}. The other pods of the gang keep their nodes, because {lost}"
        return world.with_condition(status, kind, True, Reason.NODES_KEPT, text)
    placed = all(m.node is not None for m in world.members)
    if not (placed and (status.scheduling is not None or status.is_true(kind))):
        return status
    text = "all pods of the gang have nodes"
    status = changed(status, scheduling=None)
    return world.with_condition(status, kind, False, Reason.SCHEDULED, text)


# --------------------------------------------------------------------------- the pod group in Kueue


def present_group(world: World) -> PodGroup | None:
    """Return the group that new pods of the present round join. None: the pods are in no queue."""
    job = world.job
    if not isinstance(job, TrainingJob):
        return None  # the controller of adopted pods, or Kueue itself, groups them
    for member in world.members:
        if member.pod is not None and not world.awaits_start(member):
            return member.pod.group
    name = pod_group_name(job.name, job.uid, len(world.members), world.round)
    for pod in world.pods:
        if not pod.terminating and pod.group is not None and pod.group.name == name:
            return pod.group
    return wanted_group(job, len(world.members), world.round)


def wanted_group(job: Gang, workers: int, round_: RestartRound) -> PodGroup | None:
    """Return the group that the job's labels ask for in this round. None: they name no queue."""
    queue = queue_of(job)
    if queue is None:
        return None
    return PodGroup(
        name=pod_group_name(job.name, job.uid, workers, round_),
        queue=queue,
        pods=workers,
        priority_class=(job.metadata.labels or {}).get(labels.QUEUE_PRIORITY) or None,
    )


def occupied(world: World) -> frozenset[Worker]:
    """Return the workers whose pods cannot be created yet, because older pods count in their group.

    Kueue would delete the new pod: the group would have more pods than its total count.
    """
    group = present_group(world)
    if group is None:
        return frozenset()
    members = {m.pod.uid for m in world.members if m.pod is not None}
    return frozenset(
        p.worker
        for p in world.observed.pods
        if p.uid not in members and p.group is not None and p.group.name == group.name and counts(p)
    )


def counts(pod: PodView) -> bool:
    """Return whether Kueue counts the pod towards the total of its group.

    A pod that has succeeded counts as long as it exists, and a failed one does not. A deleted pod counts
    until it has ended, unless no node had taken it.
    """
    return pod.phase is not PodPhase.FAILED and not (pod.terminating and pod.node is None)


def strays(world: World) -> list[Delete]:
    """Return deletes of pods that have not started and are not in the present group, or in another queue.

    The priority class is not compared, because Kueue's webhook may add a default one.
    """
    if not isinstance(world.job, TrainingJob):
        return []
    key = _key(present_group(world))
    waiting = (p for m, p in world.waiting if not m.node_lost and _key(p.group) != key)
    return world.deletes(waiting, "it is not in the present pod group")


def waits(world: World) -> tuple[PodView, ...]:
    """Return the members' pods that scheduling gates of Kueue hold back."""
    return tuple(p for p in world.pods if p.queued)


def waits_as_a_whole(world: World) -> bool:
    """Return whether no pod of the gang may run before Kueue admits it."""
    return bool(world.pods) and all(p.queued for p in world.pods)


def describe_wait(world: World) -> str:
    """Describe what the gated pods of the gang wait for, and where to look."""
    waiting = waits(world)
    group, namespace = waiting[0].group, world.job.namespace
    text = f"{len(waiting)} of {len(world.members)} pods wait until Kueue admits them"
    if group is None:
        return (
            f"{text}, each by itself: the job has no label {labels.QUEUE_NAME}. Suspend the job, add the "
            "label, and resume it"
        )
    return (
        f"{text} to LocalQueue {group.queue}. Their Workload says why they wait: "
        f"kubectl -n {namespace} describe workload {group.name}. If it says that the queue does not exist, "
        "create the LocalQueue, or suspend the job, correct its label and resume it"
    )


def describe_change(world: World) -> str | None:
    """Describe labels of the job that its pods cannot follow, or return None if they agree."""
    if not world.pods or not isinstance(world.job, TrainingJob):
        return None
    job, group = world.job, present_group(world)
    wanted = wanted_group(job, len(world.members), world.round)
    if group is None or wanted is None:
        agrees = group is wanted
    else:
        same = wanted.priority_class in (None, group.priority_class)
        agrees = same and group.queue == wanted.queue
    if agrees:
        return None
    return (
        f"the pods are in {_place(group)}, and the labels of the job name {_place(wanted)}. Pods cannot "
        "change their queue, so the gang continues as it is. To apply the labels, set spec.suspend to true "
        "and, when the job is suspended, to false again"
    )


def _key(group: PodGroup | None) -> tuple[str, str] | None:
    return None if group is None else (group.name, group.queue)


def _place(group: PodGroup | None) -> str:
    if group is None:
        return "no queue"
    priority = f" with priority class {group.priority_class}" if group.priority_class else ""
    return f"LocalQueue {group.queue}{priority}"


# --------------------------------------------------------------------------- Kueue's finalizer


def leaving(pods: Iterable[PodView]) -> list[ReleasePod]:
    """Return the releases of the pods that are being deleted."""
    return [
        ReleasePod(p.name, p.uid, ends_group=False)
        for p in pods
        if p.has_kueue_finalizer and p.terminating
    ]


def due(world: World) -> list[ReleasePod]:
    """Return all releases that are due.

    They include those of pods that have ended and stay for their logs, once the job is over. Kueue would
    otherwise wait for their replacements, and keep the quota of the group until then.
    """
    pods = world.observed.pods
    ended = [p for p in pods if p.has_kueue_finalizer and p.ended and not p.terminating]
    over = is_over(world.status)
    return [*leaving(pods), *(ReleasePod(p.name, p.uid, ends_group=True) for p in ended if over)]


# --------------------------------------------------------------------------- the condition


def with_queue(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status of the present round with condition Queued. A gang that was in no queue gets none."""
    kind = JobCondition.QUEUED
    if status.restart_round != world.status.restart_round or has_no_gang(status):
        return status
    status = _with_start(status, world)
    value, reason, text = _state(status, world)
    change = describe_change(world)
    if change is not None:
        reason, text = Reason.QUEUE_CHANGES_LATER, f"{change}. {text}"
    elif value is None:
        return status
    return world.with_condition(status, kind, bool(value), reason, text)


def _state(status: TrainingJobStatus, world: World) -> tuple[bool | None, Reason, str]:
    """Return the value, reason and message of the condition. None: nothing is known about a queue."""
    known = status.condition(JobCondition.QUEUED)
    if waits(world):
        return True, Reason.WAITING_FOR_QUEUE, describe_wait(world)
    if any(m.pod is None for m in world.members):
        # Kueue has not seen all pods of the group yet.
        value = None if known is None else known.is_true
        return value, Reason.WAITING_FOR_QUEUE, "" if known is None else known.message
    group = present_group(world)
    if group is None:
        value = None if known is None else False
        return value, Reason.NOT_QUEUED, "the pods of the gang are in no queue"
    text = f"group {group.name} is admitted to LocalQueue {group.queue}"
    return False, Reason.ADMITTED_BY_QUEUE, text


def _with_start(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status without a start time while the whole gang waits, and with one when it may run.

    As for a Job of batch/v1 that Kueue suspends, activeDeadlineSeconds does not count the wait.
    """
    if status.restart_round is None:
        return status
    if waits_as_a_whole(world):
        return changed(status, start_time=None)
    if status.start_time is None and all(m.pod is not None for m in world.members):
        return changed(status, start_time=world.now.utc)
    return status
