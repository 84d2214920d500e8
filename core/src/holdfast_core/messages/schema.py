"""Every word that crosses between launcher, ranks, sidecars and operator (docs/protocol.md).

Two carriers: frames on the pod's Unix socket (local_*: SDK and launcher <-> sidecar), and JSON over
HTTPS with mutual TLS (between sidecars, operator -> sidecar). The dataclasses are the contract;
`transfer.codec` turns them into JSON and refuses what does not fit.
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
"""Reason of SaveFailed: the step gave way to a newer one. No failure of anything."""


class Refusal(StrEnum):
    """Why a well-formed request is not served. The table of docs/protocol.md, one test a cell."""

    STALE_ROUND = "StaleRound"
    """The request carries a round below the receiver's."""
    FUTURE_ROUND = "FutureRound"
    """The request carries a round that the receiver was not sealed for yet."""
    SEALED = "Sealed"
    """Sealed for a newer round; no restore point yet: nothing of the old round is written."""
    NOT_NEWER = "NotNewer"
    """ROUND with a (round, version) that is not above the one held."""
    NOT_SEALED = "NotSealed"
    """ROUND for a round that was never sealed here."""
    NOT_MEMBER = "NotMember"
    """The sender's certificate names no current member of the job."""
    NOT_COORDINATOR = "NotCoordinator"
    NOT_ASSIGNED = "NotAssigned"
    """A copy whose (from, to) is not in ROUND.copies."""
    NO_SPACE = "NoSpace"
    CONFLICT = "Conflict"
    """Another digest for the same (step, round): an alarm."""
    PROTECTED = "Protected"
    """Prune of a restore point, a held step, or while sealed."""
    BUSY = "Busy"
    NOT_FOUND = "NotFound"
    BAD_REQUEST = "BadRequest"


@dataclass(frozen=True, slots=True)
class Refused:
    """Body of every refusal (HTTP 409, or a socket frame of type `refused`)."""

    code: Refusal
    message: Words
    round: RestartRound
    version: int = 0


# --------------------------------------------------------------------------- shared parts


@dataclass(frozen=True, slots=True)
class Policy:
    """What the job's spec asks for; carried by ROUND and handed on to launcher and ranks."""

    interval_steps: int
    slots: int = 2
    keep_last: int = 3
    peer_copies: int = 1
    peer_encryption: str = "TLS"
    """"TLS" or "None" (a trusted fabric; the handshake stays mutual). Any other word means TLS."""
    object_every_steps: int | None = None
    """None: no object tier."""
    object_compression: str = "None"
    """"None" or "Zstd": what is uploaded is compressed. Any other word means None."""

    @property
    def keeps_every_step(self) -> bool:
        """A step that comes while an earlier one is written waits in memory: one slot is being written,
        one holds the newest complete step, one is filled. With two, a step that waited would take the
        slot of the next one."""
        return self.slots >= 3

    @property
    def plain_copies(self) -> bool:
        """Payloads may travel between peers outside TLS."""
        return self.peer_encryption == "None"

    @property
    def compresses_uploads(self) -> bool:
        return self.object_compression == "Zstd"


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The step that a round starts from. step None: from the very beginning, nothing to restore."""

    step: Step | None = None
    round: RestartRound | None = None
    """The round that saved it (not the one that restores it)."""
    manifest: Digest | None = None
    job_uid: JobUid | None = None
    """Set where the checkpoint belongs to another job (spec.restoreFrom)."""
    job_namespace: str | None = None
    """Namespace in the object keys of that other job; None: this job's."""

    @property
    def own_checkpoint(self) -> CheckpointId | None:
        """None for "none" and for another job's."""
        if self.step is None or self.round is None or self.job_uid is not None:
            return None
        return CheckpointId(self.step, self.round)


@dataclass(frozen=True, slots=True)
class Member:
    worker: Worker
    pod: str
    address: str
    """Pod IP; "" while unknown."""


@dataclass(frozen=True, slots=True)
class CopyAssignment:
    source: Worker
    target: Worker


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One shard that somebody holds or that a manifest names."""

    rank: Rank
    payload_bytes: Natural
    blake3: Digest
    """BLAKE3 of the payload."""
    chunk_table: Digest
    """BLAKE3 of the shard's table of chunk CRCs."""


