"""Rules for which committed checkpoints may be pruned, in every tier: nodes, object store and folder. Pure.

Every verdict has a reason. The caller deletes manifests before shards. It hands over the checkpoints that one
place has, and what must stay there (`needed`), for example pins and checkpoints that are being read. A
checkpoint stays if anything needs it, or if any rule of the policy keeps it.

Rules look only at checkpoints that protect the job: those on the lineage that have the protecting level and
are not quarantined. While the current round has none, or while fewer than two exist, nothing is pruned.
Checkpoints off the lineage stay only where they are needed.

Order comes from rounds and steps. `keep_last` uses no clock, so that no jump of a clock takes the newest
checkpoints. The rules that name hours, days and ages use the times at which checkpoints were committed, in
UTC. A checkpoint of a later time than `now`, or of none, has the age 0.

If a node has no room for another shard (`pressed`), fewer are kept, but always the newest checkpoint that
protects the job and what someone has asked for or uses (`_FIRM`). Otherwise a volume with room for only
`keep_last` checkpoints could never take another save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from holdfast_core.ids import CheckpointId, Level, RestartRound, Step, age_of

MIN_KEPT = 2
"""Number of checkpoints below which nothing is pruned, unless `keep_last` is lower. With only one, the newest
may prove unreadable."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class RetentionReason(StrEnum):
    """Reason why a checkpoint is kept or pruned. Of several rules that keep it, the first one here counts."""

    NOT_PROTECTED_YET = "NotProtectedYet"
    """Kept: no checkpoint of this round, or only one at all, has the level that protects the job."""
    KEEP_LAST = "KeepLast"
    NEWER_THAN_KEPT = "NewerThanKept"
    """Kept: it is newer than one of `keep_last` but does not have the protecting level yet."""
    KEEP_BEST = "KeepBest"
    KEEP_EVERY = "KeepEvery"
    KEEP_DAILY = "KeepDaily"
    KEEP_HOURLY = "KeepHourly"
    KEEP_FOR = "KeepFor"
    PINNED = "Pinned"
    """Kept: the user has pinned it."""
    BEING_READ = "BeingRead"
    """Kept: a process reads or restores it."""
    CLONED = "Cloned"
    """Kept: another job starts from it and has no checkpoint of its own in the store yet."""
    QUARANTINED = "Quarantined"
    """Kept: the job does not restore it, and a person decides."""
    UPLOADING = "Uploading"
    RESTORE_POINT = "RestorePoint"
    NEWEST_PERSISTED = "NewestPersisted"
    NO_ROOM = "NoRoom"
    """Pruned: another reason would keep it, but a node has no room for another shard."""
    OFF_LINEAGE = "OffLineage"
    """Pruned: the present history of the job does not descend from it."""
    SUPERSEDED = "Superseded"
    """Pruned: no reason keeps it."""


EXPLAINED = {
    RetentionReason.NOT_PROTECTED_YET: "nothing is pruned before newer ones protect the job",
    RetentionReason.KEEP_LAST: "one of the newest (keepLast)",
    RetentionReason.NEWER_THAN_KEPT: "newer than those that keepLast counts",
    RetentionReason.KEEP_BEST: "one of the best (keepBest)",
    RetentionReason.KEEP_EVERY: "the first of its steps or time (keepEvery)",
    RetentionReason.KEEP_DAILY: "the newest of its day (daily)",
    RetentionReason.KEEP_HOURLY: "the newest of its hour (hourly)",
    RetentionReason.KEEP_FOR: "not old enough (keepFor)",
    RetentionReason.PINNED: "pinned",
    RetentionReason.BEING_READ: "a process reads it",
    RetentionReason.CLONED: "another job starts from it",
    RetentionReason.QUARANTINED: "quarantined, and a person decides",
    RetentionReason.UPLOADING: "it is being uploaded",
    RetentionReason.RESTORE_POINT: "the job was restored from it",
    RetentionReason.NEWEST_PERSISTED: "the newest one in the object store",
    RetentionReason.NO_ROOM: "the node has no room",
    RetentionReason.OFF_LINEAGE: "the job went back to an older step",
    RetentionReason.SUPERSEDED: "no rule keeps it",
}
"""The reasons for people."""
_FIRM = (
    RetentionReason.PINNED,
    RetentionReason.BEING_READ,
    RetentionReason.CLONED,
    RetentionReason.QUARANTINED,
    RetentionReason.UPLOADING,
)
"""Needs that also a full volume respects. They come first where a checkpoint has several reasons."""
_NEEDS = (*_FIRM, RetentionReason.RESTORE_POINT, RetentionReason.NEWEST_PERSISTED)


