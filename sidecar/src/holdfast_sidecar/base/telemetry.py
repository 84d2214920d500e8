"""What the sidecar reports of its work: metrics for Prometheus, and failures that persist.

Each failure is kept until it is healthy again, reported to the coordinator, and logged once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from holdfast_core import logs
from holdfast_core.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CapacityError,
    CorruptionError,
    HoldfastError,
    NotFoundError,
    RefusedError,
)
from holdfast_core.ids import Level, Rank, Step, TierName
from holdfast_core.messages.common import Interval
from holdfast_core.messages.schema import Failure, Refusal, Stage, StepOutcome

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


@dataclass(frozen=True, slots=True)
class RankGauges:
    """Values of the gauges of one rank of this pod."""

    rank: Rank
    step: Step | None = None
    """Newest finished step."""
    reported: Mapping[str, float] = field(default_factory=dict)
    """What the script has reported."""
    newest: Mapping[TierName, Step] = field(default_factory=dict)
    """Newest step in each tier that has one."""
    restored_from: TierName | None = None
    """The tier that the rank's shard was restored from in this round."""


class Metrics:
    """The metrics of one sidecar, in a registry of their own.

    The help text of each metric is the definition of what its method counts.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._stall = Counter(
            "holdfast_checkpoint_stall_seconds",
            "Time for which saves blocked the trainers of this pod",
            registry=self._registry,
        )
        self._durable = Histogram(
            "holdfast_checkpoint_durable_seconds",
            "From the hand-off of a shard until it is durable in the tier",
            ["tier"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._bytes = Counter(
            "holdfast_checkpoint_bytes",
            "Payload bytes written to the tier",
            ["tier"],
            registry=self._registry,
        )
        self._sent = Counter(
            "holdfast_sent_bytes",
            (
                "Bytes of shards that this pod sent to the tier. Chunks that the tier already had are "
                "not sent, so this can be less than the bytes written"
            ),
            ["tier"],
            registry=self._registry,
        )
        self._compression_input = Counter(
            "holdfast_compression_input_bytes",
            "Payload bytes, before compression, of objects that were compressed for the tier",
            ["tier"],
            registry=self._registry,
        )
        self._compression_output = Counter(
            "holdfast_compression_output_bytes",
            (
                "Bytes stored in the tier after compression of those that "
                "holdfast_compression_input_bytes counts"
            ),
            ["tier"],
            registry=self._registry,
        )
        self._fetched = Counter(
            "holdfast_fetched_bytes",
            (
                "Bytes of shards that restores of this pod read from the tier: verified payload that "
                "was used, and chunk tables. Bytes from a source that failed do not count"
            ),
            ["tier"],
            registry=self._registry,
        )
        self._rehydrate = Histogram(
            "holdfast_rehydrate_seconds",
            "Time that this pod took to bring its shards of the restore point to its node",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._corruptions = Counter(
            "holdfast_corruptions_detected",
            "Copies that did not match their digest and were quarantined or refused",
            ["tier"],
            registry=self._registry,
        )
        self._scrubbed = Counter(
            "holdfast_scrubbed_bytes",
            "Bytes on the node tier that the scrub read again to find damaged copies",
            registry=self._registry,
        )
        self._skipped = Counter(
            "holdfast_saves_skipped",
            "Saves that ranks skipped because no slot was free",
            registry=self._registry,
        )
        self._failed = Counter(
            "holdfast_saves_failed",
            "Shards of this pod that could not be written to the node tier",
            ["reason"],
            registry=self._registry,
        )
        self._unexpected = Counter(
            "holdfast_unexpected_errors",
            "Unexpected exceptions. In a background task or thread they end the sidecar",
            ["kind"],
            registry=self._registry,
        )
        self._dropped = Counter(
            "holdfast_steps_dropped",
            (
                "Steps in the shared memory of this pod that newer steps replaced before they were "
                "written to the node tier"
            ),
            registry=self._registry,
        )
        self._queue = Gauge(
            "holdfast_shards_pending",
            "Shards of this pod that still have to be reported, copied or uploaded",
            registry=self._registry,
        )
        self._round = Gauge(
            "holdfast_restart_round", "Restart round of this sidecar", registry=self._registry
        )
        self._step = self._gauge("holdfast_step", "Step that the rank finished last", "rank")
        self._trained_round = Gauge(
            "holdfast_trained_round",
            "Newest restart round in which a rank of this pod has finished a step",
            registry=self._registry,
        )
        self._reported = self._gauge(
            "holdfast_reported",
            "Last value that the script reported with Checkpointer.report",
            "rank",
            "name",
        )
        self._newest = self._gauge(
            "holdfast_newest_step", "Newest step of the rank in the tier", "rank", "tier"
        )
        self._restored = self._gauge(
            "holdfast_restored_from",
            "1 for the tier that served the rank's shard in this round",
            "rank",
            "tier",
        )
        self._committed = self._gauge(
            "holdfast_committed_step",
            "Newest step at the level, according to the coordinator",
            "level",
        )
        self._overdue = Gauge(
            "holdfast_commit_overdue_seconds",
            (
                "Time since the last commit if training continues and commits are overdue, else 0. "
                "Only the coordinator sets it"
            ),
            registry=self._registry,
        )
        self._overtaken = self._gauge(
            "holdfast_steps_overtaken",
            "Steps that newer steps replaced before nodes had written or peers had copied them, since this "
            "coordinator started. Only the coordinator sets it",
        )
        self._straggler = self._gauge(
            "holdfast_straggler_factor",
            "How many times as long a straggler takes for its part of a step as the median of the ranks "
            "with the same work. A job has at most 16 such series, and none without a straggler. Only the "
            "coordinator sets it",
            "rank",
        )
        self._interval_steps = self._gauge(
            "holdfast_save_interval_steps",
            "Optimizer steps between saves, if the interval is a time; 0 before some steps were measured. "
            "Only the coordinator sets it",
        )
        self._interval_seconds = self._gauge(
            "holdfast_save_interval_seconds",
            "Seconds between saves (part interval), if the interval is a time, and what they follow from: "
            "the mean duration of a step without saves (step) and, with auto, the time for which a save "
            "blocks training (save) and the expected mean time between failures (mtbf). Only the "
            "coordinator sets it",
            "part",
        )
        self._limit = Gauge(
            "holdfast_background_limit_bytes_per_second",
            "Rate limit of saves, so that they do not slow down steps; 0: no limit",
            registry=self._registry,
        )
        self._waited_for_copies = Counter(
            "holdfast_foreground_wait_seconds",
            (
                "Time for which transfers waited while a rank of this pod copied a step, summed over "
                "all threads"
            ),
            registry=self._registry,
        )
        self._free = Gauge(
            "holdfast_node_free_bytes",
            "Bytes that may still be written to the node volume",
            registry=self._registry,
        )

        self._connections = Counter(
            "holdfast_connections_dropped",
            (
                "Connections that this sidecar closed early: too many connections, no handshake or "
                "message in time, or no file descriptor"
            ),
            ("port", "reason"),
            registry=self._registry,
        )
        self._buffers = self._gauge("holdfast_buffer_bytes", "Memory of the buffers for payloads")
        self._buffer_limit = self._gauge(
            "holdfast_buffer_limit_bytes",
            ("Buffer bytes from which on this sidecar refuses copies"),
        )

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(name, help_text, labels, registry=self._registry)

    def gang(self, ranks: Iterable[RankGauges]) -> None:
        """Set the gauges of this pod's ranks. Series without a value are removed."""
        self._reported.clear()  # else a script that reports ever new names would fill the memory
        self._newest.clear()
        self._restored.clear()
        for found in ranks:
            if found.step is not None:
                self._step.labels(found.rank).set(found.step)
            for name, value in found.reported.items():
                self._reported.labels(found.rank, name).set(value)
            for tier, step in found.newest.items():
                self._newest.labels(found.rank, tier.value).set(step)
            if found.restored_from is not None:
                self._restored.labels(found.rank, found.restored_from.value).set(1)

    def committed(self, levels: Mapping[Level, Step | None]) -> None:
        for level, step in levels.items():
            if step is not None:
                self._committed.labels(level.value).set(step)

    def overdue(self, seconds: float) -> None:
        self._overdue.set(seconds)

    def overtaken(self, steps: int) -> None:
        self._overtaken.set(steps)

    def stragglers(self, factors: Mapping[Rank, float]) -> None:
        """Set the series of the present stragglers, and remove all others."""
        self._straggler.clear()
        for rank, factor in factors.items():
            self._straggler.labels(rank).set(factor)

    def interval(self, interval: Interval) -> None:
        """Set what the ranks measured for an interval between saves that is a time."""
        self._interval_steps.set(interval.steps)
        parts = {
            "interval": interval.seconds,
            "step": interval.step_seconds,
            "save": interval.save_seconds,
            "mtbf": interval.mtbf_seconds,
        }
        for part, seconds in parts.items():
            if seconds is not None:
                self._interval_seconds.labels(part).set(seconds)

    def stored(self, tier: TierName, payload_bytes: int, seconds: float) -> None:
        self._bytes.labels(tier.value).inc(payload_bytes)
        self._durable.labels(tier.value).observe(seconds)

    def sent(self, tier: TierName, sent_bytes: int) -> None:
        self._sent.labels(tier.value).inc(sent_bytes)

    def compressed(self, tier: TierName, before_bytes: int, after_bytes: int) -> None:
        self._compression_input.labels(tier.value).inc(before_bytes)
        self._compression_output.labels(tier.value).inc(after_bytes)

    def fetched(self, tier: TierName, length_bytes: int) -> None:
        """Count bytes that a restore read: payload and chunk tables of ranges, or whole shard files."""
        self._fetched.labels(tier.value).inc(length_bytes)

    def trained(self, round_: int) -> None:
        """Record that a rank has finished a step in this round, from the rank's own Progress.

        Reports cannot be used for this: between a SEAL and the end of the old ranks, a report of the new
        round still contains steps of the old round.
        """
        self._trained_round.set(round_)

    def stalled(self, seconds: float, saves_skipped: int) -> None:
        if seconds > 0:
            self._stall.inc(seconds)
        if saves_skipped > 0:
            self._skipped.inc(saves_skipped)

    def save_failed(self, reason: str) -> None:
        self._failed.labels(reason).inc()

    def unexpected(self, kind: str) -> None:
        """Count an unexpected exception. `kind` is task, thread, connection or callback."""
        self._unexpected.labels(kind).inc()

    def dropped(self, steps: int) -> None:
        self._dropped.inc(steps)

    def limited(self, bytes_per_second: float | None) -> None:
        self._limit.set(bytes_per_second or 0.0)

    def waited_for_copies(self, seconds: float) -> None:
        self._waited_for_copies.inc(seconds)

    def rehydrated(self, seconds: float) -> None:
        self._rehydrate.observe(seconds)

    def scrubbed(self, length_bytes: int) -> None:
        self._scrubbed.inc(length_bytes)

    def corruption(self, tier: TierName) -> None:
        self._corruptions.labels(tier.value).inc()

    def level(self, *, pending: int, round_: int) -> None:
        self._queue.set(pending)
        self._round.set(round_)

    def buffers(self, allocated_bytes: int, limit_bytes: int) -> None:
        self._buffers.set(allocated_bytes)
        self._buffer_limit.set(limit_bytes)

    def dropped_connection(self, port: str, reason: str) -> None:
        self._connections.labels(port, reason).inc()

    def free(self, free_bytes: int) -> None:
        self._free.set(free_bytes)

    def render(self) -> bytes:
        return generate_latest(self._registry)


