"""Parts that messages of several transports carry, and the refusals that errors become, and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from holdfast_core.errors import (
    AlreadyExistsError,
    CorruptionError,
    FormatError,
    NotFoundError,
    Refusal,
    RefusedError,
    StaleRoundError,
    StateMismatchError,
)
from holdfast_core.ids import (
    CheckpointId,
    Digest,
    JobUid,
    Level,
    Natural,
    Rank,
    RestartRound,
    Step,
    TierName,
    Worker,
)
from holdfast_core.messages.codec import (
    Clipped,
    ClippedText,
    ExitCode,
    Factor,
    Reason,
    Reported,
    Seconds,
    ShortText,
    Text,
)


@dataclass(frozen=True, slots=True)
class Refused(Clipped):
    """Body of every refusal (an HTTP error reply, or a socket frame of type `Refused`)."""

    code: Refusal
    message: ClippedText
    round: RestartRound
    """The receiver's round."""
    version: Natural = 0
    """Version of the ROUND message that the receiver holds. 0 if it holds none."""


@dataclass(frozen=True, slots=True)
class Timing:
    """An interval between saves that is given as a time and follows from measured durations."""

    seconds: Seconds | None
    """Seconds between saves. None: they follow from the cost of a save and from `mtbf_seconds`."""
    mtbf_seconds: Seconds
    """Expected mean time between failures."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The interval between saves, and what it follows from.

    All ranks save at `steps`, which rank 0 has chosen. The durations are those that this rank has measured.
    """

    steps: Natural
    """Optimizer steps between saves. 0: saves only on request, or not known yet."""
    seconds: Seconds | None = None
    """Seconds between saves. None if the interval is a number of steps."""
    step_seconds: Seconds | None = None
    """Mean duration of a step without saves. None: not measured yet, or not needed."""
    save_seconds: Seconds | None = None
    """Time for which a save blocks training. None: not measured yet, or not needed."""
    mtbf_seconds: Seconds | None = None
    """Expected mean time between failures. None if the interval does not follow from it."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The checkpoint settings of the job's spec.

    ROUND carries them to the sidecars, which send them to launcher and ranks.
    """

    interval_steps: Natural
    """Optimizer steps between saves. 0 with `timing`, and where ranks save only on request."""
    slots: Natural = 2
    keep_last: Natural = 3
    peer_copies: Natural = 1
    peer_encryption: Text = "TLS"
    """"TLS", or "None" on a trusted network (the handshake is still mutual). Other values mean "TLS"."""
    object_every_steps: Natural | None = None
    """Steps between two uploads."""
    object_every_seconds: Natural | None = None
    """Seconds between two uploads. If both are None, the job has no object tier."""
    object_compression: Text = "None"
    """"Zstd" compresses uploads. Every other value means "None"."""
    timing: Timing | None = None
    """The interval between saves as a time. None: it is `interval_steps`."""
    hang_steps: Natural = 0
    """The gang counts as hung after this many median step times without a step, but not within a minute.
    0: not by this rule."""
    hang_seconds: Seconds = 0.0
    """The gang counts as hung after this time without a step, instead of `hang_steps`. 0: not by this
    rule."""
    hang_factor: Factor = 1.0
    """Multiplies the limits of the search for hangs, except while every rank waits for others or is
    stopped. It is above 1 after hangs at the same step."""
    straggler_factor: Factor = 0.0
    """A rank that takes this many times as long as the median for the same work is slow. 0: there are no
    stragglers."""
    straggler_steps: Natural = 0
    """Steps for which a rank must be slow before it is a straggler."""
    shrinks: bool = False
    """The gang may continue with fewer workers. These can restore from the object store only, so a pod does
    not leave before the step at which the gang has stopped is persisted, even if peers have copies."""

    @property
    def has_object_tier(self) -> bool:
        """Return whether steps are uploaded to an object store."""
        return self.object_every_steps is not None or self.object_every_seconds is not None

    @property
    def keeps_newest(self) -> bool:
        """Return whether a step that is staged during an earlier one's write waits in its slot.

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
class RankWork:
    """What a step takes a rank by itself, without the time in which it waits for other ranks.

    Both times are medians of the last steps.
    """

    input_seconds: Seconds
    """From the end of the step before to the first forward pass: the batch and its preparation."""
    forward_seconds: Seconds
    """The forward passes. On a GPU, the GPU's time."""
    parameters: Natural
    """Number of parameters of the rank's model. Only ranks with the same number have the same work."""