@dataclass(frozen=True, slots=True)
class ManifestInfo:
    """A manifest as an inventory lists it: enough to decide whether its step is complete."""

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
    """MEMORY (a digested slot in shared memory) or NODE (own shard or a peer's copy)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A save that did not reach a level, or a tier in trouble, with words for people."""

    step: Step | None
    tier: TierName
    reason: Reason
    """CamelCase, e.g. NodeVolumeFull, StoreUnavailable, AccessDenied, PeerUnreachable."""
    message: Words
    worker: Worker | None = None
    """Whose sidecar reported it; the coordinator fills it in. None: it is of the whole gang."""


# --------------------------------------------------------------------------- Unix socket
# Frame: u32 big-endian length, then JSON {"type": <class name>, "id": n, "body": {...}}.
# A request carries id > 0 and gets exactly one reply with the same id (its reply type or Refused).
# A push carries id 0 and gets no reply.


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
    """Rank: the round it runs in. Launcher: the round whose ranks run now, None if none do."""
    last_round: RestartRound | None = None
    """Launcher: the newest round it ever forked ranks for (it never runs one twice)."""


@dataclass(frozen=True, slots=True)
class HelloReply:
    round: RestartRound
    policy: Policy | None = None
    """None until a ROUND was heard."""


@dataclass(frozen=True, slots=True)
class SlotOffer:
    """A slot file under <shared_dir>/slots that the rank allocated, touched and keeps mapped."""

    name: str
    capacity_bytes: int
    """Payload bytes that fit (the file is format.slot.HEADER_BYTES longer)."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Rank -> sidecar: what do I restore in this round?"""

    round: RestartRound
    rank: Rank
    with_layout: bool = False
    """Also put the checkpoint's layout into <shared_dir>/layouts (a rank that is laid out differently
    now; where another number of ranks saved, it is put there without being asked for)."""


@dataclass(frozen=True, slots=True)
class RestoreReply:
    restore_point: RestorePoint
    payload_bytes: Natural = 0
    """Of this rank's shard; the rank offers slots of at least this capacity in Fill. 0 where another
    number of ranks saved the checkpoint: the rank plans its own payload."""
    world_size: int = 0
    """Ranks that saved the checkpoint; 0: not said, the rank takes its shard as it was saved."""
    rank_layout: Digest | None = None
    """Where as many ranks saved: the layout of this rank's shard, <shared_dir>/layouts/<hex>.json."""
    layout: Digest | None = None
    """The checkpoint's layout in the same place."""


@dataclass(frozen=True, slots=True)
class Fill:
    """Rank -> sidecar: put this rank's shard of the restore point into one of these slots.

    A slot that still holds exactly those bytes is answered at once (tier memory). The sidecar
    writes the payload by pwrite into the file, which the rank has touched: the memory stays charged
    to the trainer container.
    """

    round: RestartRound
    rank: Rank
    slots: tuple[SlotOffer, ...]
    layout: Digest | None = None
    """None: the shard as it was saved. Else the layout of the payload that this rank wants, made of
    any old ranks' shards; its document lies in <shared_dir>/layouts/<hex>.json."""
    reads_files: bool = False
    """The rank would rather be told where the shard lies than have a slot filled."""


@dataclass(frozen=True, slots=True)
class Filled:
    slot: str
    payload_bytes: Natural
    tier: TierName
    """Which tier the bytes came from."""


@dataclass(frozen=True, slots=True)
class ShardFile:
    """The other reply to a Fill that `reads_files`: where the shard lies. Nobody has read it yet: a rank
    that finds it bad, or not there, asks for a slot."""

    path: str
    shard: ShardRef
    tier: TierName
    """Where the file is."""
    slot: str | None = None
    """Its header says that it holds the shard, too: what lies there must be compared with the file's
    chunk table."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Rank -> sidecar: this slot is `full`; take it. The reply frees the rank, not the slot."""

    round: RestartRound
    step: Step
    rank: Rank
    slot: str
    payload_bytes: Natural
    layout: Digest
    """BLAKE3 of the rank's layout; its document lies in <shared_dir>/layouts/<hex>.json."""


@dataclass(frozen=True, slots=True)
class Staged:
    step: Step


@dataclass(frozen=True, slots=True)
class Progress:
    """Rank -> sidecar, no reply: the step just finished.

    The same step may come again, with the cost of a save after it, or after a reconnect with no costs.
    """

    round: RestartRound
    rank: Rank
    step: Step
    metrics: Reported = field(default_factory=dict)
    blocked_seconds: Seconds = 0.0
    """Trainer time that saves cost since the last Progress."""
    saves_skipped: Natural = 0
    """Saves that this rank left out since the last Progress."""