NODE_FULL = "NodeVolumeFull"
PEER_FULL = "PeerFull"
FULL = frozenset({NODE_FULL, PEER_FULL})
"""Reasons for a node without room. While one is reported, the coordinator prunes more steps."""
_MAX_KEPT = 32
_MAX_MESSAGE = 1000


def reason_of(tier: TierName, error: BaseException) -> str:
    """Return the CamelCase reason of an error in a tier.

    It is one of a fixed list, except that of a RefusedError, which is its refusal code.
    """
    match error:
        case CapacityError():
            return NODE_FULL if tier is TierName.NODE else PEER_FULL
        case RefusedError() if error.code == Refusal.NO_SPACE:
            return PEER_FULL
        case RefusedError():
            return error.code
        case AccessDeniedError():
            return "AccessDenied"
        case AlreadyExistsError():
            return Refusal.CONFLICT
        case CorruptionError():
            return "Corrupt"
        case NotFoundError() if tier is TierName.OBJECT:
            return "NotFound"
    if not isinstance(error, HoldfastError | OSError):
        return "UnexpectedError"
    match tier:
        case TierName.PEER:
            return "PeerUnreachable"
        case TierName.OBJECT:
            return "StoreUnavailable"
        case TierName.NODE:
            return "NodeVolumeError"
        case TierName.MEMORY:
            return "SlotError"


