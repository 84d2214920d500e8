"""status.spares: which spare pods there are to be, and which workers spares have become (ADR 0015). Pure.

CAS 1 of a round writes both together with the members of the round. A spare that becomes a worker gives its
number to a new spare, whose birth round is this round: the new pod has another name.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_core.api import PromotedSpare, SparesStatus, TrainingJobStatus, changed
from holdfast_core.ids import FIRST_SPARE, RestartRound, Worker
from holdfast_operator.decide.facts.world import World
from holdfast_operator.decide.spares.ready import choose_spares, ready_spares


def with_spares(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with as many spares as the spec wants, and the number of those that are ready."""
    status = _sized(status, world)
    if status.spares is None:
        return status
    births = dict(enumerate(status.spares.births, FIRST_SPARE))
    ready = sum(births.get(s.worker) == s.birth_round for s in ready_spares(world, status))
    return changed(status, spares=changed(status.spares, ready=ready))


def with_new_spares(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status of a round in which all pods are new, the spares among them."""
    return _sized(changed(status, spares=None), world)


def with_promotions(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status of a round with ready spares instead of its new pods, as far as there are any.

    A spare that has become a worker by a newer status than this one stays this worker, as a survivor: the
    status was restored from a backup (ADR 0002).
    """
    round_ = status.restart_round or RestartRound(0)
    status = _sized(status, world)
    members = list(status.members)
    old = status.spares or SparesStatus()
    promoted = {r.worker: r for r in old.promoted if _is_member(r, members)}
    before = world.status.members
    replaced = [
        Worker(w)
        for w, birth in enumerate(members)
        if birth == round_ and (w >= len(before) or before[w] != round_)
    ]
    taken = {w: world.claims[w] for w in replaced if w in world.claims and round_ > 0}
    for worker in taken:
        members[worker] = RestartRound(round_ - 1)
    free = [w for w in replaced if w not in taken]
    for worker, spare in choose_spares(world, status, free).items():
        if spare.pod is not None and spare.birth_round < round_:
            taken[worker] = spare.pod
    births = dict(enumerate(old.births, FIRST_SPARE))
    for worker, pod in taken.items():
        promoted[worker] = PromotedSpare(worker=worker, birth=members[worker], pod=pod.name)
        if births.get(pod.worker) == pod.birth_round:
            births[pod.worker] = round_
    if not (births or promoted):
        return changed(status, spares=None)
    spares = changed(
        old, births=tuple(births.values()), promoted=tuple(promoted[w] for w in sorted(promoted))
    )
    return changed(status, members=tuple(members), spares=spares)


def _is_member(record: PromotedSpare, members: Sequence[RestartRound]) -> bool:
    return record.worker < len(members) and members[record.worker] == record.birth


def _sized(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with the number of spares of the spec. Additional ones are born in its round."""
    wanted, round_ = world.wanted_spares, status.restart_round
    old = status.spares or SparesStatus()
    if round_ is None or len(old.births) == wanted:
        return status
    births = (*old.births[:wanted], *(round_,) * (wanted - len(old.births)))
    if not (births or old.promoted):
        return changed(status, spares=None)
    return changed(status, spares=changed(old, births=births, ready=0))