@dataclass(frozen=True, slots=True)
class LevelReached:
    """Push to the rank that staged the step."""

    step: Step
    round: RestartRound
    level: Level


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """Push to the rank: this step will not reach `level`."""

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
    """Push to rank 0: save at the next step that all ranks can agree on, then leave."""

    round: RestartRound
    token: str


@dataclass(frozen=True, slots=True)
class Run:
    """Push to the launcher: the restore barrier is open, fork the ranks of this round."""

    round: RestartRound
    restore_point: RestorePoint
    world_size: int
    first_rank: Rank
    procs_per_worker: int
    group_rank: Worker
    master_address: str
    master_port: int
    store_secret: str = field(repr=False)
    """Given to the ranks in their environment; see StoreAddress."""
    policy: Policy


@dataclass(frozen=True, slots=True)
class HostStore:
    """Push to the launcher of the store host: start this round's TCPStore process on port 0."""

    round: RestartRound


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Launcher -> sidecar, no reply."""

    round: RestartRound
    port: int
    secret: str = field(repr=False)
    """Of this round, made by the launcher that hosts the store. Ranks sign with it what they put there,
    because the store itself asks for no password. Travels inside TLS and in environments alone."""


@dataclass(frozen=True, slots=True)
class End:
    """Push to the launcher: a newer round was sealed. SIGKILL all ranks, then send Ended."""

    round: RestartRound
    """The newer round."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Launcher -> sidecar, no reply: no rank of a round below this one runs any more."""

    round: RestartRound


@dataclass(frozen=True, slots=True)
class Exited:
    """Launcher -> sidecar, no reply: a rank process ended by itself."""

    round: RestartRound
    rank: Rank
    code: int
    """Exit code; -N for signal N."""
    message: Words = ""
    """Last words: the tail of the traceback, bounded to 2 KiB."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Launcher -> sidecar: all ranks of this pod returned 0. The reply comes when the gang's last
    step has reached every level it was to reach and the operator has recorded it."""

    round: RestartRound


@dataclass(frozen=True, slots=True)
class FinishReply:
    released: bool
    message: Words = ""


# --------------------------------------------------------------------------- HTTPS, control
# All under /v1. 200 with the reply type; 409 with Refused; 400 with Refused(BadRequest).


@dataclass(frozen=True, slots=True)
class Seal:
    """POST /v1/seal, operator -> sidecar. Replied once the round is fsynced, the ranks are ended
    and slots that were `full` are on the node tier."""

    round: RestartRound


@dataclass(frozen=True, slots=True)
class Inventory:
    """Reply of POST /v1/seal and GET /v1/inventory."""

    worker: Worker
    pod: Name
    round: RestartRound
    version: Natural
    """Version of the newest ROUND held for `round`; 0 if none."""
    manifests: tuple[ManifestInfo, ...] = ()
    shards: Annotated[tuple[HeldShard, ...], ManyShards] = ()
    free_bytes: Natural = 0
    running_round: RestartRound | None = None
    """Round whose ranks run in this pod now."""


@dataclass(frozen=True, slots=True)
class Round:
    """POST /v1/round, operator -> sidecar; reply Inventory."""

    round: RestartRound
    version: Natural
    restore_point: RestorePoint
    coordinator: Worker
    store_host: Worker
    """Whose launcher hosts the TCPStore of this round."""
    workers: Natural
    members: Annotated[tuple[Member, ...], PerWorker]
    copies: Annotated[tuple[CopyAssignment, ...], PerRank]
    policy: Policy
    holds: tuple[Step, ...] = ()
    """Steps that must not be pruned."""
    last_persisted: RestorePoint | None = None


@dataclass(frozen=True, slots=True)
class StepState:
    """One step as the coordinator sees it."""

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
    """What became of the saves of one rank in this round. A step up to `newest` that is not under way
    was skipped or could not be written, unless the coordinator has heard that it is prepared."""

    rank: Rank
    newest: Step
    """Handed over last."""
    under_way: tuple[Step, ...] = ()
    """Handed over, and neither failed nor known to the coordinator."""


