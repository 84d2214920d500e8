"""Messages from the operator to a sidecar over HTTPS, and the replies.

All paths are below /v1. Replies: 200 with the reply type; otherwise Refused, with 400 for a malformed
message, 503 after an error of the receiver, and 409 for every other refusal.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

from blake3 import blake3
from msgspec import Meta

from holdfast_core.format.rank_layout import LayoutDigests
from holdfast_core.ids import (
    MAX_INT,
    CheckpointId,
    Digest,
    Natural,
    Rank,
    RestartRound,
    ShardInfo,
    ShardRef,
    Step,
    TierName,
    Worker,
)
from holdfast_core.messages.codec import (
    MAX_LISTED,
    MAX_STRAGGLERS,
    Clipped,
    ClippedText,
    Document,
    Factor,
    Many,
    ManyShards,
    Name,
    PerRank,
    PerWorker,
    Reason,
    Reported,
    Seconds,
    Text,
    dumps,
)
from holdfast_core.messages.common import DeadRank, Failure, Policy, RestorePoint
from holdfast_core.messages.report import AcceptedRound

FIRST_ROUND = RestartRound(0)
ByManifest = Annotated[dict[Digest, CheckpointId], Meta(max_length=MAX_LISTED)]
"""Checkpoints by the digests of their manifests, in the order of step and round."""


@dataclass(frozen=True, slots=True)
class Member:
    worker: Worker
    pod: Text
    address: Text
    """Pod IP. Empty while it is unknown."""


@dataclass(frozen=True, slots=True)
class Round:
    """POST /v1/round, operator -> sidecar; reply Inventory. It starts the restart round or updates it."""

    round: RestartRound
    version: Natural
    restore_point: RestorePoint
    coordinator: Worker
    store_host: Worker
    """The worker whose launcher hosts the TCPStore of this round."""
    workers: Natural
    members: Annotated[tuple[Member, ...], PerWorker]
    copies: Annotated[dict[Worker, Many[Worker]], PerWorker]
    """For each worker whose shards are copied, the workers that keep the copies."""
    policy: Policy
    pinned: Many[Step] = ()
    """Pinned steps, which must not be pruned. Of more than MAX_MANY, those without a copy in the store
    come first, then the newest."""
    quarantined: Many[RestorePoint] = ()
    """Checkpoints that must neither be pruned nor restored."""
    last_persisted: RestorePoint | None = None
    fan_in: Annotated[int, Meta(ge=1, le=MAX_INT)] = 64
    """Number of consecutive workers that exchange messages with the coordinator through one relay."""
    lineage_from: RestartRound = FIRST_ROUND
    """The round in which the gang last began without an own checkpoint. Those of older rounds are off the
    lineage, whatever their steps."""
    hold_uploads: bool = False
    """A quota of the object store is reached: no further upload is requested. The one under way ends."""

    rolled_back_from: Step | None = None
    """Step that the gang had reached before a person rolled it back, if the round starts below it."""

    def content_digest(self) -> Digest:
        """Return a digest of the message without its version and `last_persisted`.

        The coordinator has its own record of what it persisted, so a change of that field alone must not
        repeat ROUND to the whole gang.
        """
        content = replace(self, version=0, last_persisted=None)
        return Digest("b3:" + blake3(dumps(content)).hexdigest())


@dataclass(frozen=True, slots=True)
class Seal:
    """POST /v1/seal, operator -> sidecar; reply Inventory.

    The sidecar replies after the fsync of the round, the end of the ranks, and the writes of staged slots to
    the node tier. Each of these waits has a limit (docs/protocol.md).
    """

    round: RestartRound
    look_in_store: bool = False
    """List the checkpoints of the job in the object store besides (Inventory.stored)."""


@dataclass(frozen=True, slots=True)
class FinishCommit:
    """POST /v1/finish-commit, operator -> sealed sidecar; reply Inventory.

    A failure has interrupted the commit of a step of which every rank's shard is on its node tier (ADR 0018).
    The sidecar writes the manifest to its node tier.
    """

    round: RestartRound
    """The round that the sidecar is sealed for, whose ROUND it has not received."""
    manifest: Document


@dataclass(frozen=True, slots=True)
class UncommittedShard:
    """A shard of the worker's own rank on its node tier, whose checkpoint has no manifest there."""

    step: Step
    round: RestartRound
    world_size: Natural
    shard: ShardInfo
    layout: LayoutDigests


@dataclass(frozen=True, slots=True)
class Inventory:
    """Reply of POST /v1/seal, POST /v1/round and GET /v1/inventory: what this worker stores."""

    worker: Worker
    """From FIRST_SPARE for a spare pod that no ROUND has named yet."""
    pod: Name
    round: RestartRound
    version: Natural
    """Version of the newest ROUND message that the sidecar holds for `round`. 0 if it holds none."""
    manifests: ByManifest = field(default_factory=dict)
    """The manifests on the node tier. GET /v1/manifest returns a document."""
    shards: Annotated[tuple[ShardRef, ...], ManyShards] = ()
    """Shards on the node tier, which are the worker's own ones and copies for peers."""
    in_memory: Annotated[tuple[ShardRef, ...], ManyShards] = ()
    """Shards in slots, by the headers of the slots."""
    uncommitted: Annotated[tuple[UncommittedShard, ...], Meta(max_length=MAX_LISTED)] = ()
    """The newest ones. If all ranks have one of a step, its commit can be finished."""
    launcher: bool = False
    """The launcher of the pod is connected. That of a spare connects when it has imported torch."""
    stored: ByManifest | None = None
    """The newest checkpoints of the job in the object store, listed after the seal. None: SEAL did not ask
    for them, or the store has not answered."""


