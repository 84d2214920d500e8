"""Which checkpoints of a folder or a store a policy deletes, by the rules of every other tier.

A plan is made of a listing, and deletes nothing. A deletion deletes what a plan names, unless something needs
it since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from holdfast.reading.source import CheckpointSource, ListedCheckpoint
from holdfast_core.clock import SystemClock
from holdfast_core.errors import ConfigError, FormatError, NotFoundError
from holdfast_core.ids import CheckpointId, Level, TierName, age_of
from holdfast_core.names import first_of
from holdfast_core.retention import (
    Committed,
    RetentionPolicy,
    RetentionReason,
    RetentionState,
    plan_retention,
)


@dataclass(frozen=True, slots=True)
class JudgedCheckpoint:
    """A checkpoint, and why a plan keeps or deletes it."""

    checkpoint: ListedCheckpoint
    reason: RetentionReason


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """A verdict on every checkpoint of a place, the newest first."""

    prune: tuple[JudgedCheckpoint, ...]
    keep: tuple[JudgedCheckpoint, ...]

    @property
    def stored_bytes(self) -> int:
        """Bytes that the pruned checkpoints take. Those that a kept one needs stay until it goes."""
        return sum(one.checkpoint.stored_bytes for one in self.prune)


def plan_prune(
    source: CheckpointSource,
    policy: RetentionPolicy,
    metrics: Callable[[ListedCheckpoint], dict[str, float]],
) -> PrunePlan:
    """Return what the policy deletes. See `Checkpoints.plan_prune`.

    Args:
        metrics: Reads the metrics of a checkpoint. It is called for each if the policy has `best`.
    """
    if policy.keep_last is None:
        raise ConfigError("prune: expected keep_last: without it every checkpoint is kept")
    listed = {one.id: one for one in source.listed()}
    reported = {one.id: metrics(one) if policy.best else {} for one in listed.values()}
    if policy.best is not None:
        _expect_reported(policy.best.metric, reported.values())
    level = Level.LOCAL if source.tier is TierName.NODE else Level.PERSISTED
    needed: dict[RetentionReason, Collection[CheckpointId]] = dict(source.needed())
    needed[RetentionReason.QUARANTINED] = _newer_than_readable(source, listed.values())
    plan = plan_retention(
        RetentionState(
            tuple(
                Committed(id_, level, one.saved_at, reported[id_]) for id_, one in listed.items()
            ),
            policy,
            needed,
            SystemClock().utc_now(),
            protecting_level=level,
        )
    )
    prune, keep = (
        tuple(JudgedCheckpoint(listed[one.checkpoint], one.reason) for one in verdicts)
        for verdicts in (plan.prune, plan.keep)
    )
    return PrunePlan(prune, keep)


def _expect_reported(metric: str, reported: Collection[Mapping[str, float]]) -> None:
    """Raise ConfigError if no checkpoint has the metric: with a misspelt name, the best would be deleted."""
    if reported and not any(metric in metrics for metrics in reported):
        known = first_of(sorted({name for metrics in reported for name in metrics}))
        raise ConfigError(
            f"prune: no checkpoint has the metric {metric} (found {known or 'no metrics'}): correct the name"
        )


def _newer_than_readable(
    source: CheckpointSource, listed: Iterable[ListedCheckpoint]
) -> list[CheckpointId]:
    """Return the newest checkpoints up to the first one that can be read.

    They protect no training: a restore passes over them. If they counted, what it would choose could be
    deleted. Manifest and heads of the shards are read, as by the restore that chooses.
    """
    found: list[CheckpointId] = []
    for one in sorted(listed, key=lambda one: age_of(one.id), reverse=True):
        try:
            manifest = source.manifest(one.id)
            for shard in manifest.shards:
                source.open_shard(manifest.ref(shard.rank)).close()
        except (NotFoundError, FormatError):
            found.append(one.id)
        else:
            break
    return found


def prune(
    source: CheckpointSource, plan: PrunePlan, progress: Callable[[JudgedCheckpoint], object]
) -> tuple[JudgedCheckpoint, ...]:
    """Delete what a plan names. See `Checkpoints.prune`.

    The newest goes first: a checkpoint of a store then releases what it needs of an earlier one before that
    one is deleted, so that no objects of it stay behind.
    """
    planned = {one.checkpoint.id: one for one in plan.prune}
    stayed: list[JudgedCheckpoint] = []
    for checkpoint, reason in source.delete(planned):
        if reason is None:
            progress(planned[checkpoint])
        else:
            stayed.append(JudgedCheckpoint(planned[checkpoint].checkpoint, reason))
    return tuple(stayed)