@dataclass(frozen=True, slots=True)
class RankTiers:
    """Newest step of one rank in each tier, for the ranks x tiers map."""

    rank: Rank
    memory: Step | None = None
    node: Step | None = None
    peer: Step | None = None
    object: Step | None = None
    restored_from: TierName | None = None
    """Tier that served this rank's shard in this round."""


@dataclass(frozen=True, slots=True)
class RankProgress:
    rank: Rank
    step: Step
    metrics: Reported = field(default_factory=dict)
    blocked_seconds: Seconds = 0.0
    """Sum over this round."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds that each part of this round's start took, as the coordinator saw it."""

    rehydrate_seconds: Seconds | None = None
    rendezvous_seconds: Seconds | None = None
    """Barrier open on the slowest worker -> first Progress of every rank is first_step; this one is
    ROUND complete -> TCPStore address known and barrier open."""
    first_step_seconds: Seconds | None = None


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    """Reply of GET /v1/state?since=V&timeout=S: a level with a version, not a queue.

    `since` is the version up to which the operator has durably acted; that it says so is what
    releases `Finish`.
    """

    version: Natural
    round: RestartRound
    steps: tuple[StepState, ...] = ()
    """Steps of this round that are on their way or committed, oldest first, bounded to 16."""
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
    """Set when a worker could not get its shards of the restore point: what was tried."""
    finished: bool = False
    """All ranks returned 0 and nothing is on its way any more."""
    saves_skipped: Natural = 0
    last_memory: RestorePoint | None = None
    """Newest step of this round whose shards are all digested, in shared memory or on the nodes. It
    is no promise: it goes with a pod."""
    steps_dropped: Natural = 0
    """Steps that gave way to newer ones before nodes could write or peers could copy them, since this
    coordinator began."""


@dataclass(frozen=True, slots=True)
class Ask:
    """POST /v1/save-now and /v1/stop, operator -> coordinator (which tells rank 0's sidecar)."""

    round: RestartRound
    token: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """POST /v1/certificate, operator -> sidecar: a new leaf (PEM)."""

    certificate: Pem
    key: Pem = field(repr=False)


@dataclass(frozen=True, slots=True)
class Prepared:
    """POST /v1/prepared, sidecar -> coordinator: durable on my node tier.

    `rank_layout` is sent when the coordinator answered `need_layout` before.
    """

    round: RestartRound
    step: Step
    worker: Worker
    shard: ShardInfo
    layout: Digest
    rank_layout: Document | None = None
    resent: bool = False


@dataclass(frozen=True, slots=True)
class PreparedReply:
    need_layout: bool = False
    committed: Digest | None = None
    """Set where the manifest of this step exists already (a resend after a reconnect)."""
    pruned: bool = False
    """The coordinator gave the step up or pruned it before this shard was there: delete the shard."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """POST /v1/replicated, sidecar -> coordinator: acknowledged by all assigned peers."""

    round: RestartRound
    step: Step
    worker: Worker
    rank: Rank
    blake3: Digest


@dataclass(frozen=True, slots=True)
class Reference:
    """An earlier checkpoint whose objects a later one needs."""

    step: Step
    round: RestartRound
    payload_bytes: Natural = 0
    """Of the later one, stored in the earlier."""


@dataclass(frozen=True, slots=True)
class Uploaded:
    """POST /v1/uploaded, sidecar -> coordinator: the shard is in the object store, verified."""

    round: RestartRound
    step: Step
    worker: Worker
    rank: Rank
    blake3: Digest
    base: Reference | None = None
    """The checkpoint whose existence vouches for `references`; None where there are none."""
    references: tuple[Reference, ...] = ()
    """Earlier checkpoints that store chunks of this shard."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """POST /v1/report, sidecar -> coordinator: what else the coordinator's state is made of.
    Sent on change, at most twice a second. Reply: Ok."""

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
    """Nothing is staged, being copied or uploaded here."""
    saves_skipped: Natural = 0
    saves: Annotated[tuple[RankSaves, ...], PerRank] = ()
    told: str = ""
    """`instance` of the coordinator that has heard everything but what `saves` names as under way."""
    instance: str = ""
    """Names this life of the sender: when it changes, the coordinator tells it everything again."""


@dataclass(frozen=True, slots=True)
class Ok:
    round: RestartRound
    instance: str = ""
    """Reply to WorkerReport: names this life of the coordinator. When it changes, the sender repeats
    what it has told (PREPARED, REPLICATED, UPLOADED): the new life has not heard it."""


@dataclass(frozen=True, slots=True)
class DigestedShard:
    """A shard that is digested in its pod's shared memory."""

    step: Step
    shard: ShardInfo
    layout: Digest
    stored: bool = False
    """By now it is on the node tier too."""
    failed: bool = False
    """It could not be written: nobody is to wait for it, though its bytes are there."""


