"""What the coordinator decides: the next write, manifests, deletions, and the plan of the workers. Pure.

Of the steps that wait in slots, one is written to the node tiers next, and others are dropped. The
coordinator chooses for all ranks, because a step is local only when every rank has written it, and ranks
that chose independently would seldom choose the same step. What it knows of the slots is what the reports of
the workers list (`RankSaves`).

A manifest depends only on the job, the ROUND and what the ranks report about their shards, so every
coordinator of a round builds the same bytes, also after a restart.

Steps that the retention policy (`holdfast_core.retention`) no longer keeps, and steps that can no longer be
committed, are deleted from the nodes.

The plan says what the workers are to do next and which levels their steps have reached. It follows from the
ledger alone and is the same for all workers, except that a pod is released in its turn. It is always the
whole plan. A worker does what it has not done yet of it (`missing`), so a plan that was lost needs no
repetition, and one that arrives twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from holdfast_core.contract import SidecarContract
from holdfast_core.format.manifest import (
    JobIdentity,
    manifest_digest,
    manifest_document,
    parse_manifest_of,
)
from holdfast_core.ids import CheckpointId, Digest, JobUid, Level, Rank, Step
from holdfast_core.messages.schema import (
    Plan,
    RankSaves,
    RestorePoint,
    Round,
    ShardInfo,
    StepOutcome,
)
from holdfast_core.retention import (
    MIN_KEPT,
    Committed,
    RetentionPolicy,
    RetentionReason,
    RetentionState,
    plan_retention,
)
from holdfast_sidecar.coordinator.ledger import Ledger, StepEntry
from holdfast_sidecar.upkeep.prune import protected_steps, quarantined


@dataclass(frozen=True, slots=True)
class SlotChoice:
    """What becomes of the steps that wait in slots."""

    chosen: Step | None = None
    """The step to write next."""
    dropped: tuple[Step, ...] = ()
    """Steps whose slots are freed, oldest first."""
    newest: Step | None = None
    """The newest waiting step that every rank has handed over. A seal would have it restored."""

    @property
    def pending(self) -> bool:
        """Whether a step that waits or waited in slots becomes local without another save."""
        return self.newest is not None or self.chosen is not None


def choose(ledger: Ledger, saves: Mapping[Rank, RankSaves], base: Step | None = None) -> SlotChoice:
    """Return the choice that follows from the messages received so far.

    Args:
        ledger: The steps, with those that are written.
        saves: The reported saves of each rank whose worker has sent this coordinator everything it had to
            send.
        base: Step of the restore point. Ranks that count from 0 again save steps up to it, which are refused
            as parts of this round's history.
    """
    waiting = {
        step for found in saves.values() for step in found.waiting if not ledger.is_forgotten(step)
    }
    floor = -1 if base is None else base
    newest = max((s for s in waiting if s > floor and _is_complete(s, ledger, saves)), default=None)
    chosen = _chosen(ledger, saves, newest)
    local = ledger.newest(Level.LOCAL)
    newer = (newest, None if local is None else local.step)
    replaced_below = max([floor + 1, *(step for step in newer if step is not None)])
    dropped = (
        step
        for step in waiting
        if step != chosen and (step < replaced_below or _is_skipped(step, ledger, saves))
    )
    return SlotChoice(chosen, tuple(sorted(dropped)), newest)


def _chosen(ledger: Ledger, saves: Mapping[Rank, RankSaves], newest: Step | None) -> Step | None:
    """Return the step to write next.

    An earlier choice is kept while a rank writes it or has it to write, unless another rank has lost it.
    Otherwise this is the newest step that every rank has handed over, once no rank in whose slot it waits is
    writing another step: a busy rank would have to keep the chosen step in a slot that it needs for later
    saves.
    """
    earlier = ledger.chosen
    if earlier is not None and _is_complete(earlier, ledger, saves):
        entry = ledger.steps.get(earlier)
        is_open = entry is None or not entry.local
        # A step that every rank has written may still wait for its manifest, for ever if a node cannot store
        # it. The disks that have room go on with the next step.
        if is_open and any(earlier in found.under_way for found in saves.values()):
            return earlier
    if newest is None:
        return None
    return None if any(newest in s.waiting and s.writes for s in saves.values()) else newest


def _is_complete(step: Step, ledger: Ledger, saves: Mapping[Rank, RankSaves]) -> bool:
    """Return whether every rank has the step, in a slot or on its node tier."""
    if ledger.is_forgotten(step):
        return False
    ranks = map(Rank, range(ledger.world_size))
    return all(_has(rank, step, ledger, saves) for rank in ranks)


def _is_skipped(step: Step, ledger: Ledger, saves: Mapping[Rank, RankSaves]) -> bool:
    """Return whether a rank has saved this step or a newer one, but does not have it and never will.

    Ranks save in order. While other ranks kept such a step, their slots could fill with steps that never
    become complete, and they would not save again.
    """
    return any(s.newest >= step and not _has(r, step, ledger, saves) for r, s in saves.items())


def _has(rank: Rank, step: Step, ledger: Ledger, saves: Mapping[Rank, RankSaves]) -> bool:
    entry, found = ledger.steps.get(step), saves.get(rank)
    is_durable = entry is not None and rank in entry.durable
    return is_durable or (found is not None and step in found.under_way)


@dataclass(frozen=True, slots=True)
class Built:
    """The manifest of a step, and the shards of all ranks in order."""

    manifest: bytes
    digest: Digest
    shards: tuple[ShardInfo, ...]


def build_manifest(contract: SidecarContract, parent: Digest | None, entry: StepEntry) -> Built:
    """Build the manifest of a step whose shards are known for every rank.

    Args:
        contract: The contract of this pod, which names the job.
        parent: Digest of the manifest that the round restored from.
        entry: The step.

    Raises:
        FormatError: A rank reported a value that no manifest can hold.
    """
    ranks = [Rank(rank) for rank in range(entry.world_size)]
    shards = tuple(entry.shards[rank] for rank in ranks)
    manifest = manifest_document(
        JobIdentity(contract.namespace, contract.job, contract.job_uid),
        CheckpointId(entry.step, entry.round),
        parent,
        [(shard, entry.layouts[shard.rank]) for shard in shards],
    )
    return Built(manifest, manifest_digest(manifest), shards)


def shard_infos(
    document: bytes, job_uid: JobUid, checkpoint: CheckpointId
) -> tuple[ShardInfo, ...]:
    """Return the shards that the checkpoint's manifest names. Raises what `parse_manifest_of` raises."""
    return tuple(s.info for s in parse_manifest_of(document, job_uid, checkpoint).shards)


