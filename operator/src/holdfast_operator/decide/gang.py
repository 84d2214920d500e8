"""The gang of a round: its member list, pods, seals and ROUND messages. Pure.

1. CAS 1 makes the fence durable before the round has any other effect (first_round, next_round,
   resumed_round).
2. Survivors are sealed, missing pods are created, and obsolete pods are deleted (member_actions).
3. After CAS 2, ROUND is sent to each member that has not acknowledged its present content (round_actions).
   Only the content is compared, so ROUND is repeated exactly when its content changes or a sidecar lost it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast_core.api import (
    Compression,
    JobCondition,
    PersistedStep,
    RecoveryStatus,
    RestartRecord,
    RestorePointStatus,
    TrainingJobStatus,
    changed,
)
from holdfast_core.api.training_job_status import MAX_NAMED_WORKERS, MAX_RECENT_RESTARTS
from holdfast_core.ids import RestartRound, Step, Worker
from holdfast_core.messages.schema import Member, Policy, RestorePoint, Round
from holdfast_core.names import certificates_secret_name, pod_name, service_name
from holdfast_operator.decide import avoidance
from holdfast_operator.decide.acceptance import birth_problem
from holdfast_operator.decide.checkpoints import own_checkpoints
from holdfast_operator.decide.facts.failure import (
    Failure,
    counted_restarts,
    failed_from_restore_point,
    is_disruption,
)
from holdfast_operator.decide.facts.times import seconds_since
from holdfast_operator.decide.facts.world import MemberState, World
from holdfast_operator.decide.lifecycle import stop_requested
from holdfast_operator.decide.placement import place_copies
from holdfast_operator.decide.report.status import Note, set_condition, with_levels
from holdfast_operator.model.actions import (
    Action,
    CreateCertificates,
    CreatePod,
    CreateService,
    DeleteCertificates,
    DeletePod,
    SealWorker,
    SendRound,
    round_digest,
)
from holdfast_operator.model.job import JobMemory, Now
from holdfast_operator.model.reasons import Reason

COORDINATOR_SILENT_SECONDS = 10.0
"""Time without an answer after which another member becomes the coordinator."""
ADDRESSES_EVERY_SECONDS = 1.0
"""Shortest interval between repetitions of ROUND while members have no address yet. Without it, 4,096 pods
that start one after another would cause 4,096 times 4,096 calls."""


# --------------------------------------------------------------------------- CAS 1


def first_round(world: World, now: Now) -> TrainingJobStatus:
    """Return the status that begins the first round: round 0, or a round above those of sidecars and pods."""
    round_ = world.next_round
    newer = world.pods_ahead
    workers = range(world.observed.job.spec.workers)
    return changed(
        world.status,
        restart_round=round_,
        members=tuple(newer.get(Worker(w), round_) for w in workers),
        restore_point=None,
        coordinator=None,
        start_time=world.status.start_time or now.utc,
    )


def next_round(world: World, failures: tuple[Failure, ...], now: Now) -> TrainingJobStatus:
    """Return the status that begins the next round after these failures, of which there is at least one."""
    job = world.observed.job
    status = with_levels(world.status, world)
    round_ = world.next_round
    gone = {f.worker for f in failures if f.replace_pod}
    newer = world.pods_ahead
    # A pod on a lost node stays a member unless a failure says that it may be replaced.
    members = tuple(
        newer.get(m.worker) or (m.birth_round if _stays(m) and m.worker not in gone else round_)
        for m in world.members
    )
    cause = failures[0]
    recent = counted_restarts(world, now)
    if not is_disruption(failures):
        failed_from = failed_from_restore_point(world, failures)
        record = RestartRecord(
            round=round_,
            at=now.utc,
            reason=cause.reason,
            failed_step=None if failed_from is None else failed_from.step,
            failed_round=None if failed_from is None else failed_from.round,
        )
        recent = (*recent, record)[-MAX_RECENT_RESTARTS:]
    note = Note(cause.reason, f"round {round_}: {cause.message}")
    if stop_requested(status):  # the gang of the new round was not asked
        status = set_condition(status, JobCondition.SUSPENDED, False, note, now, job.generation)
    status = changed(
        status,
        restart_round=round_,
        members=members,
        restore_point=None,
        coordinator=None,
        restarts=status.restarts + 1,
        recent_restarts=recent,
        restarts_count_towards_max=len(recent),
    )
    status = status.with_recovery(_recovery(world, round_, failures))
    status = set_condition(status, JobCondition.RESTARTING, True, note, now, job.generation)
    return set_condition(status, JobCondition.RUNNING, False, note, now, job.generation)


def _recovery(world: World, round_: RestartRound, failures: tuple[Failure, ...]) -> RecoveryStatus:
    """Return the record of the recovery from these failures, with the workers that caused it."""
    cause = failures[0]
    failed = {f.worker for f in failures if f.disruption == cause.disruption}
    # A sidecar names the workers of dead ranks, and may name one that does not exist.
    members = [m for m in world.members if m.worker in failed][:MAX_NAMED_WORKERS]
    workers = tuple(m.worker for m in members)
    pods = (m.pod for m in members)
    nodes = {pod.node for pod in pods if pod is not None and pod.node is not None}
    return RecoveryStatus(
        round=round_, reason=cause.reason, workers=workers, nodes=tuple(sorted(nodes))
    )


def _stays(member: MemberState) -> bool:
    """Return whether a member keeps its pod in the next round.

    A pod that is not bound to a node is replaced: it holds nothing, and under its old name it could be
    created again only in its own round.
    """
    return member.pod is not None and member.pod.alive and member.pod.node is not None


def resumed_round(world: World, now: Now) -> TrainingJobStatus:
    """Return the status that begins the round after a suspension. All of its pods are new."""
    round_ = world.next_round
    job = world.observed.job
    note = Note(Reason.RESUMED, f"round {round_}: spec.suspend is false again")
    status = changed(
        world.status,
        restart_round=round_,
        members=(round_,) * job.spec.workers,
        restore_point=None,
        coordinator=None,
        start_time=now.utc,
    ).with_recovery(RecoveryStatus(round=round_, reason=Reason.RESUMED, begun_at=now.utc))
    status = set_condition(status, JobCondition.SUSPENDED, False, note, now, job.generation)
    return set_condition(status, JobCondition.RUNNING, False, note, now, job.generation)


# --------------------------------------------------------------------------- pods and seals


def member_actions(world: World) -> list[Action]:
    """Return the creates of Service, certificates and missing pods, the seals of survivors and the deletes.

    Pods that are not members, or wait on an unsuitable node, are deleted.
    """
    job = world.observed.job
    actions: list[Action] = []
    service = service_name(job.name, job.uid)
    if service not in world.observed.services:
        actions.append(CreateService(service))
    births: list[Action] = []
    unstarted = any(world.awaits_start(m) for m in world.members)
    # acceptance.birth_problem checks what else a new pod requires.
    if unstarted and not job.spec.suspend and birth_problem(world) is None:
        births = _births(world)
        actions.extend(avoidance.replacements(world))
    actions.extend(_leaves(world, bool(births)))
    actions.extend(births)
    for member in world.members:
        pod = member.pod
        if pod is None or pod.ip is None or not member.alive or member.sealed_for(world.round):
            continue
        actions.append(SealWorker(member.worker, pod.name, pod.uid, pod.ip, world.round))
    actions.extend(delete_obsolete(world))
    return actions


def _births(world: World) -> list[Action]:
    """Return the creates of this round's missing pods.

    Once the restore point is chosen, a missing pod that had started is lost and requires a new round: an
    empty pod must not take the name of one that may have held shards.
    """
    job = world.observed.job
    avoided = avoidance.avoided_nodes(world)
    return [
        CreatePod(
            pod_name(job.name, job.uid, m.worker, world.round), m.worker, world.round, avoided
        )
        for m in _born(world)
        if m.pod is None and world.awaits_start(m)
    ]


def _leaves(world: World, pods_are_created: bool) -> list[Action]:
    """Return the create of the Secret with the leaf certificates of this round's pods, if it may be missing.

    The create is repeated until every sidecar has started, because a pod would wait forever for a Secret that
    was deleted.
    """
    job = world.observed.job
    born = _born(world)
    waiting = any(m.alive and m.pod is not None and not m.pod.sidecar_started for m in born)
    secret = certificates_secret_name(job.name, job.uid, world.round)
    known = world.observed.secrets - world.observed.doubtful_secrets
    if secret in known or not (pods_are_created or waiting):
        return []
    names = tuple(pod_name(job.name, job.uid, m.worker, world.round) for m in born)
    return [CreateCertificates(secret, world.round, names)]


def _born(world: World) -> list[MemberState]:
    return [m for m in world.members if m.birth_round == world.round]


def delete_obsolete(world: World) -> list[Action]:
    """Return deletes of the pods that are not members, by force on a lost node, which cannot confirm them."""
    actions: list[Action] = []
    for pod in world.obsolete_pods:
        lost = world.observed.node_lost(pod)
        if lost or not pod.terminating:
            actions.append(DeletePod(pod.name, pod.uid, force=lost))
    return actions


def delete_old_certificates(world: World) -> list[Action]:
    """Return deletes of certificate Secrets of rounds in which no member's pod was created.

    Secrets of an earlier operator process are not known to this one. They are deleted with the job.
    """
    job = world.observed.job
    rounds = (*world.status.members, world.round)
    wanted = {certificates_secret_name(job.name, job.uid, r) for r in rounds}
    return [DeleteCertificates(s) for s in sorted(world.observed.secrets - wanted)]


# --------------------------------------------------------------------------- coordinator


def first_coordinator(world: World) -> Worker:
    """Return the coordinator of a new round: the lowest survivor that answers, because it has the manifests.

    Else it is the lowest survivor, else worker 0.
    """
    survivors = [m for m in world.members if m.birth_round < world.round and m.alive]
    answering = [m for m in survivors if m.reachable]
    chosen = answering or survivors or list(world.members)
    return chosen[0].worker


def renamed_coordinator(world: World, now: Now) -> Worker | None:
    """Return another coordinator for this round if the present one does not answer while its pod runs."""
    current = world.coordinator_member()
    if current is None or current.sidecar is None or current.reachable or not current.alive:
        return None
    if seconds_since(current.sidecar.unreachable_since, now) < COORDINATOR_SILENT_SECONDS:
        return None
    others = [m for m in world.members if m.alive and m.reachable]
    return others[0].worker if others else None


def store_host(world: World) -> Worker:
    """Return the worker whose launcher hosts the TCPStore of the round.

    It depends on the status alone, because it must not change within a round.
    """
    for index, birth in enumerate(world.status.members):
        if birth < world.round:
            return Worker(index)
    return Worker(0)


# --------------------------------------------------------------------------- ROUND


@dataclass(frozen=True, slots=True)
class RoundPlan:
    actions: tuple[Action, ...]
    memory: JobMemory
    complete: bool
    """Whether every member has acknowledged the present content, and the content has every address."""


def round_actions(world: World, memory: JobMemory, now: Now) -> RoundPlan:
    """Return the ROUND messages for members that have not acknowledged the present content.

    The restore point of the round must be chosen.
    """
    message = round_message(world)
    digest = round_digest(message)
    complete = all(m.address for m in message.members)
    behind = [m for m in world.members if not _holds(m, world.round, digest)]
    if not behind:
        return RoundPlan((), memory, complete)
    sent = memory.round_sent_at
    if not complete and sent is not None and now.monotonic - sent < ADDRESSES_EVERY_SECONDS:
        return RoundPlan((), memory, False)
    message = replace(message, version=_highest_version(world) + 1)
    actions = []
    for member in behind:
        pod = member.pod
        if pod is None or pod.ip is None or not member.alive:
            continue
        if not member.sealed_for(world.round):
            continue  # member_actions seals it first
        actions.append(
            SendRound(member.worker, pod.name, pod.uid, pod.ip, message, pod.sidecar_restarts)
        )
    if actions:
        memory = replace(memory, round_sent_at=now.monotonic)
    return RoundPlan(tuple(actions), memory, False)


def _holds(member: MemberState, round_: RestartRound, digest: str) -> bool:
    """Return whether the member acknowledged this content of ROUND and its sidecar has not lost it since.

    A sidecar has lost it if its container restarted, or if its inventory has version 0 for this round.
    """
    if member.pod is None or member.sidecar is None or member.sidecar.acked is None:
        return False
    acked = member.sidecar.acked
    inventory = member.sidecar.inventory
    forgot = (
        inventory is not None
        and inventory.round == round_
        and inventory.version < acked.version
        and inventory.version == 0
    )
    return (
        acked.round == round_
        and acked.digest == digest
        and acked.sidecar_restarts == member.pod.sidecar_restarts
        and not forgot
    )


def _highest_version(world: World) -> int:
    versions = [0]
    for member in world.members:
        sidecar = member.sidecar
        if sidecar is None:
            continue
        if sidecar.acked is not None and sidecar.acked.round == world.round:
            versions.append(sidecar.acked.version)
        if sidecar.inventory is not None and sidecar.inventory.round == world.round:
            versions.append(sidecar.inventory.version)
    return max(versions)


def round_message(world: World) -> Round:
    """Return ROUND with its present content and version 0."""
    job = world.observed.job
    status = world.status
    members = tuple(
        Member(
            worker=m.worker,
            pod=pod_name(job.name, job.uid, m.worker, m.birth_round),
            address=m.pod.ip or "" if m.pod is not None and m.alive else "",
        )
        for m in world.members
    )
    coordinator = status.coordinator
    return Round(
        round=world.round,
        version=0,
        restore_point=restore_point_message(status.restore_point),
        coordinator=first_coordinator(world) if coordinator is None else coordinator,
        store_host=store_host(world),
        workers=len(members),
        members=members,
        copies=place_copies(_domains(world), job.spec.peer.copies),
        policy=_policy(world),
        pinned=_pinned_steps(world),
        last_persisted=_persisted_message(world.last_persisted),
    )


def restore_point_message(view: RestorePointStatus | None) -> RestorePoint:
    if view is None:
        return RestorePoint()
    return RestorePoint(view.step, view.round, view.manifest, view.job_uid, view.job_namespace)


def _persisted_message(view: PersistedStep | None) -> RestorePoint | None:
    return None if view is None else RestorePoint(view.step, view.round, view.manifest)


def _policy(world: World) -> Policy:
    spec = world.observed.job.spec
    checkpoint, object_ = spec.checkpoint, spec.checkpoint.object
    return Policy(
        interval_steps=checkpoint.interval.steps,
        slots=checkpoint.memory.slots,
        keep_last=checkpoint.retention.keep_last,
        peer_copies=min(spec.peer.copies, len(world.members) - 1),
        peer_encryption=spec.peer.encryption.value,
        object_every_steps=None if object_ is None else object_.every.steps,
        object_compression=(Compression.NONE if object_ is None else object_.compression).value,
    )


def _pinned_steps(world: World) -> tuple[Step, ...]:
    pinned = {c.spec.step for c in own_checkpoints(world) if c.spec.pin and c.spec.step is not None}
    return tuple(sorted(pinned))


def _domains(world: World) -> tuple[str, ...]:
    """Return the topology domain of each worker.

    A worker without a node gets a domain of its own, and a node without the label is a domain of its own.
    """
    key = world.observed.job.spec.peer.topology_key
    found = []
    for member in world.members:
        node_name = None if member.pod is None else member.pod.node
        if node_name is None:
            found.append(f"?{member.worker}")
            continue
        node = world.observed.nodes.get(node_name)
        label = None if node is None else node.labels.get(key)
        found.append(label if label is not None else node_name)
    return tuple(found)
