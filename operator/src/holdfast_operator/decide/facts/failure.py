"""Find failures of the gang, and decide whether they count towards failurePolicy.maxRestarts. Pure.

1. Disruptions (lost node, deleted pod, eviction) are checked before exit codes and never count.
2. A container that the kubelet cannot start for want of its image or its configuration is not a failure.
   The job waits without a restart.
3. The restart of a sidecar container alone is not a failure. ROUND is sent to the sidecar again.
4. While a gang trains, a pod that is being deleted has DRAIN_SECONDS to save and stop.
5. A pod of this round that has not started is not a failure, whatever its node: it holds no data.
6. Pods that are lost within GATHER_SECONDS of the first one are lost in the same round.
7. A sidecar that does not answer is not a failure by itself (ADR 0040). If no sidecar of the job answers,
   the cause is probably the network, and the job waits. Otherwise the pod is replaced only if the newest
   committed step is known to be readable without it (readable.py).
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace

from holdfast_core.api import JobCondition, RestartRecord
from holdfast_core.ids import CheckpointId, Worker
from holdfast_core.messages.schema import DeadRank
from holdfast_core.names import pod_name
from holdfast_operator.decide.facts import readable
from holdfast_operator.decide.facts.times import seconds_since
from holdfast_operator.decide.facts.world import MemberState, World
from holdfast_operator.model.job import JobMemory, Now, PodPhase, PodView
from holdfast_operator.model.reasons import Reason

DRAIN_SECONDS = 15.0
"""Time for a deleted pod's gang to save and stop: enough for one step and one save, and half of the default
grace period of a pod."""
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

LAST_OUTPUT_CHARACTERS = 700
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ")
"""Prefix that torch's excepthook writes before each line of a traceback."""
_FRAME = re.compile(r'^  File ".*", line \d+')

FREE_RESTARTS = 2
"""Restarts from the same step that begin without a delay."""
MAX_DELAY_SECONDS = 60.0
GATHER_SECONDS = 0.3
"""Time from the first lost pod until the next round begins. Pods that are lost together are seen one after
another. Without this wait, each pod that was seen after the round had begun would cost a round of its own."""

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
_EVICTED = frozenset({"Evicted", "Preempting", "Preempted", "TerminationByKubelet", "Shutdown"})

_LOSSES = frozenset({Reason.NODE_LOST, Reason.POD_EVICTED, Reason.POD_LOST})
"""Failures that often come with more of their kind."""

