"""Every message between launcher, ranks, sidecars and operator (docs/protocol.md).

There are two transports: frames on the pod's Unix socket (SDK and launcher <-> sidecar), and JSON over
HTTPS with mutual TLS (between sidecars, operator -> sidecar). These dataclasses are the contract.
`messages.codec` converts them to and from JSON and refuses values that do not fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from holdfast_core.ids import (
    CheckpointId,
    Digest,
    JobUid,
    Level,
    Rank,
    RestartRound,
    ShardRef,
    Step,
    TierName,
    Worker,
)
from holdfast_core.messages.bounds import (
    Document,
    ManyShards,
    Name,
    Natural,
    Pem,
    PerRank,
    PerWorker,
    Reason,
    Reported,
    Seconds,
    Words,
)

PROTOCOL_VERSION = 1

OVERTAKEN = "Overtaken"
"""Reason of SaveFailed for a step that a newer one replaced. It is not an error."""


class Refusal(StrEnum):
    """Why a receiver refuses a well-formed request. tests/sidecar/base/test_refusals.py lists the rules."""

    STALE_ROUND = "StaleRound"
    """The round of the request is older than the receiver's."""
    FUTURE_ROUND = "FutureRound"
    """The receiver is not sealed for the round of the request yet."""
    SEALED = "Sealed"
    """The receiver is sealed for its round and has not received the ROUND message yet. The sender tries
    again later."""
    NOT_NEWER = "NotNewer"
    """The version of a ROUND message is not above the one that the receiver holds for that round."""
    NOT_SEALED = "NotSealed"
    """The receiver was not sealed for the round of a ROUND message."""
    NOT_MEMBER = "NotMember"
    """The sender's certificate names no current member of the job, or only the operator may send this
    message."""
    NOT_COORDINATOR = "NotCoordinator"
    NOT_ASSIGNED = "NotAssigned"
    """ROUND.copies does not assign this copy to the sender and the receiver."""
    NO_SPACE = "NoSpace"
    CONFLICT = "Conflict"
    """The receiver has a different digest for the same step and round. Correct members never cause this."""
    PROTECTED = "Protected"
    """Prune names a checkpoint that must stay: the restore point, a pinned step, the newest persisted step,
    one that is being uploaded, or another job's."""
    BUSY = "Busy"
    NOT_FOUND = "NotFound"
    BAD_REQUEST = "BadRequest"


@dataclass(frozen=True, slots=True)
class Refused:
    """Body of every refusal (an HTTP error reply, or a socket frame of type `Refused`)."""

    code: Refusal
    message: Words
    round: RestartRound
    """The receiver's round."""
    version: int = 0
    """Version of the ROUND message that the receiver holds. 0 if it holds none."""


# --------------------------------------------------------------------------- shared parts


@dataclass(frozen=True, slots=True)
class Policy:
    """The checkpoint settings of the job's spec.

    ROUND carries them to the sidecars, which send them to launcher and ranks.
    """

    interval_steps: int
    slots: int = 2
    keep_last: int = 3
    peer_copies: int = 1
    peer_encryption: str = "TLS"
    """"TLS", or "None" on a trusted network (the handshake is still mutual). Other values mean "TLS"."""
    object_every_steps: int | None = None
    """Steps between two uploads. None means that the job has no object tier."""
    object_compression: str = "None"
    """"Zstd" compresses uploads. Every other value means "None"."""

    @property
    def memory_level_enabled(self) -> bool:
        """Return whether a step that is staged during an earlier one's write waits in memory.

        This takes three slots: one is being written, one holds the newest complete step, and one is
        being filled. With two slots, a step that waits would occupy the slot of the next step.
        """
        return self.slots >= 3

    @property
    def plain_copies(self) -> bool:
        """Return whether peers may exchange payloads outside TLS."""
        return self.peer_encryption == "None"

    @property
    def compresses_uploads(self) -> bool:
        return self.object_compression == "Zstd"


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """Checkpoint that a round starts from. `step` None means that there is nothing to restore."""

    step: Step | None = None
    round: RestartRound | None = None
    """The round that saved the checkpoint, not the one that restores it."""
    manifest: Digest | None = None
    job_uid: JobUid | None = None
    """Uid of the job that owns the checkpoint, where it is another job (spec.restoreFrom)."""
    job_namespace: str | None = None
    """Namespace of that other job in the object keys. None means this job's namespace."""

    @property
    def own_checkpoint(self) -> CheckpointId | None:
        """Return the checkpoint's id. None if there is nothing to restore or another job owns it."""
        if self.step is None or self.round is None or self.job_uid is not None:
            return None
        return CheckpointId(self.step, self.round)