_KEPT_UNDER_PRESSURE = 4


def steps_to_prune(
    ledger: Ledger,
    message: Round,
    older: Iterable[CheckpointId],
    persisted: RestorePoint | None,
    *,
    lost: Collection[Step] = (),
    pressed: bool = False,
    restored: bool = False,
) -> tuple[Step, ...]:
    """Return the steps to prune, oldest first.

    Besides what the policy names, these are incomplete steps that are older than the newest replicated one.

    Args:
        older: Checkpoints of older rounds on this round's lineage. They count as replicated.
        persisted: The newest persisted checkpoint.
        lost: Steps that may be unreadable. They protect nothing, and go when a newer one is replicated.
        pressed: A node has no room for another shard.
        restored: Every rank has trained from the restore point.
    """
    protecting = Level.REPLICATED if ledger.expects_copies else Level.LOCAL
    committed = (
        *(Committed(c, Level.REPLICATED) for c in older),
        *(
            Committed(CheckpointId(e.step, e.round), e.level)
            for e in ledger.steps.values()
            if e.level is not None
        ),
    )
    apart = {c.step for c in quarantined(message)}
    plan = plan_retention(
        RetentionState(
            committed=committed,
            # Volumes are small, so that the other rules apply to the object store only.
            policy=RetentionPolicy(keep_last=max(MIN_KEPT, message.policy.keep_last)),
            needed={
                RetentionReason.PINNED: _of_steps(committed, message.pinned),
                RetentionReason.QUARANTINED: _of_steps(committed, apart),
                RetentionReason.UPLOADING: ledger.uploads.wanted,
                RetentionReason.RESTORE_POINT: _own(message.restore_point),
                RetentionReason.NEWEST_PERSISTED: _own(persisted),
            },
            protecting_level=protecting,
            round=message.round,
            pressed=pressed,
            restored=restored,
        )
    )
    newest = ledger.newest(Level.REPLICATED)
    abandoned = [
        s
        for s, e in ledger.steps.items()
        if not e.complete and newest is not None and s < newest.step and s not in ledger.listed
    ]
    abandoned += [s for s in lost if newest is not None and s < newest.step]
    anchor = ledger.newest(protecting)
    safe = () if anchor is None else (CheckpointId(anchor.step, anchor.round),)
    return tuple(sorted({*plan.prune_steps, *abandoned} - protected_steps(message, safe)))


