"""Messages between the sidecar and the processes of its pod: the launcher and the ranks.

Frame: u32 big-endian length, then JSON {"type": <class name>, "id": n, "body": {...}}. A request has id > 0
and gets exactly one reply with the same id (its reply type or Refused). A push has id 0 and gets no reply.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from holdfast_core.ids import (
    Digest,
    JobUid,
    Natural,
    Rank,
    RestartRound,
    ShardRef,
    Step,
    TierName,
    Worker,
)
from holdfast_core.messages.codec import Many, PerRank, Text
from holdfast_core.messages.common import DeadRank, Policy, RankStack, RestorePoint

PROTOCOL_VERSION = 1


OVERTAKEN = "Overtaken"
"""Reason of StepOutcome for a step that a newer one replaced. It is not an error."""
NO_OBJECT_TIER = "NoObjectTier"
"""Reason of StepOutcome for level persisted where there is no object store. The save has not failed: the
level does not exist for it, and a wait for the level ends."""
STORE_TAKEN = "StoreTaken"
"""Reason of StepOutcome for level persisted when another run has taken the store. This run uploads
nothing more."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame on every connection."""

    version: Natural
    job_uid: JobUid
    rank: Rank | None = None
    """None from a launcher."""
    round: RestartRound | None = None
    """From a rank: its round. From a launcher: the round whose ranks run now, None if none run."""
    last_round: RestartRound | None = None
    """From a launcher: the newest round that it has forked ranks for. It never runs a round twice."""


@dataclass(frozen=True, slots=True)
class HelloReply:
    round: RestartRound
    policy: Policy | None = None
    """None until the sidecar has received a ROUND message."""
    node_bytes: Natural = 0
    """Bytes of the node volume for each rank of the pod: its shards, and its part of the copies that this pod
    keeps for others. 0: not known."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Rank -> sidecar: ask which checkpoint this rank restores in this round."""

    round: RestartRound
    rank: Rank
    with_layouts: bool = False
    """Also return `home` and `layouts`, for a rank whose layout has changed. The sidecar always returns them
    where another number of ranks saved the checkpoint."""


@dataclass(frozen=True, slots=True)
class RestoreReply:
    restore_point: RestorePoint
    payload_bytes: Natural = 0
    """Payload of this rank's shard. The rank offers slots of at least this capacity in Fill. 0 where
    another number of ranks saved the checkpoint: then the rank plans its own payload."""
    world_size: Natural = 0
    """Number of ranks that saved the checkpoint. 0 means that it is not given, and the rank takes its
    shard as it was saved."""
    rank_layout: Digest | None = None
    """Layout of this rank's shard, in <shared_dir>/layouts/<hex>.json. Set where the same number of ranks
    saved the checkpoint."""
    home: Digest | None = None
    """Layout of the old rank whose objects this rank takes, in the same directory."""
    layouts: Annotated[dict[Digest, Natural], PerRank] = field(default_factory=dict)
    """For each group of ranks that saved tensors of the same names, dtypes and global shapes, the layout of
    one of them, in the same directory, and their number. Empty if they were not asked for."""
    passed_over: Many[Text] = ()
    """Why newer checkpoints were not chosen: a line for each, with the path of the bad file."""


@dataclass(frozen=True, slots=True)
class Fill:
    """Rank -> sidecar: write this rank's shard of the restore point into one of these slots.

    If a slot still holds exactly those bytes, the sidecar names it without writing (tier memory).
    Otherwise it writes the payload with pwrite. The rank has prefaulted the file, so its memory stays
    charged to the trainer container.
    """

    round: RestartRound
    rank: Rank
    slots: Many[Text]
    """Names of slot files below <shared_dir>/slots that the rank has allocated, prefaulted and mapped."""
    layout: Digest | None = None
    """None asks for the shard as it was saved. Otherwise the layout of the payload that this rank needs, in
    <shared_dir>/layouts/<hex>.json. The sidecar assembles it from the shards of any old ranks."""
    reads_files: bool = False
    """The rank reads the shard's file itself: the reply is ShardFile, and no slot is written. It may be
    refused, and the rank then asks for a filled slot."""


