"""The pod group in Kueue that the pods of a gang join, and when a pod may join or leave it (ADR 0012). Pure.

The present pods are the record of the group, so nothing in the status can contradict them:
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

from collections.abc import Iterable

from holdfast_core.api import Gang, JobCondition, TrainingJob, TrainingJobStatus, changed
from holdfast_core.ids import RestartRound, Worker
from holdfast_core.names import pod_group_name
from holdfast_operator.decide.facts.world import MemberState, World, has_no_gang, is_over
from holdfast_operator.model import labels
from holdfast_operator.model.actions import Delete, ReleasePod
from holdfast_operator.model.job import PodGroup, PodPhase, PodView, queue_of
from holdfast_operator.model.reasons import Reason


def present_group(world: World) -> PodGroup | None:
    """Return the group that new pods of the present round join. None: the pods are in no queue."""
    job = world.job
    if not isinstance(job, TrainingJob):
        return None  # the controller of adopted pods, or Kueue itself, groups them
    for member in world.members:
        if member.pod is not None and not world.awaits_start(member):
            return member.pod.group
    name = pod_group_name(job.name, job.uid, len(world.members), world.round)
    for pod in _pods(world):
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
    waiting = (p for m, p in _waiting(world) if not m.node_lost and _key(p.group) != key)
    return world.deletes(waiting, "it is not in the present pod group")


def waits(world: World) -> tuple[PodView, ...]:
    """Return the members' pods that scheduling gates of Kueue hold back."""
    return tuple(p for p in _pods(world) if p.queued)


def waits_as_a_whole(world: World) -> bool:
    """Return whether no pod of the gang may run before Kueue admits it."""
    pods = tuple(_pods(world))
    return bool(pods) and all(p.queued for p in pods)


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
    if next(iter(_pods(world)), None) is None or not isinstance(world.job, TrainingJob):
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


def _pods(world: World) -> Iterable[PodView]:
    return (m.pod for m in world.members if m.pod is not None)


def _waiting(world: World) -> list[tuple[MemberState, PodView]]:
    """Return the members whose pods exist and have not started."""
    return [(m, m.pod) for m in world.members if m.pod is not None and world.awaits_start(m)]


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
