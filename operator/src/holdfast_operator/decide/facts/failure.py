"""What counts as a failure of the gang, whether it counts against the budget, and what it means.

1. A disruption (node lost, pod deleted, eviction) is looked at before exit codes and never counts.
2. A container or image that cannot be had is no failure: waiting costs no restart.
3. The restart of a sidecar's container alone is no failure: ROUND is repeated to it.
4. A pod that is being deleted may save and stop first, for DRAIN_SECONDS, while its gang trains.
5. A pod of this round that has not started is no failure, wherever it is bound: it holds nothing.
6. Silence alone is no failure. Where no sidecar of the job answers, it is the network: the job waits.
   A silent pod is replaced only where what it holds is known to be readable elsewhere (readable).
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace

from holdfast_core.api import JobCondition
from holdfast_core.ids import CheckpointId, Worker
from holdfast_core.messages.schema import DeadRank
from holdfast_core.names import pod_name
from holdfast_operator.decide.facts import readable
from holdfast_operator.decide.facts.times import seconds_since
from holdfast_operator.decide.facts.world import MemberState, World
from holdfast_operator.model.job import JobMemory, Now, PodPhase, PodView, RestartRecord
from holdfast_operator.model.reasons import Reason

DRAIN_SECONDS = 15.0
"""Half of the default grace period: enough for one step and one save, short enough to go on."""
SIDECAR_SILENT_SECONDS = 90.0
"""Above the wait for holders, so that the restore point is decided before a pod is given up."""
ALL_LOST_SECONDS = 300.0
"""Several nodes whose leases stopped while no sidecar of the job answers: more likely the control plane
is cut off from them than that all died at once. Kubernetes waits as long before it evicts."""
MAX_TRAINER_RESTARTS = 2
"""Then the kubelet's back-off grows to minutes: a new pod is faster."""

LAST_WORDS_CHARACTERS = 700
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ")
"""torch's excepthook puts it before each line of a traceback."""
_FRAME = re.compile(r'^  File ".*", line \d+')

FREE_RESTARTS = 2
"""Restarts from the same step that do not wait."""
MAX_DELAY_SECONDS = 60.0

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
"""Words of the kubelet for containers that may come when somebody mends the image or the pod."""
_EVICTED = frozenset({"Evicted", "Preempting", "Preempted", "TerminationByKubelet", "Shutdown"})

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
"""The reason of a round is the first of these among its failures: causes before consequences."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that is wrong with one worker, or with the gang (worker None)."""

    reason: Reason
    message: str
    worker: Worker | None = None
    disruption: bool = False
    exit_code: int | None = None
    replace_pod: bool = False
    confirm_gone: str | None = None
    """Pod whose absence is all that this rests on."""


