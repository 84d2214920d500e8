"""Reports finished steps, pauses, metrics and the cost of saves to the sidecar.

`steps`, `should_save` and `save` all report here, so that the job's status does not depend on which of
them a script uses. Reports never block the training thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

from holdfast.connection.session import Session
from holdfast.training.step_timing import StepTiming
from holdfast_core.ids import Step
from holdfast_core.messages.codec import MAX_METRIC_NAME, MAX_METRICS, clipped
from holdfast_core.messages.schema import Interval, Progress

MEASURED_STEPS = 32
"""Number of last steps whose median time is reported."""
FEWEST_STEPS = 3
"""Number of measured steps below which no median is reported: the first ones may compile."""
LOOP_ENDED = "the training loop has ended"


class ProgressReporter:
    """Collects metrics and the cost of saves, and sends them with each finished step.

    Args:
        session: Sends the reports.
        monotonic: Returns seconds since an arbitrary point.
    """

    def __init__(self, session: Session, monotonic: Callable[[], float]) -> None:
        self._session = session
        self._monotonic = monotonic
        self._finished = 0
        self._seconds = deque[float](maxlen=MEASURED_STEPS)
        self._last_at: float | None = None
        """When the last step was finished. Pauses that have ended since then are added."""
        self._pauses: list[tuple[str, float]] = []
        """What pauses this rank, the outermost pause first, and when each has begun."""
        self._loop_ended = False
        self._is_repeated = False
        """Whether the next step counts although it has the number of the last one."""
        self._metrics: dict[str, float] = {}
        self._blocked_seconds = 0.0
        self._skipped = 0
        self._done: Step | None = None
        self.work = StepTiming(monotonic)
        """What a step takes this rank by itself. It measures nothing until it is given the models."""
        self.interval: Interval | None = None
        """The interval between saves, if it is given as a time."""
        self._sent = 0
        """Value of `_finished` in the last report."""

    def measured(self, metrics: Mapping[str, Any]) -> None:
        """Keep the newest finite value of each of the first 64 metrics.

        Scalar tensors are copied to the host. Long names are cut, and those that are not Unicode are
        repaired: names become labels of the page for Prometheus, which is UTF-8.
        """
        for given, value in metrics.items():
            number = float(value.detach() if hasattr(value, "detach") else value)
            name = clipped(given, MAX_METRIC_NAME)
            is_known = name in self._metrics or len(self._metrics) < MAX_METRICS
            if is_known and math.isfinite(number):
                self._metrics[name] = number

    def blocked(self, seconds: float) -> None:
        """Add time that a save took from the training thread."""
        self._blocked_seconds += seconds

    def skipped(self) -> None:
        """Count a save that was left out."""
        self._skipped += 1

    def finished(self, step: Step) -> None:
        """Record that `step` optimizer steps are done. `send` reports it."""
        if step == self._done and not self._is_repeated:
            return
        # A save reports its step within its own pause, which began when the step was done.
        at = self._pauses[0][1] if self._pauses else self._monotonic()
        if self._last_at is not None:
            at = max(at, self._last_at)
            self._seconds.append(at - self._last_at)
        self._last_at = at
        self._finished += 1
        self.work.finished()
        self._loop_ended = self._is_repeated = False
        self._done = step

    @contextmanager
    def paused(self, why: str) -> Iterator[None]:
        """Report that this rank finishes no steps while the context is open, so that it is not a hang."""
        self._pauses.append((why, self._monotonic()))
        self._deliver()
        try:
            yield
        finally:
            _, began = self._pauses.pop()
            if not self._pauses:
                self.work.paused(began)
                if self._last_at is not None:
                    self._last_at += self._monotonic() - max(began, self._last_at)
            self._deliver()

    def rolled_back(self) -> None:
        """Record that the next step may have the number of the last one."""
        self._is_repeated = True

    def loop_ended(self, *, is_error: bool = False) -> None:
        """Report that this rank finishes no steps until it finishes another one.

        After an error it is expected to end. If it does not, that is a hang.
        """
        self._loop_ended = not is_error
        self._last_at = None
        self.work.stop()
        self._deliver()

    def send(self) -> None:
        """Send the newest finished step, if it or the costs changed since the last message.

        Without a connection the costs stay here for the next message, and the session sends the step
        again when it is connected.
        """
        if self._finished == self._sent and not self._blocked_seconds and not self._skipped:
            return
        self._deliver()

    @property
    def _pause(self) -> str:
        if self._pauses:
            return self._pauses[-1][0]
        return LOOP_ENDED if self._loop_ended else ""

    def _deliver(self) -> None:
        if self._done is None:
            return
        delivered = self._session.progress(
            Progress(
                self._session.current_round,
                self._session.rank,
                self._done,
                dict(self._metrics),
                self._blocked_seconds,
                self._skipped,
                self.interval,
                self._finished,
                median(self._seconds) if len(self._seconds) >= FEWEST_STEPS else None,
                self._pause,
                self.work.found,
            )
        )
        self._sent = self._finished
        if delivered:
            self._blocked_seconds = 0.0
            self._skipped = 0
