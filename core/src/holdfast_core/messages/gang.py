"""Messages between the sidecars of a gang over HTTPS, above all to and from the coordinator.

The paths and statuses are those of `messages.operator`. ReadObject and ReadReply travel on the bulk port.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from holdfast_core.ids import ByteRange, CheckpointId, Digest, Natural, RestartRound, ShardRef, Step
from holdfast_core.messages.codec import Many, Text
from holdfast_core.messages.common import Refused, RestorePoint, StepOutcome

MAX_KEY = 512
"""Largest length of the key of an object, in characters."""


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """POST /v1/copy, sidecar -> assigned target: this shard is durable here; copy it to your node tier.

    The sender repeats the message until the reply says that the copy is durable.
    """

    round: RestartRound
    shard: ShardRef
    layout: Digest | None = None
    """The shard's layout, which is to be durable on the receiver before the copy. The receiver fetches it
    with GET /v1/layout from the sender, unless it has it. None: the receiver has it, or it is lost."""


@dataclass(frozen=True, slots=True)
class CopyReply:
    durable: bool
    """The receiver has a verified, durable copy. Where it is False, the receiver is still copying."""
    pieces: Natural = 0
    """Pieces that the receiver has copied so far. While the copy waits for others to end, the pieces of all
    copies of the receiver. The sender gives up a copy whose number stays the same."""
    received_bytes: Natural = 0
    """Bytes that the receiver read from the sender for this copy."""


@dataclass(frozen=True, slots=True)
class ReadObject:
    """Request on the bulk port: send a range of an object, or only its length if no range is given."""

    key: Annotated[str, Meta(max_length=MAX_KEY)]
    """`format.keys.node_key` of a shard."""
    range: ByteRange | None = None
    plain: bool = False
    """The caller allows the bytes outside TLS."""
    background: bool = False
    """No rank waits for the bytes, so the sender applies its limit on background transfers."""


@dataclass(frozen=True, slots=True)
class ReadReply:
    """Reply to ReadObject. The bytes of the range follow it, unless it is a refusal."""

    length_bytes: Natural = 0
    """Length of the range, or of the object if no range was requested."""
    plain: bool = False
    """Both sides leave TLS now, and the bytes follow outside TLS."""
    refused: Refused | None = None


@dataclass(frozen=True, slots=True)
class StoredAs:
    """How the object store holds a shard. Without references: self-contained."""

    base: CheckpointId | None = None
    """The checkpoint that `references` depend on: while its manifest exists, their objects exist. None where
    there are no references."""
    references: Many[tuple[CheckpointId, Natural]] = ()
    """Earlier checkpoints that store chunks of this shard, with the payload bytes that each stores."""


@dataclass(frozen=True, slots=True)
class PersistRequest:
    """Part of Plan: upload the worker's shards of this committed step."""

    checkpoint: CheckpointId
    base: RestorePoint | None = None
    """The newest persisted checkpoint. Chunks that have not changed since then need no upload."""
    older: Many[CheckpointId] = ()
    """Checkpoints before `base` that the upload may refer to, too."""
    whole: bool = False
    """Store each shard as one uncompressed object without references, because the objects that an earlier
    attempt referred to are gone."""
    compress: bool = False
    """Compress the uploaded data. Without effect where `whole` is set."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Reply of GET /v1/plan: what the workers are to do, and the levels of their steps.

    It is always the whole plan, and the same for all workers. A sidecar that receives it again changes
    nothing.

    Push to rank 0: all that was requested of the gang in this round, which are `save_from` and `stop`.
    """

    round: RestartRound
    coordinator: Text = ""
    """Identifies the process that has made the plan. "": there is no plan yet."""
    version: Natural = 0
    """Grows with each change in that process."""
    levels: Many[StepOutcome] = ()
    """The ranks that wait for these levels are notified."""
    write: Step | None = None
    """The step that every rank whose slot holds it writes to its node tier next."""
    upload: PersistRequest | None = None
    manifests: Many[tuple[CheckpointId, Digest]] = ()
    """Manifests of steps that are not local yet. The worker stores those that it lacks. It gets them with
    GET /v1/manifest from the coordinator, or from its relay."""
    drop: Many[Step] = ()
    """Steps, of any round, that may be deleted from the node tier, copies for peers included. Their slots are
    freed, also those of saves that come later."""
    save_from: Step | None = None
    """A save of this step or of a later one was requested: all ranks save at the next one that they can agree
    on. None: no save was requested in this round."""
    stop: bool = False
    """The gang was requested to save and stop."""
    released: bool = False
    """The launcher may exit, if all ranks of the pod have returned 0 (`LauncherPlan.released`)."""