@dataclass(frozen=True, slots=True)
class RankHolding:
    """What one rank's slots hold that was not written at once."""

    rank: Rank
    shards: tuple[DigestedShard, ...] = ()
    digesting: tuple[Step, ...] = ()
    """Not digested yet: neither there nor lost."""
    writing: Step | None = None
    """Being written to the node tier now, held before or not."""


@dataclass(frozen=True, slots=True)
class Holding:
    """POST /v1/holding, sidecar -> coordinator: all that this worker holds in memory, as of now. What
    an earlier one named and this one does not is not there any more."""

    round: RestartRound
    worker: Worker
    ranks: tuple[RankHolding, ...]
    layouts: tuple[Document, ...] = ()
    """Rank layouts that the coordinator asked for."""


@dataclass(frozen=True, slots=True)
class HoldingReply:
    need_layouts: tuple[Digest, ...] = ()
    """Nothing of the message counts until it comes with these."""
    drop: tuple[Step, ...] = ()
    """Of the steps named: nobody wants them any more."""


@dataclass(frozen=True, slots=True)
class HoldNotice:
    """POST /v1/hold, coordinator -> sidecar: which steps are at level memory, and which is written."""

    round: RestartRound
    memory: tuple[Step, ...] = ()
    """Reached the level since the last notice."""
    chosen: Step | None = None
    """Who holds it in memory writes it to the node tier."""
    prune: tuple[Step, ...] = ()
    """As in LevelNotice."""


@dataclass(frozen=True, slots=True)
class ManifestPut:
    """POST /v1/manifest, coordinator -> sidecar: durable here when it replies Ok."""

    round: RestartRound
    step: Step
    manifest: Document
    """Canonical JSON text."""
    layout: Document | None = None
    """The layout's canonical JSON, where the receiver lacked it before."""
    held: bool = False
    """Some shards may lie in shared memory only: the receiver may hold its own there, and copies wait
    for level local. False: Ok says that the receiver's shards are durable."""


@dataclass(frozen=True, slots=True)
class LevelNotice:
    """POST /v1/level, coordinator -> sidecar: tell the ranks that wait, prune what may go."""

    round: RestartRound
    step: Step
    step_round: RestartRound
    level: Level
    prune: tuple[Step, ...] = ()
    """Steps (of any round) that may leave node and peer tiers now."""
    released: bool = False
    """Finish may be answered."""


@dataclass(frozen=True, slots=True)
class PersistRequest:
    """POST /v1/persist, coordinator -> sidecar: upload your shards of this committed step."""

    round: RestartRound
    step: Step
    step_round: RestartRound
    base: RestorePoint | None = None
    """The newest persisted checkpoint: what is unchanged since then need not be sent."""
    older: tuple[Reference, ...] = ()
    """Checkpoints before `base` that may be referred to as well."""
    whole: bool = False
    """Store each shard as one uncompressed object that refers to no other: what an earlier attempt
    referred to is gone."""
    compress: bool = False
    """Compress what is stored. Without effect where `whole` is set."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """POST /v1/suspect, sidecar -> sidecar: what you served of this shard did not verify. The
    receiver reads its own copy back and quarantines it if it is bad; it believes nobody."""

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
    """host:port of the TCPStore; "" if the time ran out."""
    secret: str = field(default="", repr=False)
    """See StoreAddress."""


@dataclass(frozen=True, slots=True)
class Prune:
    """POST /v1/prune, operator -> coordinator: delete these checkpoints from the object store,
    manifests first. Reply PruneReply."""

    round: RestartRound
    checkpoints: tuple[RestorePoint, ...]


@dataclass(frozen=True, slots=True)
class PruneReply:
    deleted: tuple[RestorePoint, ...]


# GET /v1/manifest?step=&round=[&jobUid=]  -> ManifestDocument (reads are for the operator and for
# members of the round that is held)
@dataclass(frozen=True, slots=True)
class ManifestDocument:
    manifest: Document
    layout: Document | None = None