@dataclass(frozen=True, slots=True)
class Member:
    worker: Worker
    pod: str
    address: str
    """Pod IP. Empty while it is unknown."""


@dataclass(frozen=True, slots=True)
class CopyAssignment:
    source: Worker
    target: Worker


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """Identity of one shard: of one that a worker holds, or one that a manifest names."""

    rank: Rank
    payload_bytes: Natural
    blake3: Digest
    """BLAKE3 of the payload."""
    chunk_table: Digest
    """BLAKE3 of the shard's chunk table."""


@dataclass(frozen=True, slots=True)
class ManifestInfo:
    """Entry of an inventory for one manifest. It suffices to decide whether the step is complete."""

    step: Step
    round: RestartRound
    manifest: Digest
    world_size: Natural
    shards: Annotated[tuple[ShardInfo, ...], PerRank]


@dataclass(frozen=True, slots=True)
class HeldShard:
    step: Step
    round: RestartRound
    rank: Rank
    payload_bytes: Natural
    blake3: Digest
    tier: TierName
    """MEMORY: a slot's header names this shard. NODE: the node tier has it, as the worker's own shard or as
    a peer's copy."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A save that did not reach a level, or a tier that does not work, with a message for people."""

    step: Step | None
    tier: TierName
    reason: Reason
    """For example NodeVolumeFull, StoreUnavailable, AccessDenied, PeerUnreachable."""
    message: Words
    worker: Worker | None = None
    """The worker whose sidecar reported it, set by the coordinator. None means the whole gang."""


# --------------------------------------------------------------------------- Unix socket
# Frame: u32 big-endian length, then JSON {"type": <class name>, "id": n, "body": {...}}.
# A request has id > 0 and gets exactly one reply with the same id (its reply type or Refused).
# A push has id 0 and gets no reply.


class LocalRole(StrEnum):
    LAUNCHER = "launcher"
    RANK = "rank"


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame on every connection."""

    version: int
    job_uid: JobUid
    role: LocalRole
    rank: Rank | None = None
    round: RestartRound | None = None
    """From a rank: its round. From a launcher: the round whose ranks run now, None if none run."""
    last_round: RestartRound | None = None
    """From a launcher: the newest round that it has forked ranks for. It never runs a round twice."""


@dataclass(frozen=True, slots=True)
class HelloReply:
    round: RestartRound
    policy: Policy | None = None
    """None until the sidecar has received a ROUND message."""


@dataclass(frozen=True, slots=True)
class SlotOffer:
    """A slot file below <shared_dir>/slots that the rank has allocated, prefaulted and mapped."""

    name: str
    capacity_bytes: int
    """Largest payload. The file is longer by shm.slot_header.HEADER_BYTES."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Rank -> sidecar: ask which checkpoint this rank restores in this round."""

    round: RestartRound
    rank: Rank
    with_layout: bool = False
    """Also write the checkpoint's layout to <shared_dir>/layouts, for a rank whose layout has changed. The
    sidecar always writes it where another number of ranks saved the checkpoint."""


@dataclass(frozen=True, slots=True)
class RestoreReply:
    restore_point: RestorePoint
    payload_bytes: Natural = 0
    """Payload of this rank's shard. The rank offers slots of at least this capacity in Fill. 0 where
    another number of ranks saved the checkpoint: then the rank plans its own payload."""
    world_size: int = 0
    """Number of ranks that saved the checkpoint. 0 means that it is not given, and the rank takes its
    shard as it was saved."""
    rank_layout: Digest | None = None
    """Layout of this rank's shard, in <shared_dir>/layouts/<hex>.json. Set where the same number of ranks
    saved the checkpoint."""
    layout: Digest | None = None
    """The checkpoint's layout, in the same directory. None where it was not written there."""


@dataclass(frozen=True, slots=True)
class Fill:
    """Rank -> sidecar: write this rank's shard of the restore point into one of these slots.

    If a slot still holds exactly those bytes, the sidecar names it without writing (tier memory).
    Otherwise it writes the payload with pwrite. The rank has prefaulted the file, so its memory stays
    charged to the trainer container.
    """

    round: RestartRound
    rank: Rank
    slots: tuple[SlotOffer, ...]
    layout: Digest | None = None
    """None asks for the shard as it was saved. Otherwise the layout of the payload that this rank needs, in
    <shared_dir>/layouts/<hex>.json. The sidecar assembles it from the shards of any old ranks."""
    reads_files: bool = False
    """The rank can read the shard's file itself, so the reply may be ShardFile."""


