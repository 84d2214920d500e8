"""Create and delete the pods of spares (ADR 0015). Pure.

Spares are less urgent than workers. They are created while the gang trains, and deleted when a worker has no
room. A spare that is lost holds nothing, so it is created again under its name.
"""

from __future__ import annotations

from holdfast_core.ids import FIRST_SPARE, MAX_SPARES
from holdfast_core.names import pod_name
from holdfast_operator.decide.facts.world import World, worker_pod
from holdfast_operator.model import kinds
from holdfast_operator.model.actions import Action, Delete, DesiredObject
from holdfast_operator.render.secret import render_certificates


def create_spares(
    world: World, avoided: tuple[str, ...], failed: tuple[str, ...]
) -> list[DesiredObject]:
    """Return the missing spares and the certificates of those that have not started.

    Args:
        avoided: Names of lost nodes that new pods exclude.
        failed: Names of nodes that they exclude because workers failed there.
    """
    job = world.observed.job
    secrets: dict[str, DesiredObject] = {}
    pods: list[DesiredObject] = []
    for spare in world.spares:
        pod, birth = spare.pod, spare.birth_round
        if pod is None or (not pod.sidecar_started and pod.alive):
            secret = world.certificates(spare.worker, birth)
            # A Secret cannot be changed, so it has the leaves of all spares that may be created later.
            names = (pod_name(job.name, job.uid, FIRST_SPARE + n, birth) for n in range(MAX_SPARES))
            body, mounted = render_certificates(job, secret), world.is_mounted(secret)
            secrets[secret] = DesiredObject(body, tuple(names), mounted)
        if pod is None:
            pods.append(DesiredObject(worker_pod(world, spare.worker, birth, avoided, failed)))
    return [*secrets.values(), *pods]


def delete_lost_spares(world: World) -> list[Action]:
    """Return deletes of the spares that have ended or are on a lost node."""
    return [
        Delete(
            kinds.POD, s.pod.name, s.pod.uid, "the spare has ended or its node is lost", s.node_lost
        )
        for s in world.spares
        if s.pod is not None and (s.node_lost or (s.pod.ended and not s.pod.terminating))
    ]


def make_room(world: World) -> list[Action]:
    """Return deletes of all spares if a worker is unschedulable, or the creation of its pod is refused."""
    if has_room(world):
        return []
    return [
        Delete(
            kinds.POD, s.pod.name, s.pod.uid, "a worker needs the room of the spare", s.node_lost
        )
        for s in world.spares
        if s.pod is not None and (s.node_lost or not s.pod.terminating)
    ]


def has_room(world: World) -> bool:
    """Return whether no worker is unschedulable, and no creation of a worker's pod was refused."""
    return all(m.pod is not None and m.pod.reason != "Unschedulable" for m in world.unscheduled)
