"""The gang of a round: its pods, their certificates, seals, and what ROUND tells each member. Pure.

1. CAS 1 makes the fence durable before the round has any other effect (writes.py).
2. Survivors are sealed, missing pods are created, and obsolete pods are deleted (member_actions).
3. After CAS 2, ROUND is sent to the members (round_actions).

ROUND is sent to each member that has not acknowledged its present content. Only the content is compared, so
ROUND is repeated exactly when its content changes or a sidecar lost it.

Copies: which worker keeps copies of which worker's shards depends on the domains alone. The workers are
sorted by topology domain. The first copy goes to the worker that follows by the size of the largest domain:
it is in another domain, and each worker keeps one such copy. Further copies use more domains while there are
any. If one domain has more than half of the gang, no such shift exists. Then its members use the workers of
other domains in turn, and workers of their own domain if there are too few others: such a copy still survives
the loss of the source's pod.

Interval: with `auto`, ranks compute the interval from the measured cost of a save and the mean time between
failures. A rank begins again after each failure and cannot measure that time. The operator therefore
estimates it when a round begins, and keeps it in the status, because ROUND must not change while nothing else
does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from holdfast_core.api import (
    Compression,
    JobCondition,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import RestartRound, Step, Worker
from holdfast_core.messages.codec import MAX_MANY
from holdfast_core.messages.schema import (
    Member,
    Policy,
    RestorePoint,
    Round,
    Seal,
    Timing,
)
from holdfast_operator.decide.facts import scheduling
from holdfast_operator.decide.facts.nodes import (
    create_spares,
    delete_lost_spares,
    domain_of,
    make_room,
    misplaced_pods,
    misplaced_spares,
    new_pods,
)
from holdfast_operator.decide.facts.readable import with_released
from holdfast_operator.decide.facts.rollback import first_round
from holdfast_operator.decide.facts.sizes import elastic_of
from holdfast_operator.decide.facts.spec import birth_problem, outdated_pods
from holdfast_operator.decide.facts.world import MemberState, World
from holdfast_operator.decide.report.conditions import factor as hang_factor
from holdfast_operator.model import labels
from holdfast_operator.model.actions import Action, CallPath, Delete, DesiredObject, OutgoingRound
from holdfast_operator.model.job import Done, Reachable
from holdfast_operator.model.render import render_certificates, standing_objects

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
            actions.extend(misplaced_pods(world) or scheduling.strays(world))
        known = {a.uid for a in actions if isinstance(a, Delete)}
        actions.extend(a for a in outdated_pods(world) if getattr(a, "uid", None) not in known)
    actions.extend(_leaves(world, births))
    if births and world.spec.template is not None:  # else another controller creates the pods
        group = scheduling.present_group(world)
        actions.extend(new_pods(world, [(m.worker, m.birth_round) for m in births], group))
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
    creates = create_spares(world)
    if creates:
        world.remember_done(Done.SPARES_CREATED)
    return [*creates, *actions]


def _births(world: World) -> list[MemberState]:
    """Return the members whose pods of this round are missing and are created now.

    Once the restore point is chosen, a missing pod that had started is lost and requires a new round: an
    empty pod must not take the name of one that may have held shards. In a queue, a pod is created once the
    older pod of its worker no longer counts there.
    """
    occupied = scheduling.occupied(world)
    return [
        m
        for m in world.members
        if m.birth_round == world.round
        and m.pod is None
        and world.awaits_start(m)
        and m.worker not in occupied
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
    each member of each gang again and send it the ROUND that it has. The first calls of a thousand
    coordinators wait for call slots, for longer on a slow machine. So no time ends the wait for one that has
    an address: it is called in its turn, and then it answers, or it becomes unreachable.
    """
    current = world.coordinator_member()
    if (
        not world.status.is_true(JobCondition.RUNNING)
        or world.coordinator is not None
        or current is None
        or not current.alive
    ):
        return False
    if current.sidecar is None:
        return world.seconds_since(world.memory.round_seen_at) < COORDINATOR_SILENT_SECONDS
    return current.sidecar.reachable is Reachable.UNKNOWN


# --------------------------------------------------------------------------- copies


def place_copies(domains: tuple[str, ...], copies: int) -> dict[Worker, tuple[Worker, ...]]:
    """Return, for each worker, the workers that keep copies of its shards.

    Args:
        domains: The topology domain of each worker.
        copies: Number of copies of each shard. It is limited to the number of other workers.
    """
    count = len(domains)
    copies = min(copies, count - 1)
    if copies <= 0:
        return {}
    order = sorted(range(count), key=lambda w: (domains[w], w))
    largest = max(Counter(domains).values())
    found = {
        source: sorted(_targets(order, domains, position, largest, copies))
        for position, source in enumerate(order)
    }
    return {Worker(w): tuple(map(Worker, found[w])) for w in sorted(found)}


def _targets(
    order: list[int], domains: tuple[str, ...], position: int, largest: int, copies: int
) -> list[int]:
    source = order[position]
    chosen: list[int] = []
    used = {domains[source]}
    for candidate in _candidates(order, domains, position, largest):
        if domains[candidate] not in used:  # each copy in a new domain, while there is one
            chosen.append(candidate)
            used.add(domains[candidate])
        if len(chosen) == copies:
            return chosen
    for candidate in _candidates(order, domains, position, largest):
        if candidate not in chosen:
            chosen.append(candidate)
        if len(chosen) == copies:
            return chosen
    return chosen