@dataclass(frozen=True, slots=True)
class Filled:
    slot: str
    payload_bytes: Natural
    tier: TierName
    """The tier that the bytes come from."""


@dataclass(frozen=True, slots=True)
class ShardFile:
    """Reply to a Fill with `reads_files`: the file of the shard.

    Its bytes are not verified yet. A rank that finds it missing or corrupt asks again, for a filled
    slot.
    """

    path: str
    shard: ShardRef
    tier: TierName
    """The tier of the file."""
    slot: str | None = None
    """A slot whose header names the same shard. The rank must verify its bytes with the chunk table of the
    file."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Rank -> sidecar: hand over a slot in state FULL.

    After the reply the rank continues; the slot stays in use until the shard is written.
    """

    round: RestartRound
    step: Step
    rank: Rank
    slot: str
    payload_bytes: Natural
    layout: Digest
    """BLAKE3 of the rank's layout, whose document is <shared_dir>/layouts/<hex>.json."""


@dataclass(frozen=True, slots=True)
class Staged:
    step: Step


@dataclass(frozen=True, slots=True)
class Progress:
    """Rank -> sidecar, no reply: the step that has just finished.

    The rank may send the same step again: with the cost of a save after it, or, after a reconnect, without
    costs.
    """

    round: RestartRound
    rank: Rank
    step: Step
    metrics: Reported = field(default_factory=dict)
    blocked_seconds: Seconds = 0.0
    """Seconds for which saves blocked training since the last Progress."""
    saves_skipped: Natural = 0
    """Saves that this rank skipped since the last Progress."""


@dataclass(frozen=True, slots=True)
class LevelReached:
    """Push to the rank that staged the step: the step has reached `level`."""

    step: Step
    round: RestartRound
    level: Level


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """Push to the rank that staged the step: the step will not reach `level`."""

    step: Step
    round: RestartRound
    level: Level
    reason: str
    message: Words


@dataclass(frozen=True, slots=True)
class SaveRequested:
    """Push to rank 0: save at the next step that all ranks can agree on."""

    round: RestartRound
    token: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Push to rank 0: save at the next step that all ranks can agree on, then end the training."""

    round: RestartRound
    token: str


@dataclass(frozen=True, slots=True)
class Run:
    """Push to the launcher: the restore barrier is open. Fork the ranks of this round."""

    round: RestartRound
    restore_point: RestorePoint
    world_size: int
    first_rank: Rank
    procs_per_worker: int
    group_rank: Worker
    master_address: str
    master_port: int
    store_secret: str = field(repr=False)
    """The launcher passes it to the ranks in their environment; see StoreAddress."""
    policy: Policy


@dataclass(frozen=True, slots=True)
class HostStore:
    """Push to the launcher of the store host: start this round's TCPStore process on any free port."""

    round: RestartRound


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Launcher -> sidecar, no reply: the TCPStore of this round listens on `port`."""

    round: RestartRound
    port: int
    secret: str = field(repr=False)
    """Secret of this round, made by the launcher that hosts the store. Ranks sign their entries with it,
    because the store itself has no authentication. It is sent only inside TLS and the pod's socket, and
    passed to processes only in their environment."""


@dataclass(frozen=True, slots=True)
class End:
    """Push to the launcher: a newer round is sealed. Send SIGKILL to all ranks, then send Ended."""

    round: RestartRound
    """The newer round."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Launcher -> sidecar, no reply: no rank of a round older than this one is running."""

    round: RestartRound


@dataclass(frozen=True, slots=True)
class Exited:
    """Launcher -> sidecar, no reply: a rank process ended without a request to do so."""

    round: RestartRound
    rank: Rank
    code: int
    """Exit code, or -N for signal N."""
    message: Words = ""
    """The end of the traceback, at most 2 KiB."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Launcher -> sidecar: all ranks of this pod returned 0.

    The sidecar replies when the gang's last step has reached each level that it is meant to reach and
    the operator has recorded this.
    """

    round: RestartRound


@dataclass(frozen=True, slots=True)
class FinishReply:
    released: bool
    message: Words = ""