@dataclass(frozen=True, slots=True)
class GangProgress:
    """How far the ranks are that have finished a step of this round."""

    first: Step
    """The newest step that all of them have finished."""
    last: Step
    """The newest step that one of them has finished."""
    total_steps: Natural
    """Sum of their newest steps. It changes whenever a rank finishes a step."""
    blocked_seconds: Seconds = 0.0
    """The most seconds for which saves blocked the training of one of them."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that has taken longer than the other ranks for the same work for many steps."""

    rank: Rank
    factor: Factor
    """Its time for a step, without waits, divided by the median of the ranks with the same work."""
    since: Step
    """The step at which it was found to be slow first."""
    slow_part: Reason
    """The part of the step that costs it the most time more than the median: Input or Forward."""


@dataclass(frozen=True, slots=True)
class CoordinatorState(Clipped):
    """Reply of GET /v1/state?since=V&timeout=S: the whole current state and its version.

    `since` is the version up to which the operator has durably acted. Sidecars release their launchers only
    after the operator has acknowledged the final version in this way.
    """

    version: Natural
    round: RestartRound
    committed: Many[Step] = ()
    """The newest committed steps of this round, at most 16, oldest first."""
    last_local: RestorePoint | None = None
    last_replicated: RestorePoint | None = None
    last_persisted: RestorePoint | None = None
    last_persisted_bytes: Natural = 0
    last_persisted_metrics: Reported = field(default_factory=dict)
    """What the script of rank 0 had reported when it saved `last_persisted`. Empty if another round saved
    it."""
    newest_is_stored: bool | None = None
    """Whether the object store has `last_persisted`, by the newest comparison that succeeded. None: this
    coordinator has not compared them yet."""
    dead: Annotated[tuple[DeadRank, ...], PerRank] = ()
    progress: GangProgress | None = None
    """None before a rank has finished a step of this round."""
    failures: Many[Failure] = ()
    rehydrate_seconds: Seconds | None = None
    """The longest rehydration of a worker in this round. None: it is not over."""
    rendezvous_seconds: Seconds | None = None
    """From a ROUND message with all addresses until the restore barrier was open on every worker."""
    first_step_seconds: Seconds | None = None
    """From the open barrier until every rank had finished a step."""
    running: bool = False
    """Every rank has finished a step of this round."""
    cannot_restore: ClippedText = ""
    """Set when a worker could not get its shards of the restore point: what it has tried."""
    restore_may_succeed: bool = False
    """Whether each of these workers lacks only what a silent or busy place may have. Then this is no evidence
    against the checkpoint."""
    finished: bool = False
    """All ranks returned 0, and no step is being written, copied or uploaded any more."""
    saves_skipped: Natural = 0
    hang: ClippedText = ""
    """Set when the gang finishes no step and no rank is at work: what is known of it."""
    late: Annotated[tuple[Rank, ...], PerRank] = ()
    """The ranks that the others wait for in the hang. Empty if the stacks do not show it."""
    accepted: AcceptedRound | None = None
    """The ROUND that every worker has accepted, with the highest of their versions. None unless every worker
    has reported lately, and all have accepted the same content. An operator that has just started then needs
    to call no other sidecar of the gang."""
    save_tokens: Many[Text] = ()
    """Tokens of the newest requests to save that this coordinator has received in this round. One that has
    just started knows of none."""
    stragglers: Annotated[tuple[Straggler, ...], Meta(max_length=MAX_STRAGGLERS)] = ()
    """The slowest ranks, by rank. Nothing restarts because of them."""
    restored_from: Annotated[dict[TierName, Natural], Meta(max_length=len(TierName))] | None = None
    """Number of ranks by the farthest tier from which their state was read. Until a rank has restored, it
    counts by the tier that brought its shard to the node. None before every worker has its shards."""


@dataclass(frozen=True, slots=True)
class GangRequest:
    """POST /v1/save-now and /v1/stop, operator -> coordinator. The plan passes it on to rank 0.

    POST /v1/end, operator -> coordinator: as /v1/stop, and the newest committed step is persisted, also if
    ranks have failed or none has started. The job is over.
    """

    round: RestartRound
    token: Text
    """Identifies the request. A token counts only once."""


@dataclass(frozen=True, slots=True)
class Prune:
    """POST /v1/prune, operator -> coordinator; reply Ok.

    Deletes these checkpoints from the object store, manifests first.
    """

    round: RestartRound
    checkpoints: Many[RestorePoint]