class BestMode(StrEnum):
    """Which values of a metric are the best ones."""

    MIN = "min"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keep the checkpoints with the best values of a metric that the script reported."""

    metric: str
    mode: BestMode
    count: int = 1


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Rules of which each keeps checkpoints. One that no rule keeps may be pruned."""

    keep_last: int | None = 3
    """Number of the newest checkpoints, at least 1. None keeps all."""
    every_steps: int | None = None
    """Keep the first checkpoint at or after each multiple of this number of steps."""
    every: timedelta | None = None
    """Keep the first checkpoint of each such period of UTC."""
    keep_for: timedelta | None = None
    """Keep each checkpoint for this time after its commit."""
    hourly: int = 0
    """Keep the newest checkpoint of each of the last so many hours (UTC) that have one."""
    daily: int = 0
    """Keep the newest checkpoint of each of the last so many days (UTC) that have one."""
    best: KeepBest | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint that has a manifest, and what the rules look at."""

    checkpoint: CheckpointId
    level: Level
    committed_at: datetime | None = None
    """When it was committed, with a time zone. None: not known."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The values that the script had reported when the step was saved."""
    on_lineage: bool = True


@dataclass(frozen=True, slots=True)
class RetentionState:
    """Input of `plan_retention`."""

    committed: tuple[Committed, ...]
    """Committed checkpoints of one place, in any order."""
    policy: RetentionPolicy
    needed: Mapping[RetentionReason, Collection[CheckpointId]] = field(default_factory=dict)
    """Checkpoints that must stay, by one of the reasons from PINNED to NEWEST_PERSISTED."""
    now: datetime | None = None
    """The present time, with a time zone. None: no rule of the policy needs it."""
    protecting_level: Level = Level.REPLICATED
    """Level at which a checkpoint protects the job."""
    round: RestartRound | None = None
    """Restart round of which a checkpoint must protect the job before anything is pruned. None: of any."""
    held: bool = False
    """Nothing may be pruned now."""
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
    """Return a verdict on every committed checkpoint. The order of the input does not matter.

    Raises:
        ValueError: A rule of the policy needs `now`, which is None.
    """
    newest_first = sorted(state.committed, key=lambda c: age_of(c.checkpoint), reverse=True)
    apart = frozenset(state.needed.get(RetentionReason.QUARANTINED, ()))
    protecting = [
        c
        for c in newest_first
        if c.on_lineage and c.checkpoint not in apart and c.level.includes(state.protecting_level)
    ]
    of_round = [c for c in protecting if state.round in (None, c.checkpoint.round)]
    least = MIN_KEPT if state.policy.keep_last is None else min(MIN_KEPT, state.policy.keep_last)
    held = state.held or not of_round or len(protecting) < least
    # A need is the clearer answer to the question why a checkpoint is kept.
    reasons = _by_policy(state, protecting, newest_first) | _by_need(state)
    keep, prune = list[RetentionVerdict](), list[RetentionVerdict]()
    for item in newest_first:
        reason = reasons.get(item.checkpoint)
        if reason is not None:
            keep.append(RetentionVerdict(item.checkpoint, reason))
        elif held:
            keep.append(RetentionVerdict(item.checkpoint, RetentionReason.NOT_PROTECTED_YET))
        elif item.on_lineage:
            prune.append(RetentionVerdict(item.checkpoint, RetentionReason.SUPERSEDED))
        else:
            prune.append(RetentionVerdict(item.checkpoint, RetentionReason.OFF_LINEAGE))
    for verdict in _without_room(keep, state, of_round):
        keep.remove(verdict)
        prune.append(RetentionVerdict(verdict.checkpoint, RetentionReason.NO_ROOM))
    prune.sort(key=lambda verdict: age_of(verdict.checkpoint), reverse=True)
    return RetentionPlan(tuple(prune), tuple(keep))


def superseded(
    committed: Iterable[CheckpointId],
    level: Level,
    keep_last: int | None,
    needed: Mapping[RetentionReason, Collection[CheckpointId]],
) -> tuple[CheckpointId, ...]:
    """Return what may be pruned of a place without rounds and without other rules, newest first.

    Args:
        committed: The checkpoints of the place.
        level: The level that they have.
        keep_last: See RetentionPolicy.
        needed: See RetentionState.
    """
    state = RetentionState(
        tuple(Committed(checkpoint, level) for checkpoint in committed),
        RetentionPolicy(keep_last),
        needed,
        protecting_level=level,
    )
    return tuple(verdict.checkpoint for verdict in plan_retention(state).prune)


def _by_need(state: RetentionState) -> dict[CheckpointId, RetentionReason]:
    """Return the first need of each checkpoint that has one."""
    return {c: reason for reason in reversed(_NEEDS) for c in state.needed.get(reason, ())}