@dataclass(frozen=True, slots=True)
class Filled:
    slot: Text
    payload_bytes: Natural
    tier: TierName
    """The tier that the bytes come from."""


@dataclass(frozen=True, slots=True)
class ShardFile:
    """Reply to a Fill with `reads_files`: the file of the shard.

    Its bytes are not verified yet. A rank that finds it missing or corrupt asks again, for a filled
    slot.
    """

    path: Text
    """Path of the file. With `is_attached` it is a name for messages only."""
    shard: ShardRef
    tier: TierName
    """The tier of the file."""
    slot: Text | None = None
    """A slot whose header names the same shard. The rank must verify its bytes with the chunk table of the
    file."""
    is_attached: bool = False
    """The frame carries a descriptor of the file, open for reading (SCM_RIGHTS): in a pod, the rank cannot
    open the files of its sidecar."""


@dataclass(frozen=True, slots=True)
class TakeStore:
    """Rank 0 -> persister of a folder with an object store: this run is about to save (ADR 0024).

    The reply is sent when the store is this run's, or does not answer. It is refused if the store cannot be
    used, or another run or training uses it.
    """

    round: RestartRound


@dataclass(frozen=True, slots=True)
class Stage:
    """Rank -> sidecar: hand over a slot in state FULL.

    After the reply the rank continues; the slot stays in use until the shard is written.
    """

    round: RestartRound
    step: Step
    rank: Rank
    slot: Text
    payload_bytes: Natural
    layout: Digest
    """BLAKE3 of the rank's layout, whose document is <shared_dir>/layouts/<hex>.json."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Part of LauncherState and Run: the TCPStore of this round listens on `port`.

    Reply of GET /v1/rendezvous?round=R&timeout=S on the store host's sidecar: where it listens.
    """

    round: RestartRound
    port: Natural
    """0 after a time-out."""
    secret: Text = field(repr=False)
    """Secret of this round, made by the launcher that hosts the store. Ranks sign their entries with it,
    because the store itself has no authentication. It is sent only inside TLS and the pod's socket, and
    passed to processes only in their environment."""
    host: Text = ""
    """"" from the launcher."""


@dataclass(frozen=True, slots=True)
class Run:
    """Push to the launcher: the restore barrier is open. Fork the ranks of this round."""

    round: RestartRound
    restore_point: RestorePoint
    world_size: Natural
    group_rank: Worker
    store: StoreAddress
    policy: Policy
    rolled_back_from: Step | None = None
    """Step that the gang had reached before a person rolled it back, if the round starts below it."""


@dataclass(frozen=True, slots=True)
class LauncherPlan:
    """Push to the launcher: all that it is to do. A repetition changes nothing."""

    round: RestartRound
    """The launcher ends the ranks and the TCPStore of older rounds, by SIGKILL."""
    hosts_store: bool = False
    """It runs the TCPStore of this round on any free port."""
    run: Run | None = None
    """The restore barrier is open: it forks the ranks, unless it has forked those of this round before."""
    stacks_token: Text = ""
    """The gang finishes no step: it finds out where each rank is, once for each token. "": it does not."""
    released: bool = False
    """It exits with code 0 if it has `finished`: the gang's last step has reached each level that it is meant
    to reach, and the operator has recorded this."""


@dataclass(frozen=True, slots=True)
class LauncherState:
    """Launcher -> sidecar, no reply: all that the launcher has to report. Sent when something has changed."""

    round: RestartRound | None = None
    """The round whose ranks run, or have ended by themselves. None if there are none."""
    ended_below: RestartRound | None = None
    """No rank of a round older than this one is running."""
    returned: Annotated[tuple[Rank, ...], PerRank] = ()
    """Ranks of `round` that have exited with code 0."""
    dead: Annotated[tuple[DeadRank, ...], PerRank] = ()
    """Ranks of `round` that have ended in another way."""
    store: StoreAddress | None = None
    stacks_token: Text = ""
    """`LauncherPlan.stacks_token` that `stacks` is the reply to."""
    stacks: Annotated[tuple[RankStack, ...], PerRank] = ()
    """Where the ranks of `round` are. The launcher's log has whole stacks."""
    finished: bool = False
    """All ranks of `round` have returned 0, and the pod is not about to end. The launcher waits until it is
    `released`."""