class Failures:
    """The current failures, one for each subject, such as the uploads or the copies to one worker.

    `on_change` is called when a failure appears or ends, or has another reason or step.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._kept: dict[str, Failure] = {}
        self._changed = logs.Changed()

    def note(
        self, subject: str, tier: TierName, error: BaseException, *, step: Step | None = None
    ) -> Failure:
        """Keep an error as the failure of its subject, and return it.

        Errors other than HoldfastError are also logged with their traceback.
        """
        reason = reason_of(tier, error)
        if not isinstance(error, HoldfastError):
            logs.failure(f"unexpected error: {subject}", error, step=step)
        return self.note_text(subject, tier, reason, str(error), step=step)

    def note_text(
        self, subject: str, tier: TierName, reason: str, message: str, *, step: Step | None = None
    ) -> Failure:
        """Keep a failure with its reason and message, and return it.

        Above a fixed number of failures the oldest one is dropped.
        """
        failure = Failure(step, tier, reason, message[:_MAX_MESSAGE])
        before = self._kept.pop(subject, None)
        self._kept[subject] = failure
        while len(self._kept) > _MAX_KEPT:
            self._kept.pop(next(iter(self._kept)))
        self._changed.warning(subject, reason, detail=failure.message, tier=tier, step=step)
        if before is None or (before.reason, before.step) != (reason, step):
            self._on_change()
        return failure

    def healthy(self, subject: str) -> None:
        """End the failure of a subject, if it has one."""
        if self._kept.pop(subject, None) is not None:
            self._changed.healthy(subject)
            self._on_change()

    def clear(self) -> None:
        """Remove all failures for a new round. A failure that persists is noted again."""
        self._kept.clear()

    @property
    def current(self) -> tuple[Failure, ...]:
        return tuple(self._kept.values())


class RestoreFailures:
    """Why the ranks of this pod cannot be restored, as it is reported to the operator.

    `on_change` is called when a reason appears, changes or ends.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self.text = ""
        """The reasons; empty if there are none."""
        self.may_pass = False
        """Whether a place that may have what is missing is unreachable or busy."""
        self._kept: dict[Rank | None, tuple[str, bool]] = {}
        """Each reason, and whether no place has a good copy."""

    def note(self, rank: Rank | None, text: str, *, is_final: bool) -> None:
        """Set the reason why a rank cannot be restored. None: no rank can.

        Args:
            rank: The rank, or None.
            text: What was tried.
            is_final: Whether every place replied that it has no good copy.
        """
        if self._kept.get(rank, ("",))[0] != text:
            self._set({**self._kept, rank: (text, is_final)})

    def healthy(self, rank: Rank | None) -> None:
        """Remove the reason of a rank, if it has one."""
        if rank in self._kept:
            self._set({kept: why for kept, why in self._kept.items() if kept != rank})

    def clear(self) -> None:
        """Remove all reasons without a call of `on_change`: a round ends."""
        self._kept, self.text, self.may_pass = {}, "", False

    def _set(self, kept: dict[Rank | None, tuple[str, bool]]) -> None:
        self._kept = kept
        self.text = "; ".join(text for text, _ in kept.values())
        self.may_pass = bool(kept) and not any(is_final for _, is_final in kept.values())
        self._on_change()


