"""Decide which steps are deleted from the nodes.

These are the steps that the retention policy (`holdfast_core.retention`) no longer keeps, and steps
that can no longer be committed. These functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast_core.ids import CheckpointId, Level, Rank, Step
from holdfast_core.messages.schema import RankSaves, RestorePoint, Round
from holdfast_core.retention import Committed, RetentionState, plan_retention
from holdfast_sidecar.coordinator.ledger import Ledger
from holdfast_sidecar.upkeep.prune import protected_steps, quarantined

_KEPT_UNDER_PRESSURE = 4


def steps_to_prune(
    ledger: Ledger,
    message: Round,
    older: Iterable[CheckpointId],
    persisted: RestorePoint | None,
    *,
    pressed: bool = False,
    restored: bool = False,
) -> tuple[Step, ...]:
    """Return the steps to prune, oldest first.

    Besides what the policy names, these are incomplete steps that are older than the newest replicated one.

    Args:
        older: Checkpoints of older rounds on this round's lineage. They count as replicated.
        persisted: The newest persisted checkpoint.
        pressed: A node has no room for another shard.
        restored: Every rank has trained from the restore point.
    """
    plan = plan_retention(
        RetentionState(
            committed=(
                *(Committed(c, Level.REPLICATED) for c in older),
                *(
                    Committed(CheckpointId(e.step, e.round), e.level)
                    for e in ledger.steps.values()
                    if e.level is not None
                ),
            ),
            round=message.round,
            keep_last=message.policy.keep_last,
            protecting_level=Level.REPLICATED if ledger.expects_copies else Level.LOCAL,
            restore_point=message.restore_point.own_checkpoint,
            pinned=frozenset(message.pinned) | {c.step for c in quarantined(message)},
            uploading=frozenset(ledger.uploads.wanted),
            newest_persisted=None if persisted is None else persisted.own_checkpoint,
            pressed=pressed,
            restored=restored,
        )
    )
    newest = ledger.newest(Level.REPLICATED)
    abandoned = [
        s
        for s, e in ledger.steps.items()
        if not e.complete and newest is not None and s < newest.step
    ]
    protecting = Level.REPLICATED if ledger.expects_copies else Level.LOCAL
    anchor = ledger.newest(protecting)
    committed = () if anchor is None else (CheckpointId(anchor.step, anchor.round),)
    return tuple(sorted({*plan.prune_steps, *abandoned} - protected_steps(message, committed)))


def abandoned_steps(
    ledger: Ledger, saves: Mapping[Rank, RankSaves], ranks: Iterable[Rank], *, pressed: bool = False
) -> tuple[Step, ...]:
    """Return the steps of this round that one of these ranks can no longer prepare, oldest first.

    While one rank cannot write, the shards of such steps would fill the nodes of the other ranks.

    Args:
        ledger: The steps.
        saves: The reported saves of each rank whose worker has sent this coordinator everything it had to
            send.
        ranks: The ranks that are looked at. A report changes what is known about its own ranks only.
        pressed: A node has no room for another shard. Steps that a rank has not handed over yet are given
            up, too, except for the newest `_KEPT_UNDER_PRESSURE`, which the rank may be copying now.
    """
    incomplete = sorted(s for s, e in ledger.steps.items() if not e.complete)
    recent = incomplete[-_KEPT_UNDER_PRESSURE:]
    looked_at = tuple(ranks) if incomplete else ()

    def is_gone(step: Step, rank: Rank) -> bool:
        found = saves.get(rank)
        if rank in ledger.steps[step].shards or (found is not None and step in found.under_way):
            return False
        return (found is not None and found.newest >= step) or (pressed and step not in recent)

    return tuple(step for step in incomplete if any(is_gone(step, rank) for rank in looked_at))