# --------------------------------------------------------------------------- HTTPS, control
# All paths are below /v1. Replies: 200 with the reply type; otherwise Refused, with 400 for a malformed
# message, 503 after an error of the receiver, and 409 for every other refusal.


@dataclass(frozen=True, slots=True)
class Seal:
    """POST /v1/seal, operator -> sidecar; reply Inventory.

    The sidecar replies after the fsync of the round, the end of the ranks, and the writes of staged slots to
    the node tier. Each of these waits has a limit (docs/protocol.md).
    """

    round: RestartRound


@dataclass(frozen=True, slots=True)
class Inventory:
    """Reply of POST /v1/seal, POST /v1/round and GET /v1/inventory: what this worker stores."""

    worker: Worker
    pod: Name
    round: RestartRound
    version: Natural
    """Version of the newest ROUND message that the sidecar holds for `round`. 0 if it holds none."""
    manifests: tuple[ManifestInfo, ...] = ()
    shards: Annotated[tuple[HeldShard, ...], ManyShards] = ()
    free_bytes: Natural = 0
    running_round: RestartRound | None = None
    """Round whose ranks run in this pod now. None if none run."""


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
    copies: Annotated[tuple[CopyAssignment, ...], PerRank]
    policy: Policy
    holds: tuple[Step, ...] = ()
    """Pinned steps, which must not be pruned."""
    last_persisted: RestorePoint | None = None


@dataclass(frozen=True, slots=True)
class StepState:
    """State of one step in the coordinator's ledger. `prepared`, `replicated` and `uploaded` count ranks."""

    step: Step
    round: RestartRound
    level: Level | None
    prepared: Natural
    replicated: Natural
    uploaded: Natural
    world_size: Natural
    manifest: Digest | None = None
    payload_bytes: Natural = 0


@dataclass(frozen=True, slots=True)
class DeadRank:
    rank: Rank
    worker: Worker
    code: int
    message: Words = ""


@dataclass(frozen=True, slots=True)
class RankSaves:
    """Outcome of one rank's saves in this round.

    A step up to `newest` that is not in `under_way` was skipped or could not be written, unless the
    coordinator has received PREPARED for it.
    """

    rank: Rank
    newest: Step
    """The newest step that the rank has staged."""
    under_way: tuple[Step, ...] = ()
    """Staged steps that have not failed and that the coordinator has no PREPARED for yet."""


@dataclass(frozen=True, slots=True)
class RankTiers:
    """Newest step of one rank in each tier, for the map of ranks and tiers."""

    rank: Rank
    memory: Step | None = None
    node: Step | None = None
    peer: Step | None = None
    object: Step | None = None
    restored_from: TierName | None = None
    """The tier that this rank's shard was restored from in this round."""


@dataclass(frozen=True, slots=True)
class RankProgress:
    """Newest finished step of one rank."""

    rank: Rank
    step: Step
    metrics: Reported = field(default_factory=dict)
    blocked_seconds: Seconds = 0.0
    """Seconds for which saves blocked training in this round."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds that each part of this round's start took, as the coordinator measured it.

    None while the part is not over.
    """

    rehydrate_seconds: Seconds | None = None
    """The longest rehydration of a worker."""
    rendezvous_seconds: Seconds | None = None
    """From a ROUND message with all addresses until the restore barrier is open on every worker."""
    first_step_seconds: Seconds | None = None
    """From the open barrier until every rank has finished a step."""


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    """Reply of GET /v1/state?since=V&timeout=S: the whole current state and its version.

    `since` is the version up to which the operator has durably acted. Sidecars answer `Finish` only after
    the operator has acknowledged the final version in this way.
    """

    version: Natural
    round: RestartRound
    steps: tuple[StepState, ...] = ()
    """At most 16 steps of this round that are in progress or committed, oldest first."""
    last_local: RestorePoint | None = None
    last_replicated: RestorePoint | None = None
    last_persisted: RestorePoint | None = None
    last_persisted_bytes: Natural = 0
    dead: Annotated[tuple[DeadRank, ...], PerRank] = ()
    progress: Annotated[tuple[RankProgress, ...], PerRank] = ()
    tiers: Annotated[tuple[RankTiers, ...], PerRank] = ()
    failures: tuple[Failure, ...] = ()
    times: RoundTimes = RoundTimes()
    running: bool = False
    """Every rank has finished a step of this round."""
    cannot_restore: Words = ""
    """Set when a worker could not get its shards of the restore point: what it has tried."""
    finished: bool = False
    """All ranks returned 0, and no step is being written, copied or uploaded any more."""
    saves_skipped: Natural = 0
    last_memory: RestorePoint | None = None
    """Newest step of this round at level memory or above: every shard is digested, in shared memory or on a
    node tier. The loss of a pod may lose it."""
    steps_dropped: Natural = 0
    """Steps that newer ones replaced before they were written or copied, since this coordinator started."""


