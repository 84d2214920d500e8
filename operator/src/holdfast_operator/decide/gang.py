"""The gang of a round: its pods, their certificates, and seals. Pure.

1. CAS 1 makes the fence durable before the round has any other effect (new_rounds.py).
2. Survivors are sealed, missing pods are created, and obsolete pods are deleted (member_actions).
3. After CAS 2, ROUND is sent to the members (round_message.py).
"""

from __future__ import annotations

from holdfast_core.api import JobCondition
from holdfast_core.ids import Worker
from holdfast_core.messages.schema import Seal
from holdfast_operator.decide.facts import queue
from holdfast_operator.decide.facts.nodes import (
    avoided_for_failures,
    avoided_nodes,
    misplaced_pods,
    misplaced_spares,
)
from holdfast_operator.decide.facts.spares import create_spares, delete_lost_spares, make_room
from holdfast_operator.decide.facts.spec import birth_problem, outdated_pods
from holdfast_operator.decide.facts.world import MemberState, World, worker_pod
from holdfast_operator.model import labels
from holdfast_operator.model.actions import Action, CallPath, Delete, DesiredObject
from holdfast_operator.model.job import Done, Reachable
from holdfast_operator.render.objects import render_certificates, standing_objects

COORDINATOR_SILENT_SECONDS = 10.0
"""Time without an answer after which another member becomes the coordinator."""
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
    # birth_problem checks what else a new pod requires.
    creatable = world.may_create_pods and birth_problem(world) is None
    if unstarted and creatable:
        births = _births(world)
    if creatable and world.may_replace_pods:
        if unstarted:
            actions.extend(misplaced_pods(world) or queue.strays(world))
        known = {a.uid for a in actions if isinstance(a, Delete)}
        actions.extend(a for a in outdated_pods(world) if getattr(a, "uid", None) not in known)
    actions.extend(_leaves(world, births))
    if world.spec.template is not None:  # else another controller creates the pods
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
        if member.alive and not member.sealed_for(world.round):
            actions.extend(member.call(CallPath.SEAL, Seal(world.round)))
    return actions


def spare_actions(world: World) -> list[Action]:
    """Return the creates and deletes of spares while the gang trains.

    A refused create makes a pass incomplete. So spares are created every SPARES_EVERY_SECONDS only.
    """
    if not world.spares or world.spec.suspend:
        return []
    actions: list[Action] = [*delete_lost_spares(world)]
    creatable = birth_problem(world) is None
    if creatable and world.may_replace_pods:
        actions.extend(misplaced_spares(world))
    last = world.memory.done.get(Done.SPARES_CREATED)
    recent = last is not None and world.now.monotonic - last < SPARES_EVERY_SECONDS
    if recent or not creatable:
        return actions
    avoided, failed = avoided_nodes(world), avoided_for_failures(world)
    creates = create_spares(world, avoided, failed)
    if creates:
        world.remember_done(Done.SPARES_CREATED)
    return [*creates, *actions]


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
    avoided, failed = avoided_nodes(world), avoided_for_failures(world)
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
    fixed = world.spec.template is None
    return [
        DesiredObject(render_certificates(world.job, s), tuple(pods), fixed or world.is_mounted(s))
        for s, pods in needed.items()
    ]


def delete_obsolete(world: World) -> list[Delete]:
    """Return deletes of the pods that are not members."""
    return world.deletes(world.obsolete_pods, f"it is not a pod of round {world.round}")


def delete_old_certificates(world: World) -> list[Action]:
    """Return deletes of certificate Secrets that no member's pod uses.

    Secrets of an earlier operator process are not known to this one. They are deleted with the job.
    """
    present = (*world.members, *world.spares)
    wanted = {world.certificates(m.worker, m.birth_round) for m in present}
    wanted.update(m.pod.certificates for m in present if m.pod is not None)
    why = "no pod of the gang mounts it"
    unused = sorted(world.observed.secrets - wanted)
    return [Delete(labels.SECRET, name, "", why) for name in unused]


def renamed_coordinator(world: World) -> Worker | None:
    """Return another coordinator for this round if the present one does not answer while its pod runs."""
    current = world.coordinator_member()
    if current is None or current.sidecar is None or current.reachable or not current.alive:
        return None
    if world.seconds_since(current.sidecar.unreachable_since) < COORDINATOR_SILENT_SECONDS:
        return None
    others = [m for m in world.members if m.alive and m.reachable]
    return others[0].worker if others else None


def awaits_coordinator(world: World) -> bool:
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
        and world.seconds_since(world.memory.round_seen_at) < COORDINATOR_SILENT_SECONDS
    )
