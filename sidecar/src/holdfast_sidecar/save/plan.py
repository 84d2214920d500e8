"""What a worker does next with its own shards. Pure: the table in, the actions out.

A shard of this round goes: durable here -> PREPARED told -> (all ranks have: the manifest comes) ->
copied to every assigned target -> REPLICATED told; and, once asked to: uploaded -> UPLOADED told.
All of it is level-triggered: after a new coordinator, a lost reply or a restart the same function
says what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from holdfast_core.ids import Digest, Rank, RestartRound, ShardRef, Step, Worker
from holdfast_core.messages.schema import Reference, ShardInfo


@dataclass(frozen=True, slots=True, order=True)
class ShardKey:
    """One own shard in the table; steps sort first, so that the oldest is served first."""

    step: Step
    round: RestartRound
    rank: Rank


@dataclass(frozen=True, slots=True)
class StoredAs:
    """How the object store holds a shard, as far as others must know."""

    base: Reference | None = None
    references: tuple[Reference, ...] = ()
    """Earlier checkpoints that it needs."""


@dataclass(frozen=True, slots=True)
class OwnShard:
    """A shard of an own rank that is durable on this node, and how far it got from here."""

    ref: ShardRef
    info: ShardInfo
    layout: Digest
    reported: bool = True
    """False for a shard of the restore point: it is copied again, the coordinator knows it."""
    prepared_told: bool = False
    committed: bool = False
    """The step's manifest is here, so every rank's shard is durable. Copies wait for it: a target that
    has its own shard by then takes from it what is the same, and only the rest is sent."""
    copied: frozenset[Worker] = frozenset()
    replicated_told: bool = False
    wanted: bool = False
    uploaded: bool = False
    stored_as: StoredAs = StoredAs()
    uploaded_told: bool = False

    @property
    def key(self) -> ShardKey:
        return ShardKey(self.ref.step, self.ref.round, self.ref.rank)

    def untold(self) -> OwnShard:
        """The same shard before a coordinator that has heard nothing yet."""
        return replace(self, prepared_told=False, replicated_told=False, uploaded_told=False)


class Verb(StrEnum):
    PREPARED = "tell prepared"
    COPY = "copy"
    REPLICATED = "tell replicated"
    UPLOAD = "upload"
    UPLOADED = "tell uploaded"


@dataclass(frozen=True, slots=True)
class Action:
    verb: Verb
    key: ShardKey
    target: Worker | None = None
    """Of a copy."""


def next_actions(shards: Iterable[OwnShard], targets: tuple[Worker, ...]) -> tuple[Action, ...]:
    """Everything that may be done now, oldest step first within each verb's turn.

    With no target REPLICATED is never told: the coordinator knows that no copies are assigned.
    """
    actions: list[Action] = []
    for shard in sorted(shards, key=lambda s: s.key):
        if shard.reported and not shard.prepared_told:
            actions.append(Action(Verb.PREPARED, shard.key))
        missing = [t for t in targets if t not in shard.copied]
        if shard.committed:
            actions.extend(Action(Verb.COPY, shard.key, target) for target in missing)
        if (
            shard.reported
            and shard.prepared_told
            and targets
            and not missing
            and not shard.replicated_told
        ):
            actions.append(Action(Verb.REPLICATED, shard.key))
        if shard.wanted and not shard.uploaded:
            actions.append(Action(Verb.UPLOAD, shard.key))
        if shard.uploaded and not shard.uploaded_told:
            actions.append(Action(Verb.UPLOADED, shard.key))
    return tuple(actions)


def startable(actions: Iterable[Action], running: frozenset[Action]) -> tuple[Action, ...]:
    """Of those, what does not run yet and may: one copy a target and one upload at a time, so that
    the oldest step gets the whole way and a slow peer holds up nobody else."""
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
    """Nothing of this round waits here to be told, copied or uploaded."""
    return not next_actions((s for s in shards if s.reported), targets)


def expects_commit(shards: Iterable[OwnShard]) -> bool:
    """The newest step is durable here and its manifest may still come."""
    newest = max(shards, key=lambda s: s.key, default=None)
    return newest is not None and newest.reported and not newest.committed
