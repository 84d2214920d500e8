"""Which steps leave the nodes once a step has all its copies: the ledger's facts for the job's policy
(holdfast_core.policy.retention). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_core.ids import CheckpointId, Level, Step
from holdfast_core.policy.retention import Committed, RetentionState, plan_retention
from holdfast_core.transfer.messages import RestorePoint, Round
from holdfast_sidecar.ledger import Ledger
from holdfast_sidecar.prune import protected_steps


def steps_to_prune(
    ledger: Ledger,
    message: Round,
    older: Iterable[CheckpointId],
    persisted: RestorePoint | None,
) -> tuple[Step, ...]:
    """In order. `older`: committed in older rounds, on this round's lineage."""
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
            holds=frozenset(message.holds),
            uploading=uploading(ledger),
            newest_persisted=None if persisted is None else persisted.own_checkpoint,
        )
    )
    newest = ledger.newest(Level.REPLICATED)
    abandoned = [
        s
        for s, e in ledger.steps.items()
        if not e.complete and newest is not None and s < newest.step
    ]
    return tuple(sorted({*plan.prune_steps, *abandoned} - protected_steps(message)))


def uploading(ledger: Ledger) -> frozenset[CheckpointId]:
    """On their way to the store."""
    return frozenset(CheckpointId(step, ledger.round) for step in ledger.on_way_to_store)
