"""The state of one worker, which its sidecar reports to the coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from holdfast_core.ids import (
    Digest,
    Rank,
    RestartRound,
    Step,
    TierName,
    Worker,
)
from holdfast_core.messages.bounds import (
    Clipped,
    ClippedText,
    ExitCode,
    Many,
    Natural,
    PerRank,
    Seconds,
    ShortText,
    Text,
)
from holdfast_core.messages.common import (
    Failure,
    Interval,
    MemoryUse,
    RankStack,
    RankWork,
)


@dataclass(frozen=True, slots=True)
class DeadRank(Clipped):
    rank: Rank
    worker: Worker
    code: ExitCode
    message: ClippedText = ""
    out_of_memory: MemoryUse | None = None
    """None: memory did not run out, or its launcher ended with it."""


@dataclass(frozen=True, slots=True)
class RankSaves:
    """Outcome of one rank's saves in this round.

    A step up to `newest` that is not in `under_way` was skipped or could not be written, unless the
    coordinator has received PREPARED for it.
    """

    rank: Rank
    newest: Step
    """The newest step that the rank has staged."""
    under_way: Many[Step] = ()
    """Staged steps that have not failed and that the coordinator has no PREPARED for yet."""
    waiting: Many[Step] = ()
    """Those of them that wait in slots. Only the coordinator's choice, or a seal, has them written."""
    writes: bool = False
    """Whether a slot of the rank is being written now."""


@dataclass(frozen=True, slots=True)
class RankProgress(Clipped):
    """Newest finished step of one rank."""

    rank: Rank
    step: Step
    blocked_seconds: Seconds = 0.0
    """Seconds for which saves blocked training in this round."""
    finished: Natural = 0
    """See Progress."""
    step_seconds: Seconds | None = None
    """See Progress."""
    paused: ShortText = ""
    """See Progress."""
    work: RankWork | None = None
    """See Progress."""


@dataclass(frozen=True, slots=True)
class AcceptedRound:
    """The ROUND message that a sidecar has accepted."""

    version: Natural
    content: Digest
    """`Round.content_digest()`."""


@dataclass(frozen=True, slots=True)
class WorkerReport(Clipped):
    """POST /v1/report, sidecar -> coordinator; reply Ok. This worker's part of CoordinatorState.

    The sidecar sends it immediately when its urgent part or what waits in its slots changes. Otherwise it
    sends it at most twice a second, less often in a large gang, and every few seconds without a change.
    """

    round: RestartRound
    worker: Worker
    progress: Annotated[tuple[RankProgress, ...], PerRank] = ()
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
    saves_skipped: Natural = 0
    saves: Annotated[tuple[RankSaves, ...], PerRank] = ()
    reported_to: Text = ""
    """`Ok.instance` of the coordinator that has received all of this worker's messages, except those about
    the steps that `saves` lists as under way."""
    instance: Text = ""
    """Identifies the sender's process. When it changes, the coordinator sends all of its messages again."""
    interval: Interval | None = None
    """The interval between saves as rank 0 has reported it, if it is given as a time and rank 0 is here."""
    stacks_token: Text = ""
    """`Ok.stacks_token` that `stacks` is the reply to. "": there was none in this round."""
    stacks: Annotated[tuple[RankStack, ...], PerRank] = ()
    accepted: AcceptedRound | None = None
    restored_from: Annotated[tuple[TierName, ...], PerRank] = ()
    """The farthest tier from which the state of each own rank was read. Empty before all shards are here."""

    @property
    def waiting(self) -> tuple[RankSaves, ...]:
        """The saves of the ranks that have steps waiting in slots, which they need for further saves."""
        return tuple(saves for saves in self.saves if saves.waiting)

    @property
    def urgent(self) -> tuple[object, ...]:
        """The part of the report whose changes are sent, and shown to the operator, without delay."""
        return (
            self.dead,
            self.failures,
            self.rehydrate_seconds,
            self.barrier_open,
            self.cannot_restore,
            self.restore_may_succeed,
            self.done,
            self.idle and self.done,
            self.ends,
            self.leaves,
            bool(self.progress),
            self.stacks_token,
        )


@dataclass(frozen=True, slots=True)
class Ok:
    round: RestartRound
    instance: Text = ""
    """Identifies the coordinator's instance, in the reply to WorkerReport. When it changes, the member sends
    its PREPARED, REPLICATED and UPLOADED messages again, because the new instance has not received them."""
    stacks_token: Text = ""
    """In the reply to WorkerReport: the coordinator requests the stacks of all ranks, because the gang
    finishes no step. It identifies the request. "": there is none."""
    waits_for_store: bool = False
    """In the reply to WorkerReport: no pod may end before the newest step is in the object store, because no
    pod that stays receives copies of the shards of a pod that ends."""