_SEVERITY = (
    Reason.STATUS_BEHIND,
    Reason.NODE_LOST,
    Reason.POD_EVICTED,
    Reason.POD_LOST,
    Reason.OOM_KILLED,
    Reason.TRAINER_RESTARTING,
    Reason.POD_FAILED,
    Reason.RANK_FAILED,
    Reason.RESTORE_FAILED,
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
    for member in world.members:
        failure = _of_member(world, member, memory, now)
        if failure is not None:
            found.append(failure)
    found.extend(_of_ranks(world))
    state = world.coordinator
    if state is not None and state.cannot_restore:
        found.append(Failure(Reason.RESTORE_FAILED, state.cannot_restore))
    return tuple(sorted(found, key=lambda f: _SEVERITY.index(f.reason)))


def _of_member(world: World, member: MemberState, memory: JobMemory, now: Now) -> Failure | None:
    pod = member.pod
    if world.awaits_start(member):
        return None  # it holds no data: avoidance.py replaces it in this round
    if pod is None:
        name = f"worker {member.worker}, created in round {member.birth_round}"
        return Failure(
            Reason.POD_LOST,
            f"the pod of {name} no longer exists",
            member.worker,
            disruption=True,
            replace_pod=True,
            confirm_gone=_gone_name(world, member),
        )
    if member.node_lost:
        return _of_lost_node(world, member, pod, now)
    if pod.disrupted or (pod.phase is PodPhase.FAILED and pod.reason in _EVICTED):
        if pod.terminating and _may_drain(world, pod, memory, now):
            return None
        text = f"pod {pod.name}: {pod.reason or 'disrupted'}: {pod.message}".rstrip(": ")
        return Failure(Reason.POD_EVICTED, text, member.worker, disruption=True, replace_pod=True)
    if pod.terminating:
        if _may_drain(world, pod, memory, now):
            return None
        text = f"pod {pod.name} is being deleted"
        return Failure(Reason.POD_LOST, text, member.worker, disruption=True, replace_pod=True)
    return _of_container(world, member, pod, memory, now)


def _of_lost_node(world: World, member: MemberState, pod: PodView, now: Now) -> Failure | None:
    """Return the failure of a member on a lost node, or None while the gang waits for the node.

    A pod that may hold the last copy of every committed step stays a member, because its node may come back.
    If other members answer, a round that keeps the pod begins, and their inventories show what they hold.
    """
    text = (
        f"node {pod.node} of pod {pod.name} does not renew its lease, and the pod's sidecar "
        "does not answer"
    )
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
        oom = pod.reason == "OOMKilled"
        text = f"pod {pod.name} failed: {pod.reason or 'no reason given'}: {pod.message}"
        return Failure(
            Reason.OOM_KILLED if oom else Reason.POD_FAILED,
            text.rstrip(": "),
            worker,
            exit_code=pod.trainer_exit_code,
            replace_pod=True,
        )
    if pod.phase is PodPhase.SUCCEEDED:
        if world.status.restore_point is not None:
            return None  # its ranks have finished, and the pods of the other members end soon
        text = f"pod {pod.name} ended before round {world.round} began to run"
        return Failure(Reason.POD_SUCCEEDED_EARLY, text, worker, disruption=True, replace_pod=True)
    if pod.waiting_reason in CANNOT_START:
        return None
    if pod.trainer_restarts > MAX_TRAINER_RESTARTS and readable.answering_can_be_replaced(
        world, worker
    ):
        text = f"the trainer of pod {pod.name} restarted {pod.trainer_restarts} times"
        return Failure(
            Reason.OOM_KILLED if pod.reason == "OOMKilled" else Reason.TRAINER_RESTARTING,
            text,
            worker,
            exit_code=pod.trainer_exit_code,
            replace_pod=True,
        )
    return _of_sidecar(world, member, pod, memory, now)


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


def _may_drain(world: World, pod: PodView, memory: JobMemory, now: Now) -> bool:
    """Return whether the gang of a pod that is being deleted still has time to save and stop.

    The deletion of a pod asks its gang to save and stop at the next step boundary. If a new round sealed the
    gang before, the steps since the last save would be lost.
    """
    state = world.coordinator
    if (
        world.status.restore_point is None
        or state is None
        or not state.running
        or state.finished
        or state.dead
        or pod.phase is not PodPhase.RUNNING
        or pod.trainer_exit_code is not None
    ):
        return False
    since = dict(memory.terminating_since).get(pod.uid)
    return seconds_since(since, now) < DRAIN_SECONDS


def _of_ranks(world: World) -> list[Failure]:
    state = world.coordinator
    if state is None or world.status.restore_point is None:
        return []
    found = []
    for dead in state.dead:
        member = world.member(dead.worker)
        oom = member is not None and member.pod is not None and member.pod.reason == "OOMKilled"
        text = f"rank {dead.rank} {how_it_ended(dead)}"
        found.append(
            Failure(
                Reason.OOM_KILLED if oom else Reason.RANK_FAILED,
                text,
                dead.worker,
                exit_code=dead.code,
            )
        )
    return found


def how_it_ended(dead: DeadRank) -> str:
    """Describe the end of a rank for conditions and Events: exit code or signal, then its error output.

    The output is left out for SIGKILL and SIGTERM, because it does not explain a kill from outside.
    """
    if dead.code in (-signal.SIGKILL, -signal.SIGTERM):
        return f"was killed by {signal.Signals(-dead.code).name}"
    text = f"ended with code {dead.code}"
    output = _last_output(dead.message)
    return f"{text}: {output}" if output else text


def _last_output(output: str) -> str:
    """Return the error that follows the last traceback, or the end of the output if there is none."""
    lines = [_RANK_PREFIX.sub("", line).rstrip() for line in output.splitlines()]
    lines = [line for line in lines if line]
    error = _after_traceback(lines)
    if error:
        return "\n".join(error)[:LAST_OUTPUT_CHARACTERS]
    text = "\n".join(lines)
    if len(text) <= LAST_OUTPUT_CHARACTERS:
        return text
    tail = text[-LAST_OUTPUT_CHARACTERS:]
    return tail[tail.find("\n") + 1 :]


def _after_traceback(lines: list[str]) -> list[str]:
    """Return the lines after the last frame and its source, or nothing if there is no frame.

    Lines that are indented by four spaces or more belong to the source. The text of an error may be indented
    by less.
    """
    frames = [i for i, line in enumerate(lines) if _FRAME.match(line)]
    if not frames:
        return []
    rest = lines[frames[-1] + 1 :]
    source = next((i for i, line in enumerate(rest) if not line.startswith("    ")), len(rest))
    return rest[source:]


def _gone_name(world: World, member: MemberState) -> str:
    job = world.observed.job
    return pod_name(job.name, job.uid, member.worker, member.birth_round)


def is_disruption(failures: tuple[Failure, ...]) -> bool:
    """Return whether any of the failures is a disruption.

    One disruption explains the other failures: ranks die when one of their peers disappears.
    """
    return any(f.disruption for f in failures)


def failing_rule(world: World, failures: tuple[Failure, ...]) -> Failure | None:
    """Return the failure for which failurePolicy.rules demand the end of the job, or None."""
    if is_disruption(failures):
        return None
    codes = {
        code for rule in world.observed.job.spec.failure_policy.rules for code in rule.on_exit_codes
    }
    return next((f for f in failures if f.exit_code in codes), None)


def counted_restarts(world: World, now: Now) -> tuple[RestartRecord, ...]:
    """Return the entries of status.recentRestarts that are inside failurePolicy.window."""
    start = now.utc - world.observed.job.spec.failure_policy.window_length
    return tuple(r for r in world.status.recent_restarts if r.at > start)


def gather_seconds(
    world: World, failures: tuple[Failure, ...], memory: JobMemory, now: Now
) -> float:
    """Return the seconds for which the next round waits for further lost pods.

    The wait counts from the first failure or the first deletion of a lost pod that was seen. So a pod whose
    gang has saved and stopped after its deletion delays nothing. The result is 0 if no pod is lost, or if no
    other pod is left.
    """
    lost = {f.worker for f in failures if f.reason in _LOSSES}
    if not lost or not any(m.alive and m.worker not in lost for m in world.members):
        return 0.0
    leaving = dict(memory.terminating_since)
    pods = (m.pod for m in world.members if m.worker in lost)
    seen = [leaving[pod.uid] for pod in pods if pod is not None and pod.uid in leaving]
    if memory.failure_seen_at is not None:
        seen.append(memory.failure_seen_at)
    return max(0.0, GATHER_SECONDS - seconds_since(min(seen, default=None), now))


def restart_delay_seconds(world: World, failures: tuple[Failure, ...], now: Now) -> float:
    """Return the back-off before the next round, in seconds since the failure was first seen.

    It is 0 for disruptions, and if a step was committed since the restore point. Without the back-off, a gang
    that fails repeatedly from the same step would spend its restart budget within seconds, before a user can
    look at it.
    """
    if is_disruption(failures):
        return 0.0
    status = world.status
    point = status.restore_point
    base_step = None if point is None else point.step
    committed = status.last_committed_step
    if committed is not None and (base_step is None or committed > base_step):
        return 0.0
    base_round = -1 if point is None or point.round is None else point.round
    futile = sum(1 for r in counted_restarts(world, now) if r.round > base_round)
    if futile < FREE_RESTARTS:
        return 0.0
    return min(2.0 ** (futile - FREE_RESTARTS), MAX_DELAY_SECONDS)


def failed_from_restore_point(world: World, failures: tuple[Failure, ...]) -> CheckpointId | None:
    """Return the restore point if ranks failed by themselves before one had finished a step, else None.

    Ranks that were killed from outside or ran out of memory do not count, because such an end is no evidence
    against the checkpoint that they restored.
    """
    point, state = world.status.restore_point, world.coordinator
    if point is None or point.step is None or point.round is None or point.job_uid is not None:
        return None
    if world.status.is_true(JobCondition.RUNNING) or state is None:
        return None
    if state.progress is not None and state.progress.last > point.step:
        return None
    killed = (-signal.SIGKILL, -signal.SIGTERM)
    own = any(
        f.reason is Reason.RESTORE_FAILED
        or (f.reason is Reason.RANK_FAILED and f.exit_code not in killed)
        for f in failures
    )
    return CheckpointId(point.step, point.round) if own else None


def budget_spent(world: World, failures: tuple[Failure, ...], now: Now) -> bool:
    """Return whether a restart for these failures would exceed failurePolicy.maxRestarts."""
    if is_disruption(failures):
        return False
    return len(counted_restarts(world, now)) >= world.observed.job.spec.failure_policy.max_restarts
