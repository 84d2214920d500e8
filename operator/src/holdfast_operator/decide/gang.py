"""The gang of a round: its member list, its pods, its seals and its ROUND. Pure.

1. CAS 1 (begin_round): the fence is durable before anything else happens.
2. Seal the survivors, create the missing pods, delete the obsolete ones (members_actions).
3. After CAS 2: ROUND to every member whose acknowledged content differs (round_actions). Only the
   content is compared, so a repetition is needed exactly when something in it changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast_core.api import JobCondition
from holdfast_core.api.training_job_status import MAX_RECENT_RESTARTS
from holdfast_core.ids import RestartRound, Step, Worker
from holdfast_core.messages.schema import Member, Policy, RestorePoint, Round
from holdfast_core.names import certificates_secret_name, pod_name, service_name
from holdfast_operator.decide import avoidance
from holdfast_operator.decide.acceptance import birth_problem
from holdfast_operator.decide.facts.failure import (
    Failure,
    counted_restarts,
    failed_from_restore_point,
    is_disruption,
)
from holdfast_operator.decide.facts.times import seconds_since
from holdfast_operator.decide.facts.world import MemberState, World
from holdfast_operator.decide.lifecycle import asked_to_stop
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
from holdfast_operator.model.job import (
    JobMemory,
    JobStatusView,
    Now,
    PersistedView,
    RecoveryView,
    RestartRecord,
    RestorePointView,
)
from holdfast_operator.model.reasons import Reason

COORDINATOR_SILENT_SECONDS = 10.0
ADDRESSES_EVERY_SECONDS = 1.0
"""While pods are still coming up, ROUND is repeated at most this often: 4,096 pods that start one
after another must not cost 4,096 rounds of 4,096 calls."""


# --------------------------------------------------------------------------- CAS 1


def first_round(world: World, now: Now) -> JobStatusView:
    """The status that begins the first round: 0, or above whatever a sidecar or a pod remembers."""
    round_ = world.next_round
    newer = world.pods_ahead
    workers = range(world.observed.job.spec.workers)
    return replace(
        world.status,
        restart_round=round_,
        members=tuple(newer.get(Worker(w), round_) for w in workers),
        restore_point=None,
        coordinator=None,
        start_time=world.status.start_time or now.utc,
    )


def next_round(world: World, failures: tuple[Failure, ...], now: Now) -> JobStatusView:
    """The status that begins the next round after these failures (not empty)."""
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
        record = RestartRecord(round_, now.utc, cause.reason, failed_from)
        recent = (*recent, record)[-MAX_RECENT_RESTARTS:]
    note = Note(cause.reason, f"round {round_}: {cause.message}")
    if asked_to_stop(status):  # the gang of the new round was not
        status = set_condition(status, JobCondition.SUSPENDED, False, note, now, job.generation)
    status = replace(
        status,
        restart_round=round_,
        members=members,
        restore_point=None,
        coordinator=None,
        restarts=status.restarts + 1,
        recent_restarts=recent,
        restarts_count_towards_max=len(recent),
        last_recovery=RecoveryView(round=round_, reason=cause.reason),
    )
    status = set_condition(status, JobCondition.RESTARTING, True, note, now, job.generation)
    return set_condition(status, JobCondition.RUNNING, False, note, now, job.generation)


def _stays(member: MemberState) -> bool:
    """A pod that no node has taken holds nothing, and can be created again in its own round only."""
    return member.pod is not None and member.pod.alive and member.pod.node is not None


def resumed_round(world: World, now: Now) -> JobStatusView:
    """The status that begins the round after a suspension: every pod is new."""
    round_ = world.next_round
    job = world.observed.job
    note = Note(Reason.RESUMED, f"round {round_}: spec.suspend is false again")
    status = replace(
        world.status,
        restart_round=round_,
        members=(round_,) * job.spec.workers,
        restore_point=None,
        coordinator=None,
        start_time=now.utc,
        last_recovery=RecoveryView(round_, Reason.RESUMED, begun_at=now.utc),
    )
    status = set_condition(status, JobCondition.SUSPENDED, False, note, now, job.generation)
    return set_condition(status, JobCondition.RUNNING, False, note, now, job.generation)


# --------------------------------------------------------------------------- pods and seals


def member_actions(world: World) -> list[Action]:
    """Service, certificates, missing pods, seals of survivors, deletes of obsolete pods."""
    job = world.observed.job
    actions: list[Action] = []
    service = service_name(job.name, job.uid)
    if service not in world.observed.services:
        actions.append(CreateService(service))
    births: list[Action] = []
    unstarted = any(world.awaits_start(m) for m in world.members)
    # See acceptance.birth_problem for what else must be there.
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
    """Pods of this round that are not there yet. Once the restore point is chosen a missing pod that
    had started is a lost one, and needs a new round: what it may have held must not come back under
    its name."""
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
    """The Secret with the leaves of this round's pods. It is looked after until every sidecar has
    started: a pod whose Secret was deleted would wait for it without end."""
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
    """Pods that are no members. On a lost node: by force, nobody there will confirm."""
    actions: list[Action] = []
    for pod in world.obsolete_pods:
        lost = world.observed.node_lost(pod)
        if lost or not pod.terminating:
            actions.append(DeletePod(pod.name, pod.uid, force=lost))
    return actions


def delete_old_certificates(world: World) -> list[Action]:
    """Secrets of rounds that no member was born in. Those that an earlier operator process made are
    not known here; the job's deletion collects them."""
    job = world.observed.job
    rounds = (*world.status.members, world.round)
    wanted = {certificates_secret_name(job.name, job.uid, r) for r in rounds}
    return [DeleteCertificates(s) for s in sorted(world.observed.secrets - wanted)]


