"""Find the failures of the gang. Pure.

1. Disruptions (lost node, deleted pod, eviction) are checked before exit codes and never count. An eviction
   because of the pod's own limit is none: the next pod would exceed it, too.
2. A container that the kubelet cannot start for want of its image or its configuration is not a failure.
   The job waits without a restart.
3. The restart of a sidecar container alone is not a failure. ROUND is sent to the sidecar again.
4. While a gang trains, a pod that is deleted or evicted has its grace period to save, stop and flush.
5. A pod of this round that has not started is not a failure, whatever its node: it holds no data.
6. A sidecar that does not answer is not a failure by itself (ADR 0007). If no sidecar of the job answers,
   the cause is probably the network, and the job waits. Otherwise the pod is replaced only if the newest
   committed step is known to be readable without it (readable.py).
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from holdfast_core.api import JobCondition
from holdfast_core.ids import Worker
from holdfast_core.messages.schema import CoordinatorState
from holdfast_operator.decide.facts import readable
from holdfast_operator.decide.facts.apart import restore_point_is_missing
from holdfast_operator.decide.facts.departures import leaving_taint
from holdfast_operator.decide.facts.times import seconds_since
from holdfast_operator.decide.facts.world import MemberState, World
from holdfast_operator.model.job import JobMemory, Now, PodPhase, PodView
from holdfast_operator.model.rank_ends import how_it_ended
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.wording import first_cause

KUBELET_SECONDS = 10.0
"""Time after the grace period of a leaving pod in which its kubelet reports that it is gone."""
COORDINATOR_ANSWER_SECONDS = 10.0
"""Time for the coordinator to answer an operator process that finds a pod leaving when it starts. Without it,
the new process would seal a gang that is saving."""
ENDING_SECONDS = 60.0
"""Time in which all pods of a gang end after the first of them has succeeded."""
SIDECAR_SILENT_SECONDS = 90.0
"""Time without an answer after which a sidecar counts as failed. It is longer than
restore_point.HOLDERS_SECONDS, so that the restore point is chosen before a pod is replaced."""
ALL_LOST_SECONDS = 300.0
"""Wait before several lost nodes count as failed while no sidecar of the job answers. A control plane that is
cut off from the nodes is more likely than the loss of all of them. Kubernetes waits as long before it
evicts pods."""
MAX_TRAINER_RESTARTS = 2
"""Restarts of a trainer container after which its pod is replaced. The kubelet's back-off then grows to
minutes, and a new pod starts sooner."""
CANNOT_START = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "RegistryUnavailable",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "StartError",
    }
)
"""The kubelet's reasons for containers that can start once a user corrects the image or the pod."""
OOM_KILLED = "OOMKilled"
"""The kubelet's reason for a container that the kernel ended because its memory ran out."""
_EVICTED = frozenset({"Evicted", "Preempting", "Preempted", "TerminationByKubelet", "Shutdown"})
_SEVERITY = (
    Reason.STATUS_BEHIND,
    Reason.NODE_LOST,
    Reason.POD_EVICTED,
    Reason.POD_LOST,
    Reason.OOM_KILLED,
    Reason.TRAINER_RESTARTING,
    Reason.POD_FAILED,
    Reason.CHECKPOINT_MISSING,
    Reason.RESTORE_FAILED,
    Reason.RANK_FAILED,
    Reason.HUNG,
    Reason.SIDECAR_UNREACHABLE,
    Reason.POD_SUCCEEDED_EARLY,
)
"""Order of failures, causes before consequences. A new round takes the reason of its first failure."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of one worker, or of the gang (worker None)."""

    reason: Reason
    message: str
    worker: Worker | None = None
    disruption: bool = False
    exit_code: int | None = None
    replace_pod: bool = False
    confirm_gone: str | None = None
    """Name of a pod whose absence is the only evidence of this failure."""


def severity(reason: str) -> int:
    """Return the place of a reason in the order of failures. A cause has a lower one than what follows it.

    A reason of a round that is no failure, such as Resumed, comes last.
    """
    known = [str(r) for r in _SEVERITY]
    return known.index(reason) if reason in known else len(known)


