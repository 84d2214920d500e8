"""Rules for which committed checkpoints may be pruned from the node and peer tiers. Pure.

Every verdict has a reason. The caller deletes manifests before shards. While the current round has not
committed at the level that protects the job, or fewer than two checkpoints have that level, nothing is
pruned. After that the policy keeps the newest `keep_last` checkpoints (at least two), the restore point,
the newest persisted checkpoint, pinned steps, and steps that are being uploaded.

If a node has no room for another shard (`pressed`), fewer are kept, but always the newest checkpoint that
protects the job, pinned steps and uploads. Otherwise a volume with room for only `keep_last` checkpoints
could never take another save.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast_core.ids import CheckpointId, Level, RestartRound, Step

MIN_KEPT = 2
"""Minimum number of checkpoints to keep. With only one, the newest may prove unreadable."""


class RetentionReason(StrEnum):
    """Reason why a checkpoint is kept or pruned."""

    NOT_PROTECTED_YET = "NotProtectedYet"
    """Kept: no checkpoint of this round, or only one at all, has the level that protects the job."""
    NEWER_THAN_KEPT = "NewerThanKept"
    """Kept: it is newer than one of `keep_last` but does not have the protecting level yet."""
    KEEP_LAST = "KeepLast"
    RESTORE_POINT = "RestorePoint"
    PINNED = "Pinned"
    """Kept: the user has pinned its step."""
    UPLOADING = "Uploading"
    NEWEST_PERSISTED = "NewestPersisted"
    NO_ROOM = "NoRoom"
    """Pruned: another reason would keep it, but a node has no room for another shard."""
    SUPERSEDED = "Superseded"
    """Pruned: no reason keeps it."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint that has a manifest, and its level."""

    checkpoint: CheckpointId
    level: Level


@dataclass(frozen=True, slots=True)
class RetentionState:
    """Input of `plan_retention`."""

    committed: tuple[Committed, ...]
    """Committed checkpoints on the lineage, in any order."""
    round: RestartRound
    """The current restart round."""
    keep_last: int
    protecting_level: Level = Level.REPLICATED
    """Level at which a checkpoint protects the job: REPLICATED, or LOCAL without peer copies."""
    restore_point: CheckpointId | None = None
    """Checkpoint that the current round restored from."""
    pinned: frozenset[Step] = frozenset()
    """Steps that the user has pinned."""
    uploading: frozenset[CheckpointId] = frozenset()
    """Checkpoints that are being uploaded to the object store."""
    newest_persisted: CheckpointId | None = None
    pressed: bool = False
    """Whether a node has no room for another shard."""
    restored: bool = False
    """Whether every rank has trained from the restore point, which shows that it is readable."""


@dataclass(frozen=True, slots=True)
class RetentionVerdict:
    """The reason why one checkpoint is kept or pruned."""

    checkpoint: CheckpointId
    reason: RetentionReason


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """Verdicts on all committed checkpoints. Each occurs once; both tuples are newest first."""

    prune: tuple[RetentionVerdict, ...]
    keep: tuple[RetentionVerdict, ...]

    @property
    def prune_steps(self) -> tuple[Step, ...]:
        """Steps of which all rounds' checkpoints may be pruned, in order."""
        kept = {verdict.checkpoint.step for verdict in self.keep}
        steps = {verdict.checkpoint.step for verdict in self.prune}
        return tuple(sorted(steps - kept))


def plan_retention(state: RetentionState) -> RetentionPlan:
    """Return a verdict on every committed checkpoint. The order of the input does not matter."""
    newest_first = sorted(state.committed, key=lambda c: c.checkpoint, reverse=True)
    protected = [c.checkpoint for c in newest_first if c.level.includes(state.protecting_level)]
    in_this_round = [p for p in protected if p.round == state.round]
    last = frozenset(protected[: max(MIN_KEPT, state.keep_last)])
    prune: list[RetentionVerdict] = []
    keep: list[RetentionVerdict] = []
    for item in newest_first:
        reason = _reason(item.checkpoint, state, in_this_round, protected, last)
        target = prune if reason is RetentionReason.SUPERSEDED else keep
        target.append(RetentionVerdict(item.checkpoint, reason))
    for verdict in _without_room(keep, _anchor(state, in_this_round), state):
        keep.remove(verdict)
        prune.append(RetentionVerdict(verdict.checkpoint, RetentionReason.NO_ROOM))
    prune.sort(key=lambda verdict: verdict.checkpoint, reverse=True)
    return RetentionPlan(tuple(prune), tuple(keep))


def _anchor(state: RetentionState, in_this_round: list[CheckpointId]) -> CheckpointId | None:
    """Return the newest checkpoint that is known to protect the job, or None."""
    if in_this_round:
        return in_this_round[0]
    return state.restore_point if state.restored else None


def _without_room(
    kept: list[RetentionVerdict], anchor: CheckpointId | None, state: RetentionState
) -> list[RetentionVerdict]:
    """Return the kept checkpoints that are pruned for lack of room.

    These are the older half, rounded up, of those that are older than the anchor, not pinned and not being
    uploaded. It is only half, because room for one shard may already suffice.
    """
    if not state.pressed or anchor is None:
        return []
    spare = sorted(
        (
            verdict
            for verdict in kept
            if verdict.checkpoint < anchor
            and verdict.reason not in (RetentionReason.PINNED, RetentionReason.UPLOADING)
            and verdict.checkpoint.step not in state.pinned
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
) -> RetentionReason:
    if not in_this_round or len(protected) < MIN_KEPT:
        return RetentionReason.NOT_PROTECTED_YET
    if checkpoint in last:
        return RetentionReason.KEEP_LAST
    if checkpoint > min(last):
        # It does not have the protecting level yet, but may still reach it.
        return RetentionReason.NEWER_THAN_KEPT
    if checkpoint == state.restore_point:
        return RetentionReason.RESTORE_POINT
    if checkpoint.step in state.pinned:
        return RetentionReason.PINNED
    if checkpoint in state.uploading:
        return RetentionReason.UPLOADING
    if checkpoint == state.newest_persisted:
        return RetentionReason.NEWEST_PERSISTED
    return RetentionReason.SUPERSEDED
