"""What this rank reports of its training: finished steps, pauses, metrics, and what became of its saves.

`steps`, `should_save` and `save` all report here, so that the job's status does not depend on which of
them a script uses. Reports never block the training thread. Failed saves are counted, and so are saves of
which none becomes durable.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

from holdfast.base.handle import SaveHandle
from holdfast.connection.session import Session
from holdfast.training.step_timing import StepTiming
from holdfast_core.errors import CapacityError, HoldfastError, SaveFailedError
from holdfast_core.ids import Level, Step
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
        self._work: StepTiming | None = None
        """What a step takes this rank by itself. None: the job does not look for stragglers."""
        self.interval: Interval | None = None
        """The interval between saves, if it is given as a time."""
        self._sent = (0, 0.0, 0)
        """Finished steps, blocked seconds and skipped saves of the last report."""

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

    @property
    def metrics(self) -> Mapping[str, float]:
        """The newest finite value of each metric."""
        return self._metrics

    def measure_work(self, state: Mapping[str, Any]) -> None:
        """Measure what a step takes the models of `state` by themselves, and report it."""
        self._work = self._work or StepTiming(self._monotonic)
        self._work.watch(state)

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
        if self._work is not None:
            self._work.finished()
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
                if self._work is not None:
                    self._work.paused(began)
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
        if self._work is not None:
            self._work.stop()
        self._deliver()

    def send(self) -> None:
        """Send the newest finished step, if it or the costs changed since the last message."""
        if self._sent != (self._finished, self._blocked_seconds, self._skipped):
            self._deliver()

    @property
    def _pause(self) -> str:
        if self._pauses:
            return self._pauses[-1][0]
        return LOOP_ENDED if self._loop_ended else ""

    def _deliver(self) -> None:
        if self._done is None:
            return
        self._session.progress(
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
                None if self._work is None else self._work.found,
            )
        )
        self._sent = self._finished, self._blocked_seconds, self._skipped


STALLED_SAVES = 5
STALLED_SECONDS = 60.0


class StallCounter:
    """Counter of the saves since the last one became durable.

    A stall is at least `STALLED_SAVES` saves (failed and skipped saves included) during at least
    `STALLED_SECONDS`. The number alone is not enough: with a slow disk and a short interval, more saves
    than that are skipped between two commits.
    """

    def __init__(self) -> None:
        self.last_committed: Step | None = None
        self.saves_since_commit = 0
        self._since: float | None = None
        self._reported = False

    def saved(self, now: float) -> None:
        """Count a save that was handed over, failed or was skipped. `now` is in monotonic seconds."""
        if self._since is None:
            self._since = now
        self.saves_since_commit += 1

    def committed(self, step: Step, now: float) -> None:
        """Record that the save of `step` became durable, and start to count anew."""
        if self.last_committed is None or step > self.last_committed:
            self.last_committed = step
        self.saves_since_commit = 0
        self._since = now
        self._reported = False

    def stalled_seconds(self, now: float) -> float | None:
        """Return for how long no save became durable, once for each stall; otherwise None."""
        if self._reported or self._since is None or self.saves_since_commit < STALLED_SAVES:
            return None
        seconds = now - self._since
        if seconds < STALLED_SECONDS:
            return None
        self._reported = True
        return seconds


_MAX_DURABLE = 64
"""Durable saves whose upload is still watched. An upload waits behind at most two others."""


class Outcomes:
    """Handles of saves whose outcome has not been counted yet.

    Only the training thread uses it. Other threads settle the handles.
    """

    def __init__(self) -> None:
        self.watch = StallCounter()
        self._handles: list[SaveHandle] = []
        self._durable: deque[SaveHandle] = deque(maxlen=_MAX_DURABLE)

    def add(self, handle: SaveHandle) -> None:
        self._handles.append(handle)

    def next_failed(self, now: float) -> SaveHandle | None:
        """Return the next save that failed after it was handed over, or None.

        Each failed save is returned once. A save that a newer one replaced does not count as failed. One
        that is durable counts as failed when another run has taken the store before its upload.

        Args:
            now: Monotonic seconds.
        """
        for handle in tuple(self._handles):
            if not handle.settled:
                continue
            self._handles.remove(handle)
            if handle.durable:
                self.watch.committed(handle.step, now)
                self._durable.append(handle)
            elif not handle.overtaken:
                return handle
        for handle in tuple(self._durable):
            if handle.lost_its_store:
                self._durable.remove(handle)
                return handle
        return None

    def take_unfinished(self, is_safe: Callable[[SaveHandle], bool]) -> list[SaveHandle]:
        """Remove all handles and return those that are neither settled nor safe.

        Args:
            is_safe: Whether another process will finish this save after the connection has ended.
        """
        unfinished = [h for h in self._handles if not h.settled and not is_safe(h)]
        self._handles = []
        return unfinished


logger = logging.getLogger(__name__)


class SaveStatus:
    """Counts saves, and reports those that fail. Only the training thread uses it.

    Args:
        progress: Reports to the job's status.
        where_to_look: Returns what to check when saves do not become durable.
        raises: Whether a failed save raises its error. Otherwise it is logged.
    """

    def __init__(
        self, progress: ProgressReporter, where_to_look: Callable[[], str], *, raises: bool
    ) -> None:
        self.progress = progress
        self.blocked_seconds = 0.0
        self.skipped = 0
        self.failed = 0
        self.found_no_slot = False
        """Whether the newest save was skipped because all slots were busy."""
        self._where_to_look = where_to_look
        self._raises = raises
        self._outcomes = Outcomes()
        self._logged_failure = ""
        self._logged_skip = ""

    @property
    def last_committed(self) -> Step | None:
        return self._outcomes.watch.last_committed

    @property
    def saves_since_commit(self) -> int:
        return self._outcomes.watch.saves_since_commit

    def handed_over(self, handle: SaveHandle) -> None:
        """Follow the outcome of this save."""
        self._outcomes.add(handle)
        self.found_no_slot = False

    def left_out(self, step: Step) -> None:
        """Count a save that all ranks left out."""
        self._count_skipped(
            step, "a rank still writes the saves before, so that all ranks leave this one out"
        )
        self._watch_commits()

    def no_slot(self, handle: SaveHandle) -> None:
        """Count a save that this rank skipped, and fail its handle."""
        reason = "this rank still writes the saves before"
        self._count_skipped(handle.step, reason)
        handle.fail(Level.LOCAL, f"skipped: {reason}")

    def ended(self, step: Step, blocked_seconds: float) -> None:
        """Record that a save returns to training, after `blocked_seconds`."""
        self.blocked_seconds += blocked_seconds
        self.progress.blocked(blocked_seconds)
        self.progress.finished(step)
        self._watch_commits()

    def count_failure(self, error: Exception, step: Step) -> None:
        """Count a failed save, and raise or log its error."""
        self.failed += 1
        reason = f"{type(error).__name__}: {error}"
        if self._raises:
            if isinstance(error, HoldfastError | OSError):
                raise error
            raise SaveFailedError(f"save of step {step}: {reason}") from error
        if isinstance(error, CapacityError) or reason != self._logged_failure:
            self._logged_failure = reason
            logger.warning("save of step %d failed, training continues: %s", step, reason)

    def count_older_failures(self) -> None:
        """Count the saves that failed after they were handed over.

        With on_save_error="raise", raises SaveFailedError for the first of them.
        """
        while (handle := self._outcomes.next_failed(time.monotonic())) is not None:
            error = SaveFailedError(f"save of step {handle.step}: {handle.failure}")
            self.count_failure(error, handle.step)

    def count_last(self, is_safe: Callable[[SaveHandle], bool]) -> SaveFailedError | None:
        """Count and log the saves that have failed or are unfinished before the connection ends.

        Args:
            is_safe: Whether another process finishes an unfinished save after that.

        Returns:
            The error that describes them, or None if there are none.
        """
        failed: list[tuple[Step, str]] = []
        while (handle := self._outcomes.next_failed(time.monotonic())) is not None:
            failed.append((handle.step, handle.failure or "unknown"))
        for handle in self._outcomes.take_unfinished(is_safe):
            failed.append((handle.step, f"not durable yet: {self._where_to_look()}"))
        if not failed:
            return None
        self.failed += len(failed)
        step, why = failed[-1]
        error = SaveFailedError(
            f"{len(failed)} of the last saves did not become durable, the newest is step {step}: {why}. "
            f"The newest durable step of this run is {self.last_committed}"
        )
        logger.warning("%s", error)
        return error

    def _count_skipped(self, step: Step, reason: str) -> None:
        """Count a skipped save, and warn of it unless that of the skip before had the same reason."""
        self.skipped += 1
        self.progress.skipped()
        if reason != self._logged_skip:
            self._logged_skip = reason
            last = self.last_committed
            at_risk = (
                "no save of this run is durable yet"
                if last is None
                else f"a failure now costs {step - last} steps"
            )
            logger.warning(
                'save of step %d is skipped: %s; %s. Save less often, or pass when_busy="wait". Later saves '
                "that are skipped for this reason are only counted in saves_skipped",
                step,
                reason,
                at_risk,
            )

    def _watch_commits(self) -> None:
        watch, now = self._outcomes.watch, time.monotonic()
        watch.saved(now)
        seconds = watch.stalled_seconds(now)
        if seconds is not None:
            logger.error(
                "no save has become durable for %.0f s and %d saves; the newest durable step of this run "
                "is %s, %d saves failed, %d were skipped: %s",
                seconds,
                watch.saves_since_commit,
                watch.last_committed,
                self.failed,
                self.skipped,
                self._where_to_look(),
            )