@dataclass(frozen=True, slots=True)
class Ask:
    """POST /v1/save-now and /v1/stop, operator -> coordinator -> sidecar of rank 0."""

    round: RestartRound
    token: str
    """Identifies the request. A token counts only once."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """POST /v1/certificate, operator -> sidecar: a new leaf certificate and its key (PEM)."""

    certificate: Pem
    key: Pem = field(repr=False)


@dataclass(frozen=True, slots=True)
class Prepared:
    """POST /v1/prepared, sidecar -> coordinator: the shard is durable on the sender's node tier.

    `rank_layout` is set after the coordinator has replied `need_layout`.
    """

    round: RestartRound
    step: Step
    worker: Worker
    shard: ShardInfo
    layout: Digest
    rank_layout: Document | None = None


@dataclass(frozen=True, slots=True)
class PreparedReply:
    need_layout: bool = False
    committed: Digest | None = None
    """Digest of the step's manifest, where the manifest exists: the coordinator has built it before or
    because of this message."""
    pruned: bool = False
    """The coordinator has given the step up or pruned it. The receiver deletes the shard."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """POST /v1/replicated, sidecar -> coordinator: all assigned peers have a durable copy of the shard."""

    round: RestartRound
    step: Step
    worker: Worker
    rank: Rank
    blake3: Digest


@dataclass(frozen=True, slots=True)
class Reference:
    """An earlier checkpoint whose objects a later checkpoint needs."""

    step: Step
    round: RestartRound
    payload_bytes: Natural = 0
    """Payload bytes of the later checkpoint that are stored in this one."""


@dataclass(frozen=True, slots=True)
class Uploaded:
    """POST /v1/uploaded, sidecar -> coordinator: the shard is in the object store and verified."""

    round: RestartRound
    step: Step
    worker: Worker
    rank: Rank
    blake3: Digest
    base: Reference | None = None
    """The checkpoint that `references` depend on: while its manifest exists, their objects exist. None where
    there are no references."""
    references: tuple[Reference, ...] = ()
    """Earlier checkpoints that store chunks of this shard."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """POST /v1/report, sidecar -> coordinator; reply Ok. This worker's part of CoordinatorState.

    The sidecar sends it when it changes, at most twice a second unless a rank is dead, and every few seconds
    without a change.
    """

    round: RestartRound
    worker: Worker
    progress: Annotated[tuple[RankProgress, ...], PerRank] = ()
    dead: Annotated[tuple[DeadRank, ...], PerRank] = ()
    failures: tuple[Failure, ...] = ()
    tiers: Annotated[tuple[RankTiers, ...], PerRank] = ()
    rehydrate_seconds: Seconds | None = None
    barrier_open: bool = False
    cannot_restore: Words = ""
    done: bool = False
    """All ranks of the pod returned 0."""
    idle: bool = False
    """This worker has no save left to write, copy or upload."""
    saves_skipped: Natural = 0
    saves: Annotated[tuple[RankSaves, ...], PerRank] = ()
    told: str = ""
    """`Ok.instance` of the coordinator that has received all of this worker's messages, except those about
    the steps that `saves` lists as under way."""
    instance: str = ""
    """Identifies the sender's process. When it changes, the coordinator sends all of its messages again."""


@dataclass(frozen=True, slots=True)
class Ok:
    round: RestartRound
    instance: str = ""
    """Identifies the coordinator's instance, in the reply to WorkerReport. When it changes, the member sends
    its PREPARED, REPLICATED and UPLOADED messages again, because the new instance has not received them."""


@dataclass(frozen=True, slots=True)
class DigestedShard:
    """A shard that was digested in its pod's shared memory."""

    step: Step
    shard: ShardInfo
    layout: Digest
    stored: bool = False
    """The node tier has the shard, too."""
    failed: bool = False
    """The write to the node tier failed. The bytes in memory are valid, but the coordinator does not wait for
    the shard."""


