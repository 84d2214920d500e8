"""The gang of a round: its pods, seals and ROUND messages. Pure.

1. CAS 1 makes the fence durable before the round has any other effect (new_rounds.py).
2. Survivors are sealed, missing pods are created, and obsolete pods are deleted (member_actions).
3. After CAS 2, ROUND is sent to each member that has not acknowledged its present content (round_actions).
   Only the content is compared, so ROUND is repeated exactly when its content changes or a sidecar lost it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast_core.api import Compression, JobCondition, PersistedStep, RestorePointStatus
from holdfast_core.ids import RestartRound, Step, Worker
from holdfast_core.messages.schema import Member, Policy, RestorePoint, Round, Seal
from holdfast_operator.decide import avoidance
from holdfast_operator.decide.acceptance import birth_problem
from holdfast_operator.decide.facts.apart import with_released
from holdfast_operator.decide.facts.interval import timing
from holdfast_operator.decide.facts.placement import domain_of, place_copies
from holdfast_operator.decide.facts.resize import elastic_of
from holdfast_operator.decide.facts.times import seconds_since
from holdfast_operator.decide.facts.world import MemberState, World, worker_pod
from holdfast_operator.decide.features import edits, queue
from holdfast_operator.decide.features.spares import (
    create_spares,
    delete_lost_spares,
    make_room,
)
from holdfast_operator.decide.report.hangs import factor as hang_factor
from holdfast_operator.model import kinds
from holdfast_operator.model.actions import (
    Action,
    Call,
    CallPath,
    Delete,
    DesiredObject,
)
from holdfast_operator.model.job import Done, JobMemory, Now, Reachable
from holdfast_operator.model.outgoing_round import OutgoingRound
from holdfast_operator.render.objects import render_certificates, standing_objects

COORDINATOR_SILENT_SECONDS = 10.0
"""Time without an answer after which another member becomes the coordinator."""
ADDRESSES_EVERY_SECONDS = 1.0
"""Shortest interval between repetitions of ROUND while members have no address yet. Without it, 4,096 pods
that start one after another would cause 4,096 times 4,096 calls."""
SPARES_EVERY_SECONDS = 10.0
"""Shortest interval between creates of spares in a round, which a quota may refuse."""


# --------------------------------------------------------------------------- pods and seals


def member_actions(world: World) -> list[Action]:
    """Return the certificates and pods that are missing, the seals of survivors and the deletes.

    Pods that are not members, or wait on an unsuitable node, are deleted.
    """
    actions: list[Action] = []
    births: list[MemberState] = []
    unstarted = any(world.awaits_start(m) for m in world.members)
    # acceptance.birth_problem checks what else a new pod requires.
    creatable = world.may_create_pods and birth_problem(world) is None
    if unstarted and creatable:
        births = _births(world)
    if creatable and world.may_replace_pods:
        if unstarted:
            actions.extend(avoidance.replacements(world) or queue.strays(world))
        known = {a.uid for a in actions if isinstance(a, Delete)}
        actions.extend(a for a in edits.replacements(world) if getattr(a, "uid", None) not in known)
    actions.extend(_leaves(world, births))
    if world.observed.job.spec.template is not None:  # else another controller creates the pods
        actions.extend(_pods(world, births))
    actions.extend(seals(world))
    actions.extend(delete_obsolete(world))
    actions.extend(make_room(world))
    return actions


def standing(world: World) -> list[DesiredObject]:
    """Return the objects that the gang has for as long as it exists. Those that are there cost no call."""
    observed = world.observed
    found = standing_objects(observed.job, len(world.members), observed.sidecar)
    return [DesiredObject(body) for body in found]


def seals(world: World) -> list[Action]:
    """Return the seals of the members that are not sealed for the round."""
    actions: list[Action] = []
    for member in world.members:
        pod = member.pod
        if pod is None or pod.ip is None or not member.alive or member.sealed_for(world.round):
            continue
        message = Seal(world.round)
        actions.append(Call(CallPath.SEAL, member.worker, pod.name, pod.uid, message))
    return actions


def spare_actions(world: World, memory: JobMemory, now: Now) -> tuple[list[Action], JobMemory]:
    """Return the creates and deletes of spares while the gang trains.

    A refused create makes a pass incomplete. So spares are created every SPARES_EVERY_SECONDS only.
    """
    if not world.spares or world.observed.job.spec.suspend:
        return [], memory
    actions = delete_lost_spares(world)
    creatable = birth_problem(world) is None
    if creatable and world.may_replace_pods:
        actions.extend(avoidance.misplaced_spares(world))
    last = memory.done.get(Done.SPARES_CREATED)
    recent = last is not None and now.monotonic - last < SPARES_EVERY_SECONDS
    if recent or not creatable:
        return actions, memory
    avoided, failed = avoidance.avoided_nodes(world), avoidance.avoided_for_failures(world)
    creates = create_spares(world, avoided, failed)
    if creates:
        memory = memory.with_done(Done.SPARES_CREATED, now)
    return [*creates, *actions], memory


def _births(world: World) -> list[MemberState]:
    """Return the members whose pods of this round are missing and are created now.

    Once the restore point is chosen, a missing pod that had started is lost and requires a new round: an
    empty pod must not take the name of one that may have held shards. In a queue, a pod is created once the
    older pod of its worker no longer counts there.
    """
    occupied = queue.occupied(world)
    return [
        m
        for m in world.members
        if m.birth_round == world.round
        and m.pod is None
        and world.awaits_start(m)
        and m.worker not in occupied
    ]


def _pods(world: World, births: list[MemberState]) -> list[DesiredObject]:
    """Return the pods of these members."""
    avoided, failed = avoidance.avoided_nodes(world), avoidance.avoided_for_failures(world)
    group = queue.present_group(world) if births else None
    return [
        DesiredObject(worker_pod(world, m.worker, world.round, avoided, failed, group))
        for m in births
    ]


def _leaves(world: World, births: list[MemberState]) -> list[DesiredObject]:
    """Return the Secrets with the leaf certificates of this round's pods that have not started.

    A Secret has the leaves of a block of workers, also of those that have no pod of this round: a round may
    take in more lost workers later (ADR 0008), and a Secret cannot be changed. It is wanted until every
    sidecar has started, because a pod would wait forever for a Secret that was deleted.
    """
    creating = {m.worker for m in births}
    needed: dict[str, list[str]] = {}
    for member in world.members:
        if member.birth_round != world.round or member.was_spare:
            continue
        waits = member.alive and member.pod is not None and not member.pod.sidecar_started
        if waits or member.worker in creating:
            needed.setdefault(world.certificates(member.worker, world.round), [])
    if not needed:
        return []
    for member in world.members:
        secret = world.certificates(member.worker, world.round)
        if secret in needed:
            needed[secret].append(world.source.identity(member.worker, world.round))
    # The names for adopted pods are fixed by the status, which the admission policy reads.
    job = world.observed.job
    fixed = job.spec.template is None
    return [
        DesiredObject(render_certificates(job, s), tuple(pods), fixed or world.is_mounted(s))
        for s, pods in needed.items()
    ]


def delete_obsolete(world: World) -> list[Action]:
    """Return deletes of the pods that are not members, by force on a lost node, which cannot confirm them."""
    actions: list[Action] = []
    for pod in world.obsolete_pods:
        lost = world.observed.node_lost(pod)
        if lost or not pod.terminating:
            why = f"it is not a pod of round {world.round}"
            actions.append(Delete(kinds.POD, pod.name, pod.uid, why, force=lost))
    return actions


def delete_old_certificates(world: World) -> list[Action]:
    """Return deletes of certificate Secrets that no member's pod uses.

    Secrets of an earlier operator process are not known to this one. They are deleted with the job.
    """
    present = (*world.members, *world.spares)
    wanted = {world.certificates(m.worker, m.birth_round) for m in present}
    wanted.update(m.pod.certificates for m in present if m.pod is not None)
    why = "no pod of the gang mounts it"
    unused = sorted(world.observed.secrets - wanted)
    return [Delete(kinds.SECRET, name, "", why) for name in unused]


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


def awaits_coordinator(world: World, memory: JobMemory, now: Now) -> bool:
    """Return whether a new operator process still waits for the coordinator of a gang that trains.

    Its state says which ROUND the members have accepted (ADR 0005). Without it, every new process would seal
    each member of each gang again and send it the ROUND that it has.
    """
    current = world.coordinator_member()
    return (
        world.status.is_true(JobCondition.RUNNING)
        and world.coordinator is None
        and current is not None
        and current.alive
        and (current.sidecar is None or current.sidecar.reachable is Reachable.UNKNOWN)
        and seconds_since(memory.round_seen_at, now) < COORDINATOR_SILENT_SECONDS
    )


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
    digest = message.content_digest()
    complete = all(m.address for m in message.members)
    behind = [m for m in world.members if not _holds(m, world.round, digest)]
    if not behind:
        return RoundPlan((), memory, complete)
    sent = memory.done.get(Done.ROUND_SENT)
    if not complete and sent is not None and now.monotonic - sent < ADDRESSES_EVERY_SECONDS:
        return RoundPlan((), memory, False)
    outgoing = OutgoingRound(replace(message, version=_highest_version(world) + 1), digest)
    actions = []
    for member in behind:
        pod = member.pod
        if pod is None or pod.ip is None or not member.alive:
            continue
        if not member.sealed_for(world.round):
            continue  # member_actions seals it first
        actions.append(Call(CallPath.ROUND, member.worker, pod.name, pod.uid, outgoing))
    if actions:
        memory = memory.with_done(Done.ROUND_SENT, now)
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
    status = world.status
    members = tuple(
        Member(
            worker=m.worker,
            pod=world.source.identity(m.worker, m.birth_round),
            # A leaving pod keeps its address: it still sends its shards.
            address=m.pod.ip or "" if m.pod is not None and m.serves else "",
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
        copies=place_copies(_domains(world), world.copies),
        policy=_policy(world),
        pinned=_pinned_steps(world),
        quarantined=tuple(
            RestorePoint(q.step, q.round) for q in with_released(status, world).quarantined
        ),
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
    hangs, stragglers = spec.failure_policy.hangs, spec.failure_policy.stragglers
    return Policy(
        interval_steps=checkpoint.interval.steps or 0,
        timing=timing(world),
        slots=checkpoint.memory.slots,
        keep_last=checkpoint.retention.keep_last,
        peer_copies=world.copies,
        peer_encryption=spec.peer.encryption.value,
        object_every_steps=None if object_ is None else object_.every.steps,
        object_every_seconds=None if object_ is None else object_.every.seconds,
        object_compression=(Compression.NONE if object_ is None else object_.compression).value,
        hang_steps=hangs.effective_step_times,
        hang_seconds=hangs.effective_seconds,
        hang_factor=hang_factor(world.status),
        straggler_factor=stragglers.effective_factor,
        straggler_steps=stragglers.effective_steps,
        shrinks=elastic_of(world.observed.job) is not None,
    )


def _pinned_steps(world: World) -> tuple[Step, ...]:
    pinned = {c.spec.step for c in world.own_checkpoints if c.spec.pin and c.spec.step is not None}
    return tuple(sorted(pinned))


def _domains(world: World) -> tuple[str, ...]:
    """Return the topology domain of each worker.

    A worker without a node gets a domain of its own.
    """
    nodes = (None if m.pod is None else m.pod.node for m in world.members)
    return tuple(domain_of(world, n) or f"?{worker}" for worker, n in enumerate(nodes))
