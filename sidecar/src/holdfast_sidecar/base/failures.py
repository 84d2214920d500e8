"""Failures that persist: each is kept until it is healthy again, reported to the coordinator, logged once.

`Telemetry` is what a component reports of its work: these failures, and numbers for Prometheus.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast_core.errors import (
    AccessDeniedError,
    CapacityError,
    CorruptionError,
    HoldfastError,
    NotFoundError,
    RefusedError,
)
from holdfast_core.ids import Step, TierName
from holdfast_core.messages.schema import Failure, Refusal
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.metrics import Metrics

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
        self._changed.log(subject, reason, detail=failure.message, tier=tier, step=step)
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


@dataclass(frozen=True, slots=True)
class Telemetry:
    """The metrics and the current failures of one sidecar."""

    metrics: Metrics
    failures: Failures