# --------------------------------------------------------------------------- coordinator


def first_coordinator(world: World) -> Worker:
    """The lowest survivor that answers: it has the manifests. Else the lowest survivor, else 0."""
    survivors = [m for m in world.members if m.birth_round < world.round and m.alive]
    answering = [m for m in survivors if m.reachable]
    chosen = answering or survivors or list(world.members)
    return chosen[0].worker


def renamed_coordinator(world: World, now: Now) -> Worker | None:
    """Another coordinator for this round, where the named one is silent and its pod still runs."""
    current = world.coordinator_member()
    if current is None or current.sidecar is None or current.reachable or not current.alive:
        return None
    if seconds_since(current.sidecar.unreachable_since, now) < COORDINATOR_SILENT_SECONDS:
        return None
    others = [m for m in world.members if m.alive and m.reachable]
    return others[0].worker if others else None


def store_host(world: World) -> Worker:
    """Follows from the status alone: it must not change while the round lasts."""
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
    """Every member has acknowledged the content of now, and every address is in it."""


def round_actions(world: World, memory: JobMemory, now: Now) -> RoundPlan:
    """ROUND to those who do not hold its content of now. The restore point is chosen."""
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
            continue  # it is being sealed first
        actions.append(
            SendRound(member.worker, pod.name, pod.uid, pod.ip, message, pod.sidecar_restarts)
        )
    if actions:
        memory = replace(memory, round_sent_at=now.monotonic)
    return RoundPlan(tuple(actions), memory, False)


def _holds(member: MemberState, round_: RestartRound, digest: str) -> bool:
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
    """ROUND of now, version 0."""
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
        copies=place_copies(_domains(world), job.spec.peer_copies),
        policy=_policy(world),
        holds=_holds_of_job(world),
        last_persisted=_persisted_message(world.last_persisted),
    )


def restore_point_message(view: RestorePointView | None) -> RestorePoint:
    if view is None:
        return RestorePoint()
    return RestorePoint(view.step, view.round, view.manifest, view.job_uid, view.job_namespace)


def _persisted_message(view: PersistedView | None) -> RestorePoint | None:
    return None if view is None else RestorePoint(view.step, view.round, view.manifest)


def _policy(world: World) -> Policy:
    spec = world.observed.job.spec
    return Policy(
        interval_steps=spec.interval_steps,
        slots=spec.slots,
        keep_last=spec.keep_last,
        peer_copies=min(spec.peer_copies, len(world.members) - 1),
        peer_encryption=spec.peer_encryption,
        object_every_steps=spec.object_every_steps if spec.store is not None else None,
        object_compression=spec.object_compression,
    )


def _holds_of_job(world: World) -> tuple[Step, ...]:
    job = world.observed.job
    held = {
        c.step
        for c in world.observed.checkpoints
        if c.hold and c.step is not None and c.job == job.name and c.job_uid in (None, job.uid)
    }
    return tuple(sorted(held))


def _domains(world: World) -> tuple[str, ...]:
    """Topology domain of each worker; one of its own where the node is not known yet."""
    key = world.observed.job.spec.topology_key
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
