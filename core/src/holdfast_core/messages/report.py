"""The state of one worker, which its sidecar reports to the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from holdfast_core.format.rank_layout import LayoutDigests
from holdfast_core.ids import (
    CheckpointId,
    Digest,
    Natural,
    Rank,
    RestartRound,
    ShardInfo,
    Step,
    TierName,
    Worker,
)
from holdfast_core.messages.codec import (
    MAX_LISTED,
    MAX_REPORTED,
    MAX_VALUED_STEPS,
    Clipped,
    ClippedText,
    Many,
    PerRank,
    PerWorker,
    Reported,
    Seconds,
    Text,
)
from holdfast_core.messages.common import DeadRank, Failure, Progress, RankStack
from holdfast_core.messages.gang import StoredAs


@dataclass(frozen=True, slots=True)
class RankSaves:
    """Outcome of one rank's saves in this round.

    A step up to `newest` that is not in `under_way` was skipped or could not be written, unless the shard is
    among `WorkerReport.shards`, or was when an earlier report was sent.
    """

    rank: Rank
    newest: Step
    """The newest step that the rank has staged."""
    under_way: Many[Step] = ()
    """Staged steps that have not failed and whose shards the report does not list yet."""
    waiting: Many[Step] = ()
    """Those of them that wait in slots. Only the coordinator's choice, or a seal, has them written."""
    writes: bool = False
    """Whether a slot of the rank is being written now."""


@dataclass(frozen=True, slots=True)
class ReportedShard:
    """A shard that is durable on its rank's node tier, and what was done with it since.

    Of older rounds, a report lists only uploaded shards, which are of the restore point.
    """

    step: Step
    round: RestartRound
    shard: ShardInfo
    layout: LayoutDigests | None
    """None if the coordinator has received it, and for a shard of an older round: the manifest of its step
    exists."""
    committed: bool = False
    """The manifest of its step is durable on the worker's node."""
    replicated: bool = False
    """All assigned peers have a durable copy. Always false without copies."""
    uploaded: StoredAs | None = None
    """How the object store holds the shard, verified. None: it does not yet."""


@dataclass(frozen=True, slots=True)
class AcceptedRound:
    """The ROUND message that a sidecar has accepted."""

    version: Natural
    content: Digest
    """`Round.content_digest()`."""


@dataclass(frozen=True, slots=True)
class WorkerReport(Clipped):
    """Part of WorkerReports. This worker's part of CoordinatorState.

    It always has all that the coordinator lacks, so a lost report needs no repetition, and a coordinator that
    has just started needs one report of each worker. The sidecar sends it immediately when its urgent part,
    its shards or what waits in its slots changes. Otherwise it sends it at most twice a second, less often in
    a large gang, and every few seconds without a change.
    """

    round: RestartRound
    worker: Worker
    progress: Annotated[tuple[Progress, ...], PerRank] = ()
    """Without `metrics`, and the interval between saves of rank 0 only."""
    dead: Annotated[tuple[DeadRank, ...], PerRank] = ()
    failures: Many[Failure] = ()
    rehydrate_seconds: Seconds | None = None
    barrier_open: bool = False
    cannot_restore: ClippedText = ""
    restore_may_succeed: bool = False
    """Whether a place that may have what `cannot_restore` lacks is silent or busy."""
    done: bool = False
    """All ranks of the pod returned 0."""
    idle: bool = False
    """This worker has no save left to write, copy or upload."""
    ends: bool = False
    """The pod is ending. Copies that it has of other workers' shards are lost with it."""
    leaves: bool = False
    """The pod is ending, and its ranks have stopped. Unless a pod that stays has copies of its shards, the
    gang's newest step is lost with it, or is persisted before."""
    saves: Annotated[tuple[RankSaves, ...], PerRank] = ()
    shards: Annotated[tuple[ReportedShard, ...], Meta(max_length=MAX_REPORTED)] = ()
    """The shards of the worker's ranks. If there are too many, the oldest are missing."""
    lost: Many[Step] = ()
    """Steps of this round whose manifest names a shard that the worker reported once and lacks now."""
    has_all_shards: bool = True
    """If not, `shards` lacks those that this coordinator has received as they are. See `Ok.wants_shards`."""
    manifests: Annotated[tuple[CheckpointId, ...], Meta(max_length=MAX_LISTED)] = ()
    """With `has_all_shards`, the newest checkpoints of the job whose manifest is on the worker's node. Where
    another node has lost its shard, nothing else says that a step is committed."""
    step_metrics: Annotated[dict[Step, Reported], Meta(max_length=MAX_VALUED_STEPS)] = field(
        default_factory=dict
    )
    """The newest saves of rank 0 for which its script had reported metrics, if rank 0 is here. Older ones are
    known only to a coordinator that has received them before."""
    stacks_token: Text = ""
    """`Ok.stacks_token` that `stacks` is the reply to. "": there was none in this round."""
    stacks: Annotated[tuple[RankStack, ...], PerRank] = ()
    accepted: AcceptedRound | None = None
    restored_from: Annotated[tuple[TierName, ...], PerRank] = ()
    """The farthest tier from which the state of each own rank was read. Empty before all shards are here."""


@dataclass(frozen=True, slots=True)
class WorkerReports:
    """POST /v1/report, sidecar -> coordinator; reply Ok.

    A worker sends its own report, and a relay those of its group that have arrived since its last request.
    """

    round: RestartRound
    reports: Annotated[tuple[WorkerReport, ...], PerWorker]


@dataclass(frozen=True, slots=True)
class Ok:
    """Reply to a request that asks for nothing but its fulfilment, on the socket as well: it is fulfilled.

    The other fields are for WorkerReports. Each worker takes what is about it.
    """

    round: RestartRound
    wants_shards: Annotated[tuple[Worker, ...], PerWorker] = ()
    """Workers whose reports lack shards, and of which the coordinator has never received all. Their next
    reports have all."""
    refused: Annotated[tuple[Failure, ...], PerWorker] = ()
    """The first shard of each report that the coordinator does not accept, by its step. It accepts the
    others. The reason is Conflict if the rank reported another digest for the step, and BadRequest if the
    step is not above the restore point."""
    stacks_token: Text = ""
    """The coordinator requests the stacks of all ranks, because the gang finishes no step. It identifies the
    request. "": there is none."""
    waits_for_store: bool = False
    """No pod may end before the newest step is in the object store, because no pod that stays receives copies
    of the shards of a pod that ends."""