def find_failures(world: World, memory: JobMemory, now: Now) -> tuple[Failure, ...]:
    """Return all failures that make a new round necessary, causes before consequences."""
    found: list[Failure] = []
    sealed = world.highest_sealed
    if sealed is not None and sealed > world.round:
        text = f"a sidecar is sealed for round {sealed}, but the status is in round {world.round}"
        found.append(Failure(Reason.STATUS_BEHIND, text, disruption=True))
    birth = world.highest_birth
    if birth is not None and birth > world.round:
        text = f"a pod was created in round {birth}, but the status is in round {world.round}"
        found.append(Failure(Reason.STATUS_BEHIND, text, disruption=True))
    for pod in world.observed.pods:
        if pod.birth_round == world.round and world.is_ahead(pod):
            text = f"pod {pod.name} was created, but by the status worker {pod.worker} has an older pod"
            found.append(Failure(Reason.STATUS_BEHIND, text, disruption=True))
    for member in world.members:
        failure = _of_member(world, member, memory, now)
        if failure is not None:
            found.append(failure)
    found.extend(_of_ranks(world))
    found.extend(_of_hang(world))
    found.extend(_of_restore(world, memory, now))
    return tuple(sorted(found, key=lambda f: _SEVERITY.index(f.reason)))


def _of_member(world: World, member: MemberState, memory: JobMemory, now: Now) -> Failure | None:
    pod = member.pod
    if world.awaits_start(member):
        return None  # it holds no data: avoidance.py replaces it in this round
    if pod is None:
        name = world.source.gone_name(member.worker, member.birth_round)
        announced = dict(memory.announced).get(name or "")
        worker = f"worker {member.worker}, created in round {member.birth_round}"
        return Failure(
            Reason.POD_LOST if announced is None else Reason.POD_EVICTED,
            f"the pod of {worker} no longer exists" if announced is None else announced,
            member.worker,
            disruption=True,
            replace_pod=True,
            confirm_gone=name,
        )
    if member.node_lost:
        return _of_lost_node(world, member, pod, now)
    if pod.leaving and _may_drain(world, pod, memory, now):
        return None
    if pod.disrupted or (
        pod.phase is PodPhase.FAILED and pod.reason in _EVICTED and not pod.exceeded_own_limit
    ):
        return Failure(
            Reason.POD_EVICTED, pod.disruption, member.worker, disruption=True, replace_pod=True
        )
    if pod.terminating:
        text = f"pod {pod.name} is being deleted{_node_leaves(world, pod)}"
        return Failure(Reason.POD_LOST, text, member.worker, disruption=True, replace_pod=True)
    return _of_container(world, member, pod, memory, now)


def _node_leaves(world: World, pod: PodView) -> str:
    node = world.observed.nodes.get(pod.node or "")
    taint = None if node is None else leaving_taint(pod, node)
    return "" if taint is None else f", and its node {pod.node} has the taint {taint}"


def _of_lost_node(world: World, member: MemberState, pod: PodView, now: Now) -> Failure | None:
    """Return the failure of a member on a lost node, or None while the gang waits for the node.

    A pod that may hold the last copy of every committed step stays a member, because its node may come back.
    If other members answer, a round that keeps the pod begins, and their inventories show what they hold.
    """
    node = world.observed.nodes[pod.node or ""]
    text = f"node {pod.node} of pod {pod.name} {node.lost_because}, and the pod's sidecar does not answer"
    failure = Failure(Reason.NODE_LOST, text, member.worker, disruption=True, replace_pod=True)
    if not pod.alive:
        return failure  # a user deleted it, or it has ended
    if _control_plane_may_be_cut_off(world, now):
        return None
    lost = [m.worker for m in world.members if m.node_lost]
    if readable.lost_can_be_given_up(world, lost):
        return failure
    if world.status.restore_point is None or not any(m.reachable for m in world.members):
        return None
    return replace(failure, replace_pod=False)