def find_failures(world: World, memory: JobMemory, now: Now) -> tuple[Failure, ...]:
    """Everything that makes a new round necessary, causes first; empty while all is well."""
    found: list[Failure] = []
    sealed = world.highest_sealed
    if sealed is not None and sealed > world.round:
        words = f"a sidecar is sealed for round {sealed}, the status says {world.round}"
        found.append(Failure(Reason.STATUS_BEHIND, words, disruption=True))
    birth = world.highest_birth
    if birth is not None and birth > world.round:
        words = f"a pod was born in round {birth}, the status says {world.round}"
        found.append(Failure(Reason.STATUS_BEHIND, words, disruption=True))
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
        return None  # nothing can be lost with it: avoidance replaces it in this round
    if pod is None:
        name = f"worker {member.worker}, born in round {member.birth_round}"
        return Failure(
            Reason.POD_LOST,
            f"the pod of {name} is gone",
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
        words = f"pod {pod.name}: {pod.reason or 'disrupted'}: {pod.message}".rstrip(": ")
        return Failure(Reason.POD_EVICTED, words, member.worker, disruption=True, replace_pod=True)
    if pod.terminating:
        if _may_drain(world, pod, memory, now):
            return None
        words = f"pod {pod.name} is being deleted"
        return Failure(Reason.POD_LOST, words, member.worker, disruption=True, replace_pod=True)
    return _of_container(world, member, pod, memory, now)


def _of_lost_node(world: World, member: MemberState, pod: PodView, now: Now) -> Failure | None:
    """A pod that may hold the last copy of every committed step stays a member: its node may come
    back. While others answer, a round without replacement begins and takes stock of what they hold."""
    words = f"node {pod.node} of pod {pod.name} is silent and its sidecar does not answer"
    failure = Failure(Reason.NODE_LOST, words, member.worker, disruption=True, replace_pod=True)
    if not pod.alive:
        return failure  # somebody deleted it, or it has ended
    if _control_plane_may_be_cut_off(world, now):
        return None
    lost = [m.worker for m in world.members if m.node_lost]
    if readable.lost_may_go(world, lost):
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
        words = f"pod {pod.name} failed: {pod.reason or 'no reason given'}: {pod.message}"
        return Failure(
            Reason.OOM_KILLED if oom else Reason.POD_FAILED,
            words.rstrip(": "),
            worker,
            exit_code=pod.trainer_exit_code,
            replace_pod=True,
        )
    if pod.phase is PodPhase.SUCCEEDED:
        if world.status.restore_point is not None:
            return None  # the finish barrier: the others follow
        words = f"pod {pod.name} ended before round {world.round} began to run"
        return Failure(Reason.POD_SUCCEEDED_EARLY, words, worker, disruption=True, replace_pod=True)
    if pod.waiting_reason in CANNOT_START:
        return None
    if pod.trainer_restarts > MAX_TRAINER_RESTARTS and readable.answering_may_go(world, worker):
        words = f"the trainer of pod {pod.name} restarted {pod.trainer_restarts} times"
        return Failure(
            Reason.OOM_KILLED if pod.reason == "OOMKilled" else Reason.TRAINER_RESTARTING,
            words,
            worker,
            exit_code=pod.trainer_exit_code,
            replace_pod=True,
        )
    return _of_sidecar(world, member, pod, memory, now)


def _of_sidecar(
    world: World, member: MemberState, pod: PodView, memory: JobMemory, now: Now
) -> Failure | None:
    """Silence matters only while the round cannot start without an answer: training that runs goes
    on without an operator. It is the pod's own only while other sidecars answer, and its pod goes
    only if nothing that was committed goes with it."""
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
    if not readable.silent_may_go(world, [m.worker for m in world.members if not m.reachable]):
        return None
    words = f"the sidecar of pod {pod.name} has not answered for {silent:.0f} s"
    return Failure(Reason.SIDECAR_UNREACHABLE, words, member.worker, replace_pod=True)


def _may_drain(world: World, pod: PodView, memory: JobMemory, now: Now) -> bool:
    """The gang is told to save and stop at the next boundary when one of its pods is deleted.
    Sealing it at once would lose the steps since the last save."""
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
        words = f"rank {dead.rank} {how_it_ended(dead)}"
        found.append(
            Failure(
                Reason.OOM_KILLED if oom else Reason.RANK_FAILED,
                words,
                dead.worker,
                exit_code=dead.code,
            )
        )
    return found


def how_it_ended(dead: DeadRank) -> str:
    """For conditions and Events: exit code or signal, then the error itself.

    Who was killed from outside had no last word: what it printed before explains nothing.
    """
    if dead.code in (-signal.SIGKILL, -signal.SIGTERM):
        return f"was killed by {signal.Signals(-dead.code).name}"
    words = f"ended with code {dead.code}"
    said = _last_words(dead.message)
    return f"{words}: {said}" if said else words


def _last_words(output: str) -> str:
    """The error and its text, as they follow a traceback. Without a traceback, the end."""
    lines = [_RANK_PREFIX.sub("", line).rstrip() for line in output.splitlines()]
    lines = [line for line in lines if line]
    error = _after_traceback(lines)
    if error:
        return "\n".join(error)[:LAST_WORDS_CHARACTERS]
    text = "\n".join(lines)
    if len(text) <= LAST_WORDS_CHARACTERS:
        return text
    tail = text[-LAST_WORDS_CHARACTERS:]
    return tail[tail.find("\n") + 1 :]


def _after_traceback(lines: list[str]) -> list[str]:
    """Lines after the last frame and its source; an error's own text may be indented by less."""
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
    """One disruption explains the others: ranks die when a peer is taken away."""
    return any(f.disruption for f in failures)


def failing_rule(world: World, failures: tuple[Failure, ...]) -> Failure | None:
    """The failure that failurePolicy.rules say ends the job."""
    if is_disruption(failures):
        return None
    codes = {code for rule in world.observed.job.spec.rules for code in rule.on_exit_codes}
    return next((f for f in failures if f.exit_code in codes), None)


def counted_restarts(world: World, now: Now) -> tuple[RestartRecord, ...]:
    """Those of status.recentRestarts that are still inside the window."""
    start = now.utc - world.observed.job.spec.restart_window
    return tuple(r for r in world.status.recent_restarts if r.at > start)


def restart_delay_seconds(world: World, failures: tuple[Failure, ...], now: Now) -> float:
    """How long a failure is looked at before the next round begins.

    None for disruptions and after progress. A gang that fails again and again from the same step
    would otherwise spend its whole budget within seconds, before anybody can look.
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
    """The restore point, where the ranks failed by themselves before they had finished a step.

    A rank that was killed from outside, or ran out of memory, says nothing about what it restored.
    """
    point, state = world.status.restore_point, world.coordinator
    if point is None or point.step is None or point.round is None or point.job_uid is not None:
        return None
    if world.status.is_true(JobCondition.RUNNING) or state is None:
        return None
    if any(p.step > point.step for p in state.progress):
        return None
    killed = (-signal.SIGKILL, -signal.SIGTERM)
    own = any(
        f.reason is Reason.RESTORE_FAILED
        or (f.reason is Reason.RANK_FAILED and f.exit_code not in killed)
        for f in failures
    )
    return CheckpointId(point.step, point.round) if own else None


def budget_spent(world: World, failures: tuple[Failure, ...], now: Now) -> bool:
    """One more restart would be over failurePolicy.maxRestarts."""
    if is_disruption(failures):
        return False
    return len(counted_restarts(world, now)) >= world.observed.job.spec.max_restarts
