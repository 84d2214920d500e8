"""What became of this rank's saves: numbers for the script, reports for the job's status and the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from holdfast.base.handle import SaveHandle
from holdfast.checkpoint.outcomes import Outcomes
from holdfast.connection.progress import ProgressReporter
from holdfast_core.errors import CapacityError, HoldfastError, SaveFailedError
from holdfast_core.ids import Level, Step

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
