"""Condition SidecarsUnreachable: sidecars that do not answer, the failed call, and what to check. Pure."""

from __future__ import annotations

from holdfast_core.api import JobCondition, TrainingJobStatus
from holdfast_core.clock import stamp
from holdfast_core.contract import CONTROL_PORT, SIDECAR_CONTAINER
from holdfast_operator.decide.facts import readable
from holdfast_operator.decide.facts.failure import ALL_LOST_SECONDS
from holdfast_operator.decide.facts.times import seconds_since
from holdfast_operator.decide.facts.world import MemberState, World
from holdfast_operator.decide.report.status import Note, set_condition
from holdfast_operator.model.job import JobMemory, Now, PodPhase, Reachable
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.wording import first_of

REPORTED_AFTER_SECONDS = 30.0
"""Time without an answer after which the condition reports a sidecar. The restart of a sidecar container
takes less time, and is not reported."""
LEASE_MARGIN_SECONDS = 5.0
"""Margin on suspectAfterSeconds, because the operator notices a stopped lease a little later than that."""


def silent_peer(world: World, memory: JobMemory, now: Now) -> str | None:
    """Return why failed ranks do not begin a round yet: a peer's node may be lost. None: they do.

    When such a node closes its connections, the other ranks fail within seconds, but its lease counts as
    stopped only after suspectAfterSeconds. A round that began before could only wait for that node. It would
    be an additional round and count towards maxRestarts (ADR 0008).
    """
    failed_at, state = memory.failure_seen_at, world.coordinator
    if failed_at is None or state is None or not state.dead:
        return None
    seconds = world.observed.job.spec.node_loss.suspect_after_seconds + LEASE_MARGIN_SECONDS
    for member in world.members:
        answered_at = None if member.sidecar is None else member.sidecar.answered_at
        if member.pod is None or not _may_answer(member) or answered_at is None:
            continue
        if answered_at < failed_at and now.monotonic - failed_at < seconds:
            return (
                f"the sidecar of pod {member.pod.name} has not answered since then, so its node "
                "may be lost. The next round begins when it answers or its node counts as lost, "
                f"after {seconds:.0f} s at most"
            )
    return None


def with_silence(status: TrainingJobStatus, world: World, now: Now) -> TrainingJobStatus:
    """Return the status with the present condition SidecarsUnreachable.

    The condition turns False only when every sidecar has answered, or the job has ended or is suspended. An
    operator that has just started has called no sidecar yet, so it keeps the condition of its predecessor.
    """
    old = status.condition(JobCondition.SIDECARS_UNREACHABLE)
    silent = [m for m in world.members if _is_silent(m, now)]
    generation = world.observed.job.generation
    if status.completion_time is not None or status.is_true(JobCondition.SUSPENDED):
        silent, settled = [], True
    else:
        settled = all(m.reachable for m in world.members if _may_answer(m))
    if silent:
        since = now.utc if old is None or not old.is_true else old.last_transition_time
        note = Note(_reason(world), _text(world, silent, stamp(since)))
        return set_condition(status, JobCondition.SIDECARS_UNREACHABLE, True, note, now, generation)
    if old is None or not old.is_true or not settled:
        return status
    note = Note(Reason.SIDECARS_ANSWER, "every sidecar whose pod runs answers the operator")
    return set_condition(status, JobCondition.SIDECARS_UNREACHABLE, False, note, now, generation)


def _may_answer(member: MemberState) -> bool:
    pod = member.pod
    return pod is not None and pod.alive and pod.phase is PodPhase.RUNNING


def _is_silent(member: MemberState, now: Now) -> bool:
    sidecar = member.sidecar
    return (
        _may_answer(member)
        and sidecar is not None
        and sidecar.reachable is Reachable.NO
        and seconds_since(sidecar.unreachable_since, now) >= REPORTED_AFTER_SECONDS
    )


def _reason(world: World) -> Reason:
    answering = any(m.reachable for m in world.members)
    return Reason.SOME_SIDECARS_SILENT if answering else Reason.NO_SIDECAR_ANSWERS


def _text(world: World, silent: list[MemberState], since: str) -> str:
    job = world.observed.job
    names = [m.pod.name for m in silent if m.pod is not None]
    listed = first_of(names)
    because = next((m.sidecar.unreachable_because for m in silent if m.sidecar is not None), "")
    found = f": {because}" if because else ""
    return (
        f"{len(silent)} of {len(world.members)} sidecars have not answered the operator since "
        f"{since}{found}. For this reason alone the operator deletes no pod and begins no round, "
        "and running ranks continue. Check that NetworkPolicies and the pod network let the "
        f"operator reach TCP port {CONTROL_PORT} in namespace {job.namespace}, and the logs of "
        f"container {SIDECAR_CONTAINER}. To give up the steps that only a silent pod has, delete "
        f"the pod. Pods: {listed}{_lost_nodes(world)}"
    )


def _lost_nodes(world: World) -> str:
    """Return which nodes of the gang are lost and what follows, or ""."""
    lost = {m.worker: m.pod.node for m in world.members if m.pod is not None and m.node_lost}
    if not lost:
        return ""
    if readable.lost_can_be_given_up(world, list(lost)):
        then = f"A round on other nodes begins {ALL_LOST_SECONDS:.0f} s after their last answers"
    else:
        then = (
            "No committed step is known to be anywhere else, so their pods stay, and the job goes on when "
            "the nodes are back. If they never come back, delete this job and create it again"
        )
    return f". Nodes that are lost: {first_of(sorted(set(map(str, lost.values()))))}. {then}"
