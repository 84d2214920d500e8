"""Record how calls to sidecars end: answers, failures with their back-off, and what is logged of them.

A sidecar is unreachable after two failures in a row. Any answer, including a refusal, makes it reachable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError
from holdfast_operator.base import logs
from holdfast_operator.model.job import Reachable
from holdfast_operator.sidecars.client import SidecarRefused
from holdfast_operator.sidecars.state import PodCalls

UNREACHABLE_AFTER = 2
"""Failures in a row after which a sidecar counts as unreachable."""
LOG_AGAIN_SECONDS = 60.0
"""Shortest time between two log lines about one pod that alternates between answers and silence."""
MAX_LOG_CHARACTERS = 300
"""Longest log line, in characters, that repeats text of a sidecar."""
STARTING_SECONDS = 15.0
"""Silence of a sidecar that never answered after which it is logged. It may still be starting before."""
FIRST_BACKOFF_SECONDS = 0.25
MAX_BACKOFF_SECONDS = 1.0
"""Longest pause in the first minute of a silence. It then grows with the silence, to LONG_BACKOFF_SECONDS."""
LONG_BACKOFF_SECONDS = 10.0


class Answers:
    """Recorder of the ends of all calls."""

    def __init__(self, clock: Clock, count_error: Callable[[str], None]) -> None:
        self._clock = clock
        self._count_error = count_error
        self.log_changes = logs.Changed()

    def answered(self, pod: PodCalls) -> None:
        if self.log_changes.forget(pod.view.pod_uid):
            logs.info("the sidecar answers again", pod=pod.target.pod)
        pod.answered = True
        pod.answered_at = self._clock.monotonic()
        pod.failures = 0
        pod.failing_since = None
        pod.not_before = 0.0
        pod.view = replace(
            pod.view, reachable=Reachable.YES, unreachable_since=None, unreachable_because=""
        )

    def failed(self, pod: PodCalls, error: HoldfastError) -> None:
        pod.failures += 1
        if pod.failing_since is None:
            pod.failing_since = self._clock.monotonic()
        self.back_off(pod)
        if pod.failures >= UNREACHABLE_AFTER:
            now = self._clock.monotonic()
            started = pod.answered or now - pod.failing_since >= STARTING_SECONDS
            if started and (pod.logged_at is None or now - pod.logged_at >= LOG_AGAIN_SECONDS):
                pod.logged_at = now
                self.log_changes.warning_once(pod.view.pod_uid, str(error), pod=pod.target.pod)
            pod.view = replace(
                pod.view,
                reachable=Reachable.NO,
                unreachable_since=pod.failing_since,
                unreachable_because=pod.view.unreachable_because or str(error),
            )

    def back_off(self, pod: PodCalls) -> None:
        now = self._clock.monotonic()
        silent_seconds = 0.0 if pod.failing_since is None else now - pod.failing_since
        pod.not_before = now + back_off_seconds(pod.failures, silent_seconds)

    def log_refusal(self, subject: str, what: str, refusal: SidecarRefused) -> None:
        """Log the refusal once for each code. The sidecar's text may differ each time."""
        if self.log_changes.is_new(subject, refusal.code):
            logs.info(f"{what} was refused: {refusal}"[:MAX_LOG_CHARACTERS])

    def unexpected(self, what: str, error: Exception) -> None:
        """Count and log an error that only a defect of the operator causes. The caller continues."""
        self._count_error("sidecars")
        if self.log_changes.is_new(f"unexpected {what}", type(error).__name__):
            logs.failure(f"{what}: unexpected error", error)


def back_off_seconds(failures: int, silent_seconds: float) -> float:
    """Return the pause before the next call.

    Args:
        failures: Failures in a row.
        silent_seconds: Time since the first of them.
    """
    longest = min(max(MAX_BACKOFF_SECONDS, silent_seconds / 60), LONG_BACKOFF_SECONDS)
    return float(min(FIRST_BACKOFF_SECONDS * 2.0 ** min(max(failures - 1, 0), 8), longest))
