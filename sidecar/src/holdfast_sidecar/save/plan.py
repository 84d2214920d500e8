"""Compute the next actions for a worker's own shards from their table. Pure functions.

A shard of the current round takes these steps: durable on this node; described, when its layout has been
read; committed, when all ranks are durable and the manifest arrives; copied to every assigned target. If the
coordinator requests its upload: uploaded. The reports of this worker list the table, so the coordinator
learns each of these steps from the next report.

The planning is level-triggered: it depends only on the present state of the table. The same function
therefore serves the first attempt and a restart of the sidecar.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from holdfast_core.format.rank_layout import LayoutDigests
from holdfast_core.ids import Digest, Rank, RestartRound, ShardRef, Step, Worker
from holdfast_core.messages.schema import ReportedShard, ShardInfo, StoredAs


@dataclass(frozen=True, slots=True, order=True)
class ShardKey:
    """Key of one own shard in the table. Keys sort by step, so that the oldest step is served first."""

    step: Step
    round: RestartRound
    rank: Rank


@dataclass(frozen=True, slots=True)
class OwnShard:
    """A shard of an own rank that is durable on this node, with the actions that are done for it."""

    ref: ShardRef
    info: ShardInfo
    layout: Digest
    reported: bool = True
    """Whether reports list the shard before it is uploaded. False for a shard of the restore point, which is
    only copied to targets that lack it: the coordinator has a record of its step already."""
    digests: LayoutDigests | None = None
    """What a report says about the layout. None: not read yet."""
    committed: bool = False
    """Whether the step's manifest is on this node. Copies wait for it, because every rank's shard is
    durable then: a target reuses equal chunks of its own shard, and only the others are sent (ADR 0020)."""
    copied: frozenset[Worker] = frozenset()
    """Workers that have acknowledged a durable copy."""
    upload_requested: bool = False
    """Whether the coordinator has requested the upload."""
    uploaded: StoredAs | None = None
    """How the object store holds the shard. None: it does not yet."""
    pruned: bool = False
    """Whether the coordinator has given the step up or pruned it. The shard is deleted."""

    @property
    def key(self) -> ShardKey:
        return ShardKey(self.ref.step, self.ref.round, self.ref.rank)


class Verb(StrEnum):
    """Kind of an action on an own shard."""

    DESCRIBE = "read the layout of"
    COPY = "copy"
    UPLOAD = "upload"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do for one own shard."""

    verb: Verb
    key: ShardKey
    target: Worker | None = None
    """The worker to copy to. None for every verb but COPY."""


def next_actions(shards: Iterable[OwnShard], targets: tuple[Worker, ...]) -> tuple[Action, ...]:
    """Return all actions that are missing and whose prerequisites are met, oldest step first."""
    actions: list[Action] = []
    for shard in sorted(shards, key=lambda s: s.key):
        if shard.pruned:
            actions.append(Action(Verb.DELETE, shard.key))
            continue
        if shard.reported and shard.digests is None:
            actions.append(Action(Verb.DESCRIBE, shard.key))
        if shard.committed:
            missing = (t for t in targets if t not in shard.copied)
            actions.extend(Action(Verb.COPY, shard.key, target) for target in missing)
        if shard.upload_requested and not shard.uploaded:
            actions.append(Action(Verb.UPLOAD, shard.key))
    return tuple(actions)


def table(
    shards: Iterable[OwnShard], targets: tuple[Worker, ...], limit: int
) -> tuple[ReportedShard, ...]:
    """Return what a report lists of these shards, oldest step first: the newest `limit` of them.

    These are the shards of this round that are described, and uploaded ones of the restore point.

    Without targets no shard counts as replicated: the coordinator derives from its ROUND that this worker has
    no copies to make.
    """
    listed = sorted(
        (s for s in shards if (s.reported or s.uploaded) and not s.pruned), key=lambda s: s.key
    )
    return tuple(
        ReportedShard(
            shard.ref.step,
            shard.ref.round,
            shard.info,
            shard.digests,
            committed=shard.committed,
            replicated=bool(targets) and shard.copied.issuperset(targets),
            uploaded=shard.uploaded,
        )
        for shard in listed[-limit:]
        if shard.digests is not None or not shard.reported
    )


def startable(actions: Iterable[Action], running: frozenset[Action]) -> tuple[Action, ...]:
    """Return the actions that may start now, beside those that are running.

    At most one copy to each target and one upload run at a time. The oldest step then gets the full
    bandwidth, and a slow peer delays only its own copies.
    """
    copying = {a.target for a in running if a.verb is Verb.COPY}
    uploading = any(a.verb is Verb.UPLOAD for a in running)
    chosen: list[Action] = []
    for action in actions:
        if action in running:
            continue
        if action.verb is Verb.COPY:
            if action.target in copying:
                continue
            copying.add(action.target)
        elif action.verb is Verb.UPLOAD:
            if uploading:
                continue
            uploading = True
        chosen.append(action)
    return tuple(chosen)


def idle(shards: Iterable[OwnShard], targets: tuple[Worker, ...]) -> bool:
    """Return whether no shard of this round has still to be copied, uploaded or deleted."""
    return not next_actions((s for s in shards if s.reported), targets)


def expects_commit(shards: Iterable[OwnShard]) -> bool:
    """Return whether the newest own shard is of this round and its manifest has not arrived yet."""
    newest = max(shards, key=lambda s: s.key, default=None)
    return newest is not None and newest.reported and not newest.committed
