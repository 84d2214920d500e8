"""Find a step whose commit a failure has interrupted, although every rank's shard is on its node. Pure.

The ranks of a gang save a step together, and each sidecar writes its shard before it answers SEAL. If no pod
is lost, such a step is as complete as a committed one, except for its manifest (ADR 0018).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast_core.errors import FormatError
from holdfast_core.format.manifest import JobIdentity, manifest_document
from holdfast_core.ids import CheckpointId, Step, ranks_of
from holdfast_core.messages.schema import UncommittedShard
from holdfast_operator.decide.facts.apart import quarantined
from holdfast_operator.decide.facts.readable import has_answered, may_store_shards
from holdfast_operator.decide.facts.world import MemberState, World

Saved = tuple[UncommittedShard, ...]
"""The shards of one step of all ranks of a worker, in order of the ranks."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A step that can be committed, or that can be as soon as all sidecars have answered."""

    id: CheckpointId
    manifest: str | None
    """Its manifest. None: not all sidecars have answered."""


def unfinished(world: World, above: Step | None) -> Unfinished | None:
    """Return the newest step above `above` whose commit was interrupted and may be finished, or None.

    It was saved in the newest round that has a restore point, by as many ranks as the gang has now. All
    members that have answered have it, and the others may.
    """
    lineage = world.status.lineage
    listed = [dict(_steps(m, world)) for m in world.members if has_answered(m, world)]
    silent = len(world.members) - len(listed)
    if not lineage or not listed or silent > sum(may_store_shards(m, world) for m in world.members):
        return None
    common = set.intersection(*(set(steps) for steps in listed)) - quarantined(world)
    of_round = (c for c in common if c.round == lineage[-1].round < world.round)
    newest = max(of_round, default=None)
    if newest is None or (above is not None and newest.step <= above):
        return None
    if silent:
        return Unfinished(newest, None)
    try:
        return Unfinished(newest, _manifest(world, newest, [steps[newest] for steps in listed]))
    except FormatError:  # a sidecar has sent a value that no manifest can hold
        return None


def _steps(member: MemberState, world: World) -> Iterator[tuple[CheckpointId, Saved]]:
    """Yield the steps of which the member has one shard of each of its ranks."""
    inventory = None if member.sidecar is None else member.sidecar.inventory
    per_worker = world.observed.job.spec.procs_per_worker
    size = per_worker * len(world.members)
    own = list(ranks_of(member.worker, per_worker))
    by_step: dict[CheckpointId, list[UncommittedShard]] = {}
    for item in () if inventory is None else inventory.uncommitted:
        by_step.setdefault(CheckpointId(item.step, item.round), []).append(item)
    for checkpoint, found in by_step.items():
        found.sort(key=lambda item: item.shard.rank)
        if [i.shard.rank for i in found] == own and all(i.world_size == size for i in found):
            yield checkpoint, tuple(found)


def _manifest(world: World, checkpoint: CheckpointId, saved: list[Saved]) -> str:
    """Return the manifest that the coordinator of that round would have built."""
    job = world.observed.job
    return manifest_document(
        JobIdentity(job.namespace, job.name, job.uid),
        checkpoint,
        world.status.lineage[-1].base_manifest,
        [item.shard.entry(item.layout) for of_worker in saved for item in of_worker],
    ).decode()