def _by_policy(
    state: RetentionState, protecting: list[Committed], newest_first: list[Committed]
) -> dict[CheckpointId, RetentionReason]:
    """Return the first rule that keeps each checkpoint that one keeps.

    Args:
        protecting: The checkpoints that the rules look at, newest first.
        newest_first: All checkpoints.
    """
    policy, reason = state.policy, RetentionReason
    last = protecting[: policy.keep_last]
    found: dict[RetentionReason, Iterable[Committed]] = {
        reason.KEEP_LAST: last,
        # These do not have the protecting level yet, but may still reach it.
        reason.NEWER_THAN_KEPT: [
            c
            for c in newest_first
            if c.on_lineage and last and age_of(c.checkpoint) > age_of(last[-1].checkpoint)
        ],
    }
    if policy.best is not None:
        found[reason.KEEP_BEST] = _best(policy.best, protecting)
    every_steps = policy.every_steps
    if every_steps is not None:
        found[reason.KEEP_EVERY] = _first_of_each(
            [c for c in reversed(protecting) if c.checkpoint.step >= every_steps],
            lambda c: c.checkpoint.step // every_steps,
        )
    if policy.every is not None or policy.keep_for is not None or policy.hourly or policy.daily:
        if state.now is None:
            raise ValueError("a rule of the retention policy needs the present time")
        found |= _by_time(policy, protecting, state.now)
    return {
        item.checkpoint: why
        for why in reversed(RetentionReason)
        if why in found
        for item in found[why]
    }


def _by_time(
    policy: RetentionPolicy, protecting: list[Committed], now: datetime
) -> dict[RetentionReason, Iterable[Committed]]:
    """Return the checkpoints that each rule about times keeps."""
    reason = RetentionReason
    at = {c.checkpoint: _time(c, now) for c in protecting}

    def period(length: timedelta) -> Callable[[Committed], int]:
        return lambda c: (at[c.checkpoint] - _EPOCH) // length

    hours = _first_of_each(protecting, period(timedelta(hours=1)))
    days = _first_of_each(protecting, period(timedelta(days=1)))
    found: dict[RetentionReason, Iterable[Committed]] = {
        reason.KEEP_HOURLY: hours[: policy.hourly],
        reason.KEEP_DAILY: days[: policy.daily],
    }
    if policy.every is not None:
        oldest_first = list(reversed(protecting))
        periods = _first_of_each(oldest_first, period(policy.every))
        found[reason.KEEP_EVERY] = [*periods]
    keep_for = policy.keep_for
    if keep_for is not None:
        found[reason.KEEP_FOR] = [c for c in protecting if now - at[c.checkpoint] < keep_for]
    return found


def _time(item: Committed, now: datetime) -> datetime:
    return now if item.committed_at is None else min(item.committed_at, now)


def _first_of_each(
    items: list[Committed], period: Callable[[Committed], Hashable]
) -> list[Committed]:
    """Return the first item of each period, in the order of the items."""
    first: dict[Hashable, Committed] = {}
    for item in items:
        first.setdefault(period(item), item)
    return list(first.values())


def _best(rule: KeepBest, protecting: list[Committed]) -> list[Committed]:
    """Return the checkpoints with the best values, the older one of two that are equal.

    A script that evaluates at times reports no other value until the next time. The first checkpoint after
    the evaluation is the one that the value was measured of, or the closest to it. A value that is missing,
    or that is no finite number, is never the best.
    """
    sign = 1.0 if BestMode(rule.mode) is BestMode.MIN else -1.0
    ranked = [
        (sign * value, -index, item)
        for index, item in enumerate(protecting)
        if (value := item.metrics.get(rule.metric)) is not None and math.isfinite(value)
    ]
    ranked.sort(key=lambda entry: entry[:2])
    return [item for _, _, item in ranked[: rule.count]]


def _without_room(
    kept: list[RetentionVerdict], state: RetentionState, of_round: list[Committed]
) -> list[RetentionVerdict]:
    """Return the kept checkpoints that are pruned for lack of room.

    These are the older half, rounded up, of those that are older than the newest one that is known to protect
    the job, without those that someone has asked for or uses. It is only half, because room for one shard may
    already suffice.
    """
    anchor = of_round[0].checkpoint if of_round else None
    if anchor is None and state.restored:
        restored = state.needed.get(RetentionReason.RESTORE_POINT, ())
        anchor = max(restored, key=age_of, default=None)
    if not state.pressed or anchor is None:
        return []
    firm = {c for reason in _FIRM for c in state.needed.get(reason, ())}
    older = [v for v in kept if age_of(v.checkpoint) < age_of(anchor)]
    spare = sorted(
        (v for v in older if v.checkpoint not in firm), key=lambda v: age_of(v.checkpoint)
    )
    return spare[: -(-len(spare) // 2)]
