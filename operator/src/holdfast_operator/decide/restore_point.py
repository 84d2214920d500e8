"""Which step a round starts from: a pure choice over inventories, made once per round.

1. A candidate is a step with a manifest, on the lineage, saved by as many ranks as the gang has.
   The persisted commit is one too: the object store holds all of it.
2. The newest candidate wins if it is complete: each rank's shard is held by a member that answered
   for this round, or it is persisted.
3. An answer that did not come is Unknown, not Nothing: while a holder is Unknown, nothing below the
   newest known step is chosen, for at most HOLDERS_SECONDS. Then the newest complete one is taken
   and the reason recorded.
4. If a committed step is known to have existed and nothing is complete, the job waits. It never
   starts from nothing by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast_core.ids import CheckpointId, Digest, Rank, Step, TierName, Worker, worker_of
from holdfast_core.transfer.messages import ManifestInfo
from holdfast_operator.decide.status import Note
from holdfast_operator.decide.times import seconds_since
from holdfast_operator.decide.world import MemberState, World, on_lineage
from holdfast_operator.model import (
    CheckpointView,
    JobMemory,
    LineageEntry,
    Now,
    RestorePointView,
    Sources,
)
from holdfast_operator.reasons import Reason

HOLDERS_SECONDS = 60.0
MAX_LINEAGE = 64


@dataclass(frozen=True, slots=True)
class Chosen:
    point: RestorePointView
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Wait:
    note: Note


Choice = Chosen | Wait

_Holders = Mapping[tuple[CheckpointId, Rank, Digest], list[tuple[Worker, TierName]]]


@dataclass(frozen=True, slots=True)
class _Candidate:
    id: CheckpointId
    manifest: Digest
    info: ManifestInfo | None
    """None: known to be persisted, and no member has the manifest."""
    persisted: bool


def choose(world: World, memory: JobMemory, now: Now) -> Choice:
    """The restore point of the round, or what it waits for. Status.restore_point is unset."""
    missing = [m.worker for m in world.members if m.pod is None]
    if missing:
        return Wait(Note(Reason.STARTING, f"pods of workers {_some(missing)} are not there yet"))
    answered = [m for m in world.members if _has_answered(m, world)]
    unknown = [m for m in world.members if _may_hold(m, world)]
    timed_out = seconds_since(memory.round_seen_at, now) >= HOLDERS_SECONDS
    candidates = _candidates(world, answered)
    holders = _holders(answered)
    best = next((c for c in candidates if _is_complete(c, holders, world)), None)
    newest = _newest_known(world, candidates)
    below = newest is not None and (best is None or best.id.step < newest)
    survivors_silent = bool(unknown) and not answered_survivor(answered, world)
    if unknown and not timed_out and (below or survivors_silent):
        words = f"workers {_some([m.worker for m in unknown])} may hold the newest step"
        return Wait(Note(Reason.WAITING_FOR_HOLDERS, f"{words} and have not answered yet"))
    if best is not None:
        return _chosen(world, best, holders, newest, bool(unknown))
    committed = _committed(world)
    if committed is not None:
        return Wait(
            Note(
                Reason.RESTORE_POINT_UNAVAILABLE,
                f"step {committed} was committed, but no complete checkpoint can be read: the job "
                "waits for a worker that holds it; nothing is thrown away",
            )
        )
    return _from_spec(world, newest)


def answered_survivor(answered: list[MemberState], world: World) -> bool:
    return any(m.birth_round < world.round for m in answered)


def _has_answered(member: MemberState, world: World) -> bool:
    """Its inventory was taken after its seal, so it cannot change under the choice."""
    sidecar = member.sidecar
    return (
        member.alive
        and member.reachable
        and sidecar is not None
        and sidecar.inventory is not None
        and sidecar.inventory.round >= world.round
    )


def _may_hold(member: MemberState, world: World) -> bool:
    """Unknown: a survivor whose pod is there and has not answered. A pod that is born in this round
    has an empty node tier; one that never started has nothing either."""
    return (
        member.birth_round < world.round
        and member.alive
        and member.pod is not None
        and member.pod.ip is not None
        and not _has_answered(member, world)
    )


def _candidates(world: World, answered: list[MemberState]) -> list[_Candidate]:
    """Newest first; of one step, the newest round first."""
    status = world.status
    size = world.observed.job.spec.procs_per_worker * len(world.members)
    found: dict[CheckpointId, _Candidate] = {}
    for member in answered:
        inventory = member.sidecar.inventory if member.sidecar is not None else None
        for info in () if inventory is None else inventory.manifests:
            id_ = CheckpointId(info.step, info.round)
            if info.world_size != size or info.round >= world.round:
                continue
            if on_lineage(id_, status.lineage):
                found.setdefault(id_, _Candidate(id_, info.manifest, info, persisted=False))
    for checkpoint in _persisted(world):
        id_, manifest = checkpoint
        if on_lineage(id_, status.lineage):
            known = found.get(id_)
            manifest_info = None if known is None else known.info
            found[id_] = _Candidate(id_, manifest, manifest_info, persisted=True)
    return sorted(found.values(), key=lambda c: (c.id.step, c.id.round), reverse=True)


def _persisted(world: World) -> list[tuple[CheckpointId, Digest]]:
    """The commit in the status, and the older ones that Checkpoint objects record."""
    found: list[tuple[CheckpointId, Digest]] = []
    for checkpoint in world.observed.checkpoints:
        id_ = checkpoint.id
        if id_ is not None and checkpoint.manifest is not None and _restorable(world, checkpoint):
            found.append((id_, checkpoint.manifest))
    last = world.status.last_persisted
    if last is not None:
        found.append((last.id, last.manifest))
    return found


def _restorable(world: World, checkpoint: CheckpointView) -> bool:
    job = world.observed.job
    return (
        checkpoint.job == job.name
        and checkpoint.job_uid == job.uid
        and checkpoint.persisted
        and checkpoint.phase == "Committed"
        and not checkpoint.quarantined
        and not checkpoint.deleting
        and checkpoint.world_size == job.spec.procs_per_worker * len(world.members)
    )


def _holders(answered: list[MemberState]) -> _Holders:
    found: dict[tuple[CheckpointId, Rank, Digest], list[tuple[Worker, TierName]]] = {}
    for member in answered:
        inventory = member.sidecar.inventory if member.sidecar is not None else None
        for shard in () if inventory is None else inventory.shards:
            key = (CheckpointId(shard.step, shard.round), shard.rank, shard.blake3)
            found.setdefault(key, []).append((member.worker, shard.tier))
    return found


def _is_complete(candidate: _Candidate, holders: _Holders, world: World) -> bool:
    if candidate.persisted:
        return True
    info = candidate.info
    if info is None:
        return False
    named = {s.rank for s in info.shards}
    return len(named) == info.world_size and all(
        (candidate.id, s.rank, s.blake3) in holders for s in info.shards
    )


def _newest_known(world: World, candidates: list[_Candidate]) -> Step | None:
    """The newest step that is known to have been committed, readable or not."""
    steps = [c.id.step for c in candidates]
    committed = _committed(world)
    return max(steps if committed is None else [*steps, committed], default=None)


def _committed(world: World) -> Step | None:
    """The newest step that the status promises. A manifest alone promises nothing: its commit may
    have been cut off before every member had it."""
    status = world.status
    steps = [] if status.last_persisted is None else [status.last_persisted.step]
    if status.last_committed_step is not None:
        steps.append(status.last_committed_step)
    return max(steps, default=None)


def _chosen(
    world: World, best: _Candidate, holders: _Holders, newest: Step | None, unknown: bool
) -> Chosen:
    point = RestorePointView(
        step=best.id.step,
        round=best.id.round,
        manifest=best.manifest,
        sources=_sources(world, best, holders),
    )
    words = f"round {world.round} starts from step {best.id.step} of round {best.id.round}"
    if newest is None or best.id.step >= newest:
        return Chosen(point, Reason.RESTORE_POINT_CHOSEN, words)
    lower = f"{words}, not from {newest}:"
    if unknown:
        reason = Reason.HOLDER_UNREACHABLE
        words = f"{lower} a holder did not answer for {HOLDERS_SECONDS:.0f} s"
    else:
        reason = Reason.SHARDS_LOST
        words = f"{lower} every copy of one of its shards is gone"
    return Chosen(point, reason, words)


def _sources(world: World, best: _Candidate, holders: _Holders) -> Sources:
    """From where each rank will get its shard: the nearest tier that holds it."""
    per_worker = world.observed.job.spec.procs_per_worker
    counts = dict.fromkeys(TierName, 0)
    if best.info is None:
        return Sources(object=per_worker * len(world.members))
    for shard in best.info.shards:
        held = holders.get((best.id, shard.rank, shard.blake3), [])
        own = {tier for worker, tier in held if worker == worker_of(shard.rank, per_worker)}
        if TierName.MEMORY in own:
            counts[TierName.MEMORY] += 1
        elif own:
            counts[TierName.NODE] += 1
        elif held:
            counts[TierName.PEER] += 1
        else:
            counts[TierName.OBJECT] += 1
    return Sources(
        memory=counts[TierName.MEMORY],
        node=counts[TierName.NODE],
        peer=counts[TierName.PEER],
        object=counts[TierName.OBJECT],
    )


def _from_spec(world: World, unfinished: Step | None) -> Choice:
    """Nothing was ever committed: the beginning, or spec.restoreFrom."""
    job = world.observed.job
    name = job.spec.restore_from
    if name is None:
        words = f"round {world.round} starts from the very beginning"
        if unfinished is not None:
            words += f": the commit of step {unfinished} was cut off, one of its shards is gone"
            return Chosen(RestorePointView(), Reason.SHARDS_LOST, words)
        return Chosen(RestorePointView(), Reason.RESTORE_POINT_CHOSEN, words)
    source = next((c for c in world.observed.checkpoints if c.name == name), None)
    if source is None or source.step is None or source.manifest is None or source.job_uid is None:
        words = f"Checkpoint {name} of spec.restoreFrom is not there, or not committed"
        return Wait(Note(Reason.RESTORE_POINT_UNAVAILABLE, words))
    point = RestorePointView(
        step=source.step,
        round=source.round,
        manifest=source.manifest,
        # Its ranks, which need not be as many as this job's: they read any shard of the store.
        sources=Sources(object=source.world_size or job.spec.world_size),
        job_uid=source.job_uid,
        job_namespace=source.job_namespace or job.namespace,
    )
    words = f"round {world.round} starts from Checkpoint {name}, step {source.step}"
    return Chosen(point, Reason.RESTORE_POINT_CHOSEN, words)


def extend_lineage(
    lineage: tuple[LineageEntry, ...], entry: LineageEntry
) -> tuple[LineageEntry, ...]:
    """With the entry of a new round, compacted without letting a step back on the lineage.

    An entry is implied by a later one with the same or a lower base. When there are too many, the
    two oldest become one that is at least as strict as both.
    """
    kept = [e for e in lineage if not _implied(e, entry)]
    kept.append(entry)
    while len(kept) > MAX_LINEAGE:
        first, second = kept[0], kept[1]
        kept[:2] = [
            LineageEntry(second.round, first.base_step, first.base_round, first.base_manifest)
        ]
    return tuple(kept)


def _implied(old: LineageEntry, new: LineageEntry) -> bool:
    if new.base_step is None:
        return True
    return old.base_step is not None and old.base_step >= new.base_step


def _some(workers: list[Worker]) -> str:
    text = ", ".join(str(w) for w in workers[:8])
    return f"{text} and {len(workers) - 8} more" if len(workers) > 8 else text
