"""The restarts of a gang: how many count, and how long the next one waits. Pure.

Disruptions never count towards failurePolicy.maxRestarts and never wait.
"""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from holdfast_core.api import MAX_RECENT_RESTARTS, RestartRecord
from holdfast_operator.decide.facts.evidence import trained_since_restored
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.job import Now

FREE_RESTARTS = 2
"""Restarts from the same step that begin without a delay."""
MAX_DELAY_SECONDS = 60.0
FIRST_START_SECONDS = 15.0
MAX_START_SECONDS = 600.0
"""Shortest and longest back-off, before it is shortened at random, of a gang that ends before its first
step."""


def kept_restarts(world: World, now: Now) -> tuple[RestartRecord, ...]:
    """Return the restarts of the window, those that count, and those that are evidence about checkpoints.

    The last ones failed from the present restore point or from a quarantined checkpoint. A script that takes
    half an hour until it fails would otherwise never fail often enough from one checkpoint.
    """
    point = world.status.restore_point
    bases = set(world.status.quarantined)
    if point is not None and point.id is not None:
        bases.add(point.id)
    window = world.observed.job.spec.failure_policy.window_length
    saved_in = _round_of_newest_commit(world)
    return tuple(
        r
        for r in world.status.recent_restarts
        if now.is_within(window, r.at)
        or (r.round > saved_in and not r.ignored)
        or r.failed_from in bases
    )


def counted(records: Iterable[RestartRecord], world: World, now: Now) -> tuple[RestartRecord, ...]:
    """Return the restarts that count towards failurePolicy.maxRestarts.

    They are those within failurePolicy.window, and all since the newest committed step was saved. With the
    window alone, a gang that fails slowly, or waits long before each restart, would restart for ever.
    """
    window = world.observed.job.spec.failure_policy.window_length
    saved_in = _round_of_newest_commit(world)
    return tuple(
        r for r in records if not r.ignored and (r.round > saved_in or now.is_within(window, r.at))
    )


def _round_of_newest_commit(world: World) -> int:
    """Return the round that saved the newest committed step, as far as the operator knows, or -1.

    A round that has no restore point yet follows the last round that had one.
    """
    status = world.status
    committed, point = status.last_committed_step, status.restore_point
    if committed is None or (point is None and not status.lineage):
        return -1  # a restore point of another job counts the rounds of that job
    if point is not None:
        present, base = world.round, point.id
    else:
        present, base = status.lineage[-1].round, status.lineage[-1].base
    return present if base is None or committed > base.step else base.round


def with_restart(
    records: tuple[RestartRecord, ...], new: RestartRecord
) -> tuple[RestartRecord, ...]:
    """Return the records and one more, MAX_RECENT_RESTARTS at most.

    The oldest ignored restarts are dropped first. So no restart that counts is dropped: there are at most
    maxRestarts of them, which is lower than MAX_RECENT_RESTARTS.
    """
    found = [*records, new]
    while len(found) > MAX_RECENT_RESTARTS:
        found.pop(next((i for i, r in enumerate(found) if r.ignored), 0))
    return tuple(found)


def budget_spent(world: World, now: Now) -> bool:
    """Return whether one more restart that counts would exceed failurePolicy.maxRestarts."""
    restarts = len(counted(world.status.recent_restarts, world, now))
    return restarts >= world.observed.job.spec.failure_policy.max_restarts


def delay_seconds(world: World, now: Now) -> float:
    """Return the back-off before the next round, in seconds since the failure was first seen.

    It is 0 if a step was committed since the restore point. Without the back-off, a gang
    that fails repeatedly from the same step would spend its restart budget within seconds, before a user can
    look at it. The wait is between a half and the whole of 1, 2, 4 and so on seconds (ADR 0010). A gang that
    ends before its first step mostly lacks something outside of it, which takes minutes to come back. Its
    wait begins with FIRST_START_SECONDS, so that the default budget lasts for a quarter of an hour at least.
    """
    saved_in = _round_of_newest_commit(world)
    futile = sum(1 for r in kept_restarts(world, now) if r.round > saved_in)
    if futile < FREE_RESTARTS:
        return 0.0
    doubled = 2.0 ** min(futile - FREE_RESTARTS, 10)
    whole = min(doubled, MAX_DELAY_SECONDS)
    if not trained_since_restored(world):
        whole = min(FIRST_START_SECONDS * doubled, MAX_START_SECONDS)
    return whole * (1 + share_of(world)) / 2


def share_of(world: World) -> float:
    """Return a number in [0, 1) that is the same in every pass over this round of this job.

    Jobs that fail together, for example because their store does not answer, get different numbers, so they
    do not restart together. A random number would change with each pass and each restart of the operator.
    """
    seed = f"{world.observed.job.uid}/{world.round}".encode()
    return int.from_bytes(blake3(seed).digest(length=4), "big") / 2**32