def _control_plane_may_be_cut_off(world: World, now: Now) -> bool:
    silent = [m for m in world.members if m.node_lost and m.sidecar is not None]
    if any(m.reachable for m in world.members) or len({_node(m) for m in silent}) < 2:
        return False
    newest = max(
        (m.sidecar.unreachable_since or 0.0 for m in silent if m.sidecar is not None), default=0.0
    )
    return seconds_since(newest, now) < ALL_LOST_SECONDS


def _node(member: MemberState) -> str | None:
    return None if member.pod is None else member.pod.node


def _of_container(
    world: World, member: MemberState, pod: PodView, memory: JobMemory, now: Now
) -> Failure | None:
    worker = member.worker
    if pod.phase is PodPhase.FAILED:
        oom = pod.reason == OOM_KILLED
        text = f"pod {pod.name} failed: {pod.reason or 'no reason given'}: {pod.message}"
        if oom:
            text = f"pod {pod.name} failed: {out_of_memory(pod)}"
        elif world.fixed_node is not None and not pod.trainer_ran:
            # No scheduler has compared the pod with the node, so its kubelet may have rejected the pod.
            text = f"{text.rstrip(': ')}. {world.fixed_node_advice}"
        return Failure(
            Reason.OOM_KILLED if oom else Reason.POD_FAILED,
            text.rstrip(": "),
            worker,
            exit_code=pod.trainer_exit_code,
            replace_pod=True,
        )
    if pod.phase is PodPhase.SUCCEEDED:
        return _of_succeeded(world, worker, pod, memory, now)
    if pod.waiting_reason in CANNOT_START:
        return None
    if pod.trainer_restarts > MAX_TRAINER_RESTARTS and readable.answering_can_be_replaced(
        world, [worker]
    ):
        text = f"the trainer of pod {pod.name} restarted {pod.trainer_restarts} times"
        if pod.reason == OOM_KILLED:
            text += f": {out_of_memory(pod)}"
        return Failure(
            Reason.OOM_KILLED if pod.reason == OOM_KILLED else Reason.TRAINER_RESTARTING,
            text,
            worker,
            exit_code=pod.trainer_exit_code,
            replace_pod=True,
        )
    return _of_sidecar(world, member, pod, memory, now)


def _of_succeeded(
    world: World, worker: Worker, pod: PodView, memory: JobMemory, now: Now
) -> Failure | None:
    """Return the failure of a member whose containers returned 0 although the gang has not finished, or None.

    The launchers of a gang return together, after its last step, so the other pods have ENDING_SECONDS to
    follow. A script that catches its launcher's error and returns 0 would otherwise leave them waiting.
    """
    if world.status.restore_point is None:
        text = f"pod {pod.name} ended before round {world.round} began to run"
        return Failure(Reason.POD_SUCCEEDED_EARLY, text, worker, disruption=True, replace_pod=True)
    waited = seconds_since(memory.ending_since, now)
    if waited < ENDING_SECONDS:
        return None
    text = (
        f"the containers of pod {pod.name} returned 0, and other pods of the gang still run {waited:.0f} s "
        "later. A trainer container must return what `holdfast run` returns"
    )
    return Failure(
        Reason.POD_SUCCEEDED_EARLY, text, worker, exit_code=pod.trainer_exit_code, replace_pod=True
    )


def _of_sidecar(
    world: World, member: MemberState, pod: PodView, memory: JobMemory, now: Now
) -> Failure | None:
    """Return the failure of a member whose sidecar has not answered for SIDECAR_SILENT_SECONDS, or None.

    It matters only until the gang trains, because a gang that trains does not need the operator. It counts
    only while other sidecars answer, and only if no committed step would be lost with the pod.
    """
    sidecar = member.sidecar
    if (
        sidecar is None
        or sidecar.unreachable_since is None
        or memory.answering_since is None
        or member.reachable
        or world.status.is_true(JobCondition.RUNNING)
        or pod.phase is not PodPhase.RUNNING
    ):
        return None
    silent = seconds_since(max(sidecar.unreachable_since, memory.answering_since), now)
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