@dataclass(frozen=True, slots=True)
class Progress(Clipped):
    """Rank -> sidecar, no reply: the newest finished step of a rank, and what its saves have cost so far.

    The rank sends it again when a cost has changed, and after a reconnect. WorkerReport has the newest one of
    each rank.
    """

    round: RestartRound
    rank: Rank
    step: Step
    metrics: Reported = field(default_factory=dict)
    blocked_seconds: Seconds = 0.0
    """Seconds for which saves blocked training in this round."""
    saves_skipped: Natural = 0
    """Saves that this rank skipped in this round because no slot was free."""
    interval: Interval | None = None
    """The interval between saves, if it is given as a time."""
    finished: Natural = 0
    """Number of steps that this process has finished. Steps that it repeats after a rollback count again."""
    step_seconds: Seconds | None = None
    """Median time of its last steps without pauses. None until it has finished a few."""
    paused: ShortText = ""
    """What keeps the rank from finishing steps for now, such as an evaluation. "": it trains."""
    work: RankWork | None = None
    """None: it was not measured, or not often enough yet."""


@dataclass(frozen=True, slots=True)
class RankStack(Clipped):
    """What one rank does while its gang finishes no step, as its launcher found it."""

    rank: Rank
    stack: ShortText
    """The innermost frames of its main thread, or why they could not be read."""
    is_known: bool
    """Whether `stack` has frames."""
    waits: bool = False
    """The main thread waits in torch for other ranks."""
    moves: bool = False
    """The rank is at work: within a few seconds its main thread was in different places, or its process or a
    child used a processor, read or wrote."""
    stopped: bool = False
    """The process is stopped, by a signal or a debugger."""


@dataclass(frozen=True, slots=True)
class DeadRank(Clipped):
    """A rank process that ended without a request to do so, and not with code 0."""

    rank: Rank
    worker: Worker
    code: ExitCode
    """Exit code, or -N for signal N."""
    message: ClippedText = ""
    """The end of the traceback, at most 2 KiB."""
    out_of_memory: Text = ""
    """Memory limit and peak of the container, if the kernel ended one of its processes in this round because
    memory ran out. "" as well if the launcher ended with it."""


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """Checkpoint that a round starts from. `step` None means that there is nothing to restore."""

    step: Step | None = None
    round: RestartRound | None = None
    """The round that saved the checkpoint, not the one that restores it."""
    manifest: Digest | None = None
    job_uid: JobUid | None = None
    """Uid of the job that owns the checkpoint, where it is another job (spec.restoreFrom)."""
    job_namespace: Text | None = None
    """Namespace of that other job in the object keys. None means this job's namespace."""

    @property
    def own_checkpoint(self) -> CheckpointId | None:
        """Return the checkpoint's id. None if there is nothing to restore or another job owns it."""
        if self.step is None or self.round is None or self.job_uid is not None:
            return None
        return CheckpointId(self.step, self.round)


@dataclass(frozen=True, slots=True)
class StepOutcome(Clipped):
    """The step has reached `level`, or will not. Part of Plan, and push to the rank that staged the step."""

    step: Step
    round: RestartRound
    level: Level
    reason: Text = ""
    """Why it will not. "": it has."""
    message: ClippedText = ""

    @property
    def failed(self) -> bool:
        return self.reason != ""


CHECKPOINT_MISSING: Final = "CheckpointMissing"
"""Reason of the failure that the object store does not have the newest persisted checkpoint."""


@dataclass(frozen=True, slots=True)
class Failure(Clipped):
    """A save that did not reach a level, or a tier that does not work, with a message for people."""

    step: Step | None
    tier: TierName
    reason: Reason
    """For example NodeVolumeFull, StoreUnavailable, AccessDenied, PeerUnreachable."""
    message: ClippedText
    worker: Worker | None = None
    """The worker whose sidecar reported it, set by the coordinator. None means the whole gang."""


def refusal_of(error: BaseException) -> Refusal:
    """Return the refusal code of an error. BUSY, after which the caller retries, stands for all others."""
    match error:
        case StaleRoundError():
            return Refusal.STALE_ROUND
        case RefusedError():
            return error.code
        case NotFoundError():
            return Refusal.NOT_FOUND
        case CorruptionError() | AlreadyExistsError():
            return Refusal.CONFLICT
        case FormatError() | StateMismatchError():
            return Refusal.BAD_REQUEST
    return Refusal.BUSY


def raise_refused(refused: Refused | None) -> None:
    """Raise the error that the code of a refusal stands for. Do nothing without a refusal.

    Raises:
        StaleRoundError: For STALE_ROUND.
        NotFoundError: For NOT_FOUND.
        RefusedError: For all other codes.
    """
    match refused:
        case None:
            return
        case Refused(Refusal.STALE_ROUND, message, round_, version):
            raise StaleRoundError(message, own_round=round_, own_version=version)
        case Refused(Refusal.NOT_FOUND, message):
            raise NotFoundError(message)
        case _:
            raise RefusedError(refused.code, refused.message)
