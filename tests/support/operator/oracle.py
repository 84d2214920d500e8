"""Rules that must hold in every run of a FakeCluster, stated without the code under test.

I1 and I4: no restore point is older than what a level promised. I3: each round has one restore point. I5:
rounds only increase. A restore point is a step that was committed or rolled forward, on the lineage. A gang
with a committed step starts over only if it is recorded, nothing complete is left anywhere, and the training
is shorter than its limit or a person has confirmed it. What a level promised is given up only for a step to
which a person has rolled the gang back, in the first round whose restore point is chosen after the order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.operator.fake_cluster import ChoiceMade, FakeCluster, is_ancestor, point_of
from tests.support.operator.toy_gang import Promise

from holdfast_core.api.rules import parse_duration
from holdfast_core.ids import CheckpointId, Level


def broken_rules(cluster: FakeCluster, copies: int) -> list[str]:
    """Return a sentence for each rule that the statuses written so far break."""
    return [*_rounds(cluster), *_choices(cluster, copies), *_deletions(cluster)]


def bases_of(cluster: FakeCluster) -> dict[int, CheckpointId | None]:
    return {c.status["restartRound"]: point_of(c.status) for c in cluster.choices}


def _rounds(cluster: FakeCluster) -> list[str]:
    found: list[str] = []
    highest, persisted = -1, (-1, -1)
    points: dict[int, Any] = {}
    for status in cluster.statuses:
        round_ = status.get("restartRound")
        if round_ is None:
            continue
        if round_ < highest:
            found.append(f"round went back from {highest} to {round_}")
        highest = max(highest, round_)
        point = status.get("restorePoint")
        if round_ in points and point != points[round_]:
            found.append(f"round {round_} changed its restore point to {point}")
        if point is not None:
            points[round_] = point
        last = status.get("lastPersisted")
        if last is not None:
            now = (last["step"], last["round"])
            if now < persisted and not _is_off_lineage(persisted, status["lineage"]):
                found.append(f"lastPersisted went back from {persisted} to {now}")
            persisted = now
    return found


def _is_off_lineage(step_and_round: tuple[int, int], lineage: list[dict[str, Any]]) -> bool:
    step, round_ = step_and_round
    bases = ((e["round"], e.get("base")) for e in lineage)
    later = [base for entry, base in bases if entry > round_]
    return any(base is None or int(base[1:].partition("-")[0]) < step for base in later)


def _deletions(cluster: FakeCluster) -> list[str]:
    """Check that the newest commit survives every pod that the operator deletes.

    With a lost node the newest commit may be lost, but a commit must remain.
    """
    found = []
    for deletion in cluster.deletions:
        before, after = deletion.before, deletion.after
        if before is None:
            continue
        if after is None or (after.step < before.step and not deletion.node_lost):
            found.append(f"deleting {deletion.name} left {after} of {before}")
    return found


def _choices(cluster: FakeCluster, copies: int) -> list[str]:
    found: list[str] = []
    bases: dict[int, CheckpointId | None] = {}
    for choice in cluster.choices:
        round_ = choice.status["restartRound"]
        point = point_of(choice.status)
        before = max(bases, default=None)
        if round_ in bases:
            found.append(f"round {round_} chose twice")
        if point is None and "lastCommittedStep" in choice.before:
            found.extend(_start_over(choice, cluster, bases))
        if point is not None:
            if point not in cluster.gang.manifests_made:
                found.append(f"round {round_} starts from {point}, which has no manifest")
            if before is not None and not is_ancestor(point, before, bases):
                found.append(f"round {round_} starts from {point}, which is off the lineage")
        if point is not None and _is_ordered(choice, point, before):
            bases[round_] = point
            continue
        persisted = choice.status.get("lastPersisted")
        # A quarantined checkpoint is not restored: ranks failed from it, or a drill found it damaged.
        apart = set(choice.status.get("quarantined", ()))
        if persisted is not None and f"s{persisted['step']}-r{persisted['round']}" in apart:
            persisted = None
        if persisted is not None:
            step_and_round = (persisted["step"], persisted["round"])
            if _is_off_lineage(step_and_round, choice.before.get("lineage", [])):
                persisted = None
        if persisted is not None and (point is None or point.step < persisted["step"]):
            found.append(f"round {round_} starts from {point}, below lastPersisted {persisted}")
        for promise in cluster.gang.promises:
            if before is None or promise.id.round >= round_:
                continue
            if not is_ancestor(promise.id, before, bases) or str(promise.id) in apart:
                continue
            kept = holds(promise, choice.readable_members, copies)
            if kept and (point is None or point.step < promise.id.step):
                found.append(
                    f"round {round_} starts from {point}, below {promise.id} ({promise.level})"
                )
        bases[round_] = point
    return found


def _is_ordered(choice: ChoiceMade, point: CheckpointId, before: int | None) -> bool:
    """Return whether a person has rolled the gang back to this step since the choice before."""
    order = choice.rollback
    return (order.get("round"), order.get("step")) == (before, point.step)


def _start_over(
    choice: ChoiceMade, cluster: FakeCluster, bases: Mapping[int, CheckpointId | None]
) -> list[str]:
    """Return what is wrong with a round that starts from nothing although a step was committed."""
    found: list[str] = []
    round_, before = choice.status["restartRound"], max(bases)
    running = next(c for c in choice.status["conditions"] if c["type"] == "Running")
    if running["reason"] != "StartedOver" or "gives up" not in running["message"]:
        found.append(f"round {round_} starts from nothing and says {running}")
    found.extend(
        f"round {round_} starts over although the store has {id_}"
        for id_ in choice.stored
        if is_ancestor(id_, before, bases)
    )
    policy = choice.start_over
    limit = parse_duration(policy.get("atMost", "30m")).total_seconds()
    newest = max(
        (p.id.step for p in cluster.gang.promises if is_ancestor(p.id, before, bases)), default=0
    )
    # A step of the toy gang takes a second.
    if newest > limit and choice.rollback != {"round": before}:
        found.append(f"round {round_} gives up step {newest}, and nobody has confirmed it")
    return found


def holds(promise: Promise, readable: frozenset[str], copies: int) -> bool:
    """Return whether the promise still holds if only the disks of the `readable` pods can be read."""
    lost = len(promise.pods - readable)
    match promise.level:
        case Level.LOCAL:
            return lost == 0
        case Level.REPLICATED:
            return lost <= copies
        case Level.PERSISTED:
            return False  # the check of lastPersisted covers it