def drains(world: World, memory: JobMemory, now: Now) -> bool:
    """Return whether the gang is saving and stopping because at least one of its pods leaves."""
    return any(
        m.pod is not None and m.pod.leaving and _may_drain(world, m.pod, memory, now)
        for m in world.members
        if not m.node_lost
    )


def _may_drain(world: World, pod: PodView, memory: JobMemory, now: Now) -> bool:
    """Return whether a leaving pod still has time: its gang saves and stops, and its sidecar flushes.

    If a new round sealed the gang before, the steps since the last save would be lost. A rank that hangs does
    not cost the grace period: its launcher kills it earlier, and the gang then has a dead rank.
    """
    if world.status.restore_point is None or pod.phase is not PodPhase.RUNNING:
        return False
    waited = seconds_since(dict(memory.leaving_since).get(pod.uid), now)
    state = world.coordinator
    if state is None:
        trains = world.status.is_true(JobCondition.RUNNING)
        return trains and waited < COORDINATOR_ANSWER_SECONDS
    if not state.running or state.finished or state.dead or _has_left(world, pod, state):
        return False
    return waited < pod.grace_seconds + KUBELET_SECONDS


def _has_left(world: World, pod: PodView, state: CoordinatorState) -> bool:
    """Return whether the trainer has ended and other pods have copies of the newest step.

    The round then begins before the kubelet reports that the pod is gone. If several pods leave, or another
    one is gone, the copies may have been there.
    """
    progress, copied = state.progress, state.last_replicated
    return (
        pod.trainer_exit_code is not None
        and world.copies > 0
        and all(m.pod is not None for m in world.members)
        and sum(m.pod is not None and m.pod.leaving for m in world.members) == 1
        and progress is not None
        and copied is not None
        and copied.step == progress.last
    )


def _of_ranks(world: World) -> list[Failure]:
    state = world.coordinator
    if state is None or world.status.restore_point is None:
        return []
    found = []
    for dead in state.dead:
        member = world.member(dead.worker)
        pod = None if member is None else member.pod
        # The kubelet shows the newest end of the container, which may belong to an earlier round. The ranks
        # that the kernel ended with their launcher have this code.
        ended = dead.code == -signal.SIGKILL and pod is not None and pod.reason == OOM_KILLED
        oom = dead.out_of_memory is not None or ended
        text = f"rank {dead.rank} {how_it_ended(dead)}"
        if ended and pod is not None and dead.out_of_memory is None:
            text += f": {out_of_memory(pod)}"
        found.append(
            Failure(
                Reason.OOM_KILLED if oom else Reason.RANK_FAILED,
                text,
                dead.worker,
                exit_code=dead.code,
            )
        )
    return found


def _of_restore(world: World, memory: JobMemory, now: Now) -> list[Failure]:
    """Return a failure if the restore point cannot be read and a new round may help.

    A round that waits for a missing restore point goes on by itself when the restore point is there again
    (apart.py). It ends if ranks have ended for want of it, or if there is another checkpoint.
    """
    state = world.coordinator
    if state is None or not state.cannot_restore:
        return []
    cause = first_cause(state.cannot_restore)
    if not restore_point_is_missing(world):
        return [Failure(Reason.RESTORE_FAILED, cause)]
    if not state.dead and not readable.leaves_missing_restore_point(world, memory, now):
        return []
    return [Failure(Reason.CHECKPOINT_MISSING, cause)]


def _of_hang(world: World) -> list[Failure]:
    """Return a failure of each worker that the gang waits for, or one of the gang if none is known."""
    state = world.coordinator
    if state is None or state.hang is None or world.status.restore_point is None:
        return []
    procs = world.observed.job.spec.procs_per_worker
    late = sorted({Worker(rank // procs) for rank in state.hang.late})
    known = [Failure(Reason.HUNG, state.hang.message, w) for w in late if w < len(world.members)]
    return known or [Failure(Reason.HUNG, state.hang.message)]


def is_disruption(failures: tuple[Failure, ...]) -> bool:
    """Return whether any of the failures is a disruption.

    One disruption explains the other failures: ranks die when one of their peers disappears.
    """
    return any(f.disruption for f in failures)