@dataclass(frozen=True, slots=True)
class Telemetry:
    """The metrics and the current failures of one sidecar."""

    metrics: Metrics
    failures: Failures


class NodeReports:
    """Reports of the writes to the node tier: metrics, and failures for the coordinator."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._metrics = telemetry.metrics
        self._failures = telemetry.failures

    def stored(self, stage: Stage, payload_bytes: int, seconds: float) -> None:
        self.continues(stage)
        self._metrics.stored(TierName.NODE, payload_bytes, seconds)

    def no_room(self, stage: Stage, error: Exception) -> None:
        self._failures.note(_subject(stage), TierName.NODE, error, step=stage.step)

    def hangs(self, stage: Stage, text: str) -> None:
        self._failures.note_text(
            _subject(stage), TierName.NODE, "NodeVolumeHangs", text, step=stage.step
        )

    def continues(self, stage: Stage) -> None:
        self._failures.healthy(_subject(stage))

    def failed(self, stage: Stage, error: Exception) -> StepOutcome:
        failure = self._failures.note(_subject(stage), TierName.NODE, error, step=stage.step)
        self._metrics.save_failed(failure.reason)
        return StepOutcome(stage.step, stage.round, Level.LOCAL, failure.reason, failure.message)

    def dropped(self, steps: int) -> None:
        self._metrics.dropped(steps)


def _subject(stage: Stage) -> str:
    return f"save of rank {stage.rank}"