def _candidates(
    order: list[int], domains: tuple[str, ...], position: int, largest: int
) -> Iterator[int]:
    """Yield every other worker once, the best target first."""
    count = len(order)
    if 2 * largest <= count:
        shifts = chain(
            range(largest, count - largest + 1),
            range(1, largest),
            range(count - largest + 1, count),
        )
        yield from (order[(position + shift) % count] for shift in shifts)
        return
    own = domains[order[position]]
    elsewhere = [w for w in order if domains[w] != own]
    turn = position % len(elsewhere) if elsewhere else 0
    yield from elsewhere[turn:]
    yield from elsewhere[:turn]
    near = (order[(position + shift) % count] for shift in range(1, count))
    yield from (w for w in near if domains[w] == own)


# --------------------------------------------------------------------------- the interval


def timing(world: World) -> Timing | None:
    """Return the interval of this round as a time, or None if it is a number of steps."""
    interval = world.spec.checkpoint.interval
    if interval.steps is not None:
        return None
    expected = world.status.expected_mtbf_seconds
    seconds = None if interval.seconds is None else float(interval.seconds)
    return Timing(seconds, interval.expected_mtbf_seconds if expected is None else expected)


def with_expected_failures(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status of a round that begins, with the mean time between failures that it expects."""
    interval = world.spec.checkpoint.interval
    if not interval.auto:
        return changed(status, expected_mtbf_seconds=None)
    trained = 0.0 if status.goodput is None else status.goodput.training_seconds
    mtbf_seconds = estimated_mtbf(interval.expected_mtbf_seconds, trained, status.restarts)
    return changed(status, expected_mtbf_seconds=mtbf_seconds)


def estimated_mtbf(expected_seconds: float, trained_seconds: float, restarts: int) -> float:
    """Return the estimated mean time between failures, in seconds.

    What the user expects counts as much as one failure after that time. The measurements of the job
    outweigh it after some failures, and one early failure does not make the gang save all the time.
    """
    return (expected_seconds + trained_seconds) / (1 + restarts)


ADDRESSES_EVERY_SECONDS = 1.0
"""Shortest interval between repetitions of ROUND while members have no address yet. Without it, 4,096 pods
that start one after another would cause 4,096 times 4,096 calls."""


# --------------------------------------------------------------------------- coordinator


def first_coordinator(world: World) -> Worker:
    """Return the coordinator of a new round: the lowest survivor that answers, because it has the manifests.

    Else it is the lowest survivor, else worker 0.
    """
    survivors = [m for m in world.members if m.birth_round < world.round and m.alive]
    answering = [m for m in survivors if m.reachable]
    chosen = answering or survivors or list(world.members)
    return chosen[0].worker


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
    complete: bool
    """Whether every member has acknowledged the present content, and the content has every address."""


def round_actions(world: World) -> RoundPlan:
    """Return the ROUND messages for members that have not acknowledged the present content.

    The restore point of the round must be chosen.
    """
    message = round_message(world)
    digest = message.content_digest()
    complete = all(m.address for m in message.members)
    behind = [m for m in world.members if not _holds(m, world.round, digest)]
    if not behind:
        return RoundPlan((), complete)
    sent = world.memory.done.get(Done.ROUND_SENT)
    if not complete and sent is not None and world.now.monotonic - sent < ADDRESSES_EVERY_SECONDS:
        return RoundPlan((), complete=False)
    outgoing = OutgoingRound(replace(message, version=_highest_version(world) + 1), digest)
    actions: list[Action] = []
    for member in behind:
        if member.alive and member.sealed_for(world.round):  # else member_actions seals it first
            actions.extend(member.call(CallPath.ROUND, outgoing))
    if actions:
        world.remember_done(Done.ROUND_SENT)
    return RoundPlan(tuple(actions), complete=False)


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
    status, last = world.status, world.last_persisted
    # A worker without a node gets a domain of its own.
    domains = tuple(domain_of(world, m.node) or f"?{m.worker}" for m in world.members)
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
        restore_point=restore_point_message(status),
        coordinator=first_coordinator(world) if coordinator is None else coordinator,
        store_host=store_host(world),
        workers=len(members),
        members=members,
        copies=place_copies(domains, world.copies),
        policy=_policy(world),
        pinned=_pinned_steps(world),
        quarantined=tuple(
            RestorePoint(q.step, q.round) for q in with_released(status, world).quarantined
        ),
        last_persisted=None if last is None else RestorePoint(last.step, last.round, last.manifest),
        lineage_from=first_round(status.lineage),
        rolled_back_from=status.lineage[-1].rolled_back_from if status.lineage else None,
        hold_uploads=bool(world.reached_quotas),
    )


def restore_point_message(status: TrainingJobStatus) -> RestorePoint:
    view = status.restore_point
    if view is None:
        return RestorePoint()
    manifest = status.lineage[-1].base_manifest if status.lineage else None
    return RestorePoint(view.step, view.round, manifest, view.job_uid, view.job_namespace)


def _policy(world: World) -> Policy:
    spec = world.spec
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
        shrinks=elastic_of(world.job) is not None,
    )


def _pinned_steps(world: World) -> tuple[Step, ...]:
    """Return the steps of the pinned checkpoints, at most MAX_MANY of them.

    Sidecars refuse a longer message, and the gang would stand still. What is left out is in the object store,
    which keeps it without a copy on a node.
    """
    pinned = [
        (c.spec.step, c.persisted)
        for c in world.own_checkpoints
        if c.spec.pin and c.spec.step is not None
    ]
    # Two rounds may have saved a step, and the store may have that of one only.
    on_nodes_only = {step for step, persisted in pinned if not persisted}
    steps = {step for step, _ in pinned}
    return tuple(sorted(sorted(steps, key=lambda s: (s not in on_nodes_only, -s))[:MAX_MANY]))