def _of_steps(committed: Iterable[Committed], steps: Collection[Step]) -> list[CheckpointId]:
    return [c.checkpoint for c in committed if c.checkpoint.step in steps]


def _own(point: RestorePoint | None) -> tuple[CheckpointId, ...]:
    """Return the checkpoint if it is one of this job."""
    found = None if point is None else point.own_checkpoint
    return () if found is None else (found,)


def abandoned_steps(
    ledger: Ledger, saves: Mapping[Rank, RankSaves], ranks: Iterable[Rank], *, pressed: bool = False
) -> tuple[Step, ...]:
    """Return the steps of this round that one of these ranks can no longer prepare, oldest first.

    A step of which a member has the manifest is not among them: see `lost_steps`.

    While one rank cannot write, the shards of such steps would fill the nodes of the other ranks.

    Args:
        ledger: The steps.
        saves: The reported saves of each rank whose worker has sent this coordinator everything it had to
            send.
        ranks: The ranks that are looked at. A report changes what is known about its own ranks only.
        pressed: A node has no room for another shard. Steps that a rank has not handed over yet are given
            up, too, except for the newest `_KEPT_UNDER_PRESSURE`, which the rank may be copying now.
    """
    incomplete = sorted(
        s for s, e in ledger.steps.items() if not e.complete and s not in ledger.listed
    )
    recent = incomplete[-_KEPT_UNDER_PRESSURE:]
    looked_at = tuple(ranks) if incomplete else ()

    def is_gone(step: Step, rank: Rank) -> bool:
        found = saves.get(rank)
        if rank in ledger.steps[step].shards or (found is not None and step in found.under_way):
            return False
        return (found is not None and found.newest >= step) or (pressed and step not in recent)

    return tuple(step for step in incomplete if any(is_gone(step, rank) for rank in looked_at))


def lost_steps(
    ledger: Ledger, saves: Mapping[Rank, RankSaves], ranks: Iterable[Rank]
) -> tuple[Step, ...]:
    """Return the listed steps of which one of these ranks has no shard any more, oldest first.

    They are committed, and other nodes may have copies. So they are neither brought to a level again nor
    given up: they count as checkpoints of an older round do.

    Args:
        ledger: The steps.
        saves: The reported saves of these ranks.
        ranks: Ranks whose workers have sent this coordinator everything they had to send.
    """
    steps = sorted(step for step in ledger.listed if not ledger.is_forgotten(step))
    looked_at = tuple(ranks) if steps else ()
    return tuple(s for s in steps if not all(_has(r, s, ledger, saves) for r in looked_at))


def plan(ledger: Ledger, *, released: bool = False, is_first: bool = False) -> Plan:
    """Return the whole plan for a worker.

    Args:
        ledger: How far the steps of the round are.
        released: The worker's pod may end.
        is_first: The worker is the coordinator's, which stores manifests before the others: a manifest that
            any of them has also exists there.
    """
    steps = sorted(ledger.steps.items())
    request = ledger.uploads.request
    known = None if request is None else ledger.steps.get(request.checkpoint.step)
    return Plan(
        ledger.round,
        levels=tuple(
            StepOutcome(step, entry.round, entry.level)
            for step, entry in steps
            if entry.level is not None
        ),
        write=ledger.chosen,
        upload=request if known is not None and known.local else None,
        manifests=tuple(
            (CheckpointId(step, entry.round), entry.manifest_digest)
            for step, entry in steps
            if entry.manifest_digest is not None
            and not entry.local
            and (is_first or entry.stored >= ledger.first)
        ),
        drop=ledger.dropped,
        released=released,
    )


def missing(wanted: Plan, known: Plan) -> Plan | None:
    """Return the part of a plan that a worker has not begun. None: nothing.

    `released` is not part of it: the release of the pod may be carried out again.

    Args:
        wanted: The whole plan.
        known: The whole plan that the worker has received before.
    """
    levels, dropped = frozenset(known.levels), frozenset(known.drop)
    found = Plan(
        wanted.round,
        levels=tuple(level for level in wanted.levels if level not in levels),
        write=wanted.write,
        upload=None if wanted.upload == known.upload else wanted.upload,
        manifests=wanted.manifests,
        drop=tuple(step for step in wanted.drop if step not in dropped),
        save_from=None if wanted.save_from == known.save_from else wanted.save_from,
        stop=wanted.stop and not known.stop,
    )
    nothing = Plan(wanted.round, write=known.write, manifests=known.manifests)
    return None if found == nothing else found