@dataclass(frozen=True, slots=True)
class RankHolding:
    """Steps of one rank that waited in shared memory before they were written."""

    rank: Rank
    shards: tuple[DigestedShard, ...] = ()
    digesting: tuple[Step, ...] = ()
    """Steps that are not digested yet. They count neither as held nor as lost."""
    writing: Step | None = None
    """The step that is being written to the node tier now, whether it waited before or not."""


@dataclass(frozen=True, slots=True)
class Holding:
    """POST /v1/holding, sidecar -> coordinator: everything that this worker holds in memory now.

    A shard that an earlier message names and this one does not is no longer in memory.
    """

    round: RestartRound
    worker: Worker
    ranks: tuple[RankHolding, ...]
    layouts: tuple[Document, ...] = ()
    """Rank layouts that the coordinator has asked for in `HoldingReply.need_layouts`."""


@dataclass(frozen=True, slots=True)
class HoldingReply:
    need_layouts: tuple[Digest, ...] = ()
    """Layouts that the coordinator lacks. It ignores the message until it is sent again with them."""
    drop: tuple[Step, ...] = ()
    """Steps of the message that the worker drops: they are pruned, too old, or contradict other shards."""


@dataclass(frozen=True, slots=True)
class HoldNotice:
    """POST /v1/hold, coordinator -> sidecar: steps at level memory, and the step that is written next."""

    round: RestartRound
    memory: tuple[Step, ...] = ()
    """Steps that have reached level memory since the last notice."""
    chosen: Step | None = None
    """The step that every sidecar that holds it in memory writes to its node tier."""
    prune: tuple[Step, ...] = ()
    """See LevelNotice."""


@dataclass(frozen=True, slots=True)
class ManifestPut:
    """POST /v1/manifest, coordinator -> sidecar. The reply Ok means that the manifest is durable there."""

    round: RestartRound
    step: Step
    manifest: Document
    """Canonical JSON text."""
    layout: Document | None = None
    """Canonical JSON text of the layout. None where the receiver has it already."""
    held: bool = False
    """Some shards may be in shared memory only, the receiver's among them, and copies wait for level local.
    Where it is False, the reply Ok also means that the receiver's shards are durable."""


@dataclass(frozen=True, slots=True)
class LevelNotice:
    """POST /v1/level, coordinator -> sidecar: notify the ranks that wait for this level, and prune steps."""

    round: RestartRound
    step: Step
    step_round: RestartRound
    level: Level
    prune: tuple[Step, ...] = ()
    """Steps, of any round, that may be deleted from the node tier, copies for peers included."""
    released: bool = False
    """The sidecar may answer `Finish`. Then `step` and `level` announce nothing new."""


@dataclass(frozen=True, slots=True)
class PersistRequest:
    """POST /v1/persist, coordinator -> sidecar: upload the worker's shards of this committed step."""

    round: RestartRound
    step: Step
    step_round: RestartRound
    base: RestorePoint | None = None
    """The newest persisted checkpoint. Chunks that have not changed since then need no upload."""
    older: tuple[Reference, ...] = ()
    """Checkpoints before `base` that the upload may refer to, too."""
    whole: bool = False
    """Store each shard as one uncompressed object without references, because the objects that an earlier
    attempt referred to are gone."""
    compress: bool = False
    """Compress the uploaded data. Without effect where `whole` is set."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """POST /v1/suspect, sidecar -> sidecar: bytes of this shard that the receiver served did not verify.

    The receiver does not trust the message. It verifies its own copy and quarantines it if it is corrupt.
    """

    job_uid: JobUid
    step: Step
    step_round: RestartRound
    rank: Rank
    blake3: Digest


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Reply of GET /v1/rendezvous?round=R&timeout=S on the store host's sidecar."""

    round: RestartRound
    address: str
    """host:port of the TCPStore. Empty after a time-out."""
    secret: str = field(default="", repr=False)
    """See StoreAddress."""


@dataclass(frozen=True, slots=True)
class Prune:
    """POST /v1/prune, operator -> coordinator; reply PruneReply.

    Deletes these checkpoints from the object store, manifests first.
    """

    round: RestartRound
    checkpoints: tuple[RestorePoint, ...]


@dataclass(frozen=True, slots=True)
class PruneReply:
    deleted: tuple[RestorePoint, ...]


@dataclass(frozen=True, slots=True)
class ManifestDocument:
    """Reply of GET /v1/manifest?step=&round=[&jobUid=], for the operator and for members of the round."""

    manifest: Document
    layout: Document | None = None
