"""Which committed checkpoints may leave the node and peer tiers. Pure; every answer has a reason.

The caller deletes manifests before shards. What this policy never names: anything while the current
round has not committed at the level that protects it, the newest `keep_last` (at least two), the
restore point, the newest persisted one, held steps, and steps on their way to the object store.

Where a node has no room for another shard (`pressed`), fewer are kept, but never less than the newest
checkpoint that protects the job: otherwise a volume with room for `keep_last` checkpoints and not for one
more would never take a save again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast_core.ids import CheckpointId, Level, RestartRound, Step

MIN_KEPT = 2
"""One is not enough: the newest may prove unreadable when it is needed."""


class Reason(StrEnum):
    """Why a checkpoint stays or goes."""

    NOT_PROTECTED_YET = "NotProtectedYet"
    """Nothing of this round has reached the level that protects the job: nothing is pruned."""
    NEWER_THAN_KEPT = "NewerThanKept"
    KEEP_LAST = "KeepLast"
    RESTORE_POINT = "RestorePoint"
    HELD = "Held"
    UPLOADING = "Uploading"
    NEWEST_PERSISTED = "NewestPersisted"
    NO_ROOM = "NoRoom"
    """It would be kept, but a node has no room for the next one."""
    SUPERSEDED = "Superseded"


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint that has a manifest, and how far it got."""

    checkpoint: CheckpointId
    level: Level


@dataclass(frozen=True, slots=True)
class RetentionState:
    """Everything that retention looks at."""

    committed: tuple[Committed, ...]
    """On the lineage, in any order."""
    round: RestartRound
    """The current one."""
    keep_last: int
    protecting_level: Level = Level.REPLICATED
    """Level at which the job survives what it is meant to: LOCAL where there are no peer copies."""
    restore_point: CheckpointId | None = None
    """That the current round started from."""
    holds: frozenset[Step] = frozenset()
    uploading: frozenset[CheckpointId] = frozenset()
    newest_persisted: CheckpointId | None = None
    pressed: bool = False
    """A node has no room for another shard."""
    restored: bool = False
    """Every rank has trained from the restore point: it could be read."""


@dataclass(frozen=True, slots=True)
class Verdict:
    checkpoint: CheckpointId
    reason: Reason


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """Every committed checkpoint once; both newest first."""

    prune: tuple[Verdict, ...]
    keep: tuple[Verdict, ...]

    @property
    def prune_steps(self) -> tuple[Step, ...]:
        """Steps whose every checkpoint may go: a step that one round keeps is not among them."""
        kept = {verdict.checkpoint.step for verdict in self.keep}
        steps = {verdict.checkpoint.step for verdict in self.prune}
        return tuple(sorted(steps - kept))


def plan_retention(state: RetentionState) -> RetentionPlan:
    """Judge every committed checkpoint. Deterministic; the order of the input does not matter."""
    newest_first = sorted(state.committed, key=lambda c: c.checkpoint, reverse=True)
    protected = [c.checkpoint for c in newest_first if c.level.includes(state.protecting_level)]
    in_this_round = [p for p in protected if p.round == state.round]
    last = frozenset(protected[: max(MIN_KEPT, state.keep_last)])
    prune: list[Verdict] = []
    keep: list[Verdict] = []
    for item in newest_first:
        reason = _reason(item.checkpoint, state, in_this_round, protected, last)
        target = prune if reason is Reason.SUPERSEDED else keep
        target.append(Verdict(item.checkpoint, reason))
    for verdict in _without_room(keep, _anchor(state, in_this_round), state):
        keep.remove(verdict)
        prune.append(Verdict(verdict.checkpoint, Reason.NO_ROOM))
    prune.sort(key=lambda verdict: verdict.checkpoint, reverse=True)
    return RetentionPlan(tuple(prune), tuple(keep))


def _anchor(state: RetentionState, in_this_round: list[CheckpointId]) -> CheckpointId | None:
    """The newest checkpoint that protects the job now."""
    if in_this_round:
        return in_this_round[0]
    return state.restore_point if state.restored else None


def _without_room(
    kept: list[Verdict], anchor: CheckpointId | None, state: RetentionState
) -> list[Verdict]:
    """The older half, at least one, of those that the job can do without: half of them, because a
    volume that needs room for one need not lose all."""
    if not state.pressed or anchor is None:
        return []
    spare = sorted(
        (
            verdict
            for verdict in kept
            if verdict.checkpoint < anchor
            and verdict.reason not in (Reason.HELD, Reason.UPLOADING)
            and verdict.checkpoint.step not in state.holds
            and verdict.checkpoint not in state.uploading
        ),
        key=lambda verdict: verdict.checkpoint,
    )
    return spare[: -(-len(spare) // 2)]


def _reason(
    checkpoint: CheckpointId,
    state: RetentionState,
    in_this_round: list[CheckpointId],
    protected: list[CheckpointId],
    last: frozenset[CheckpointId],
) -> Reason:
    if not in_this_round or len(protected) < MIN_KEPT:
        return Reason.NOT_PROTECTED_YET
    if checkpoint in last:
        return Reason.KEEP_LAST
    if checkpoint > min(last):
        # Committed, but not yet at the level that protects: it is on its way there.
        return Reason.NEWER_THAN_KEPT
    if checkpoint == state.restore_point:
        return Reason.RESTORE_POINT
    if checkpoint.step in state.holds:
        return Reason.HELD
    if checkpoint in state.uploading:
        return Reason.UPLOADING
    if checkpoint == state.newest_persisted:
        return Reason.NEWEST_PERSISTED
    return Reason.SUPERSEDED
