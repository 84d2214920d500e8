"""Reports finished steps, metrics and the cost of saves to the sidecar.

`steps`, `should_save` and `save` all report here, so that the job's status does not depend on which of
them a script uses. Reports never block the training thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from holdfast.connection.session import Session
from holdfast_core.ids import Rank, Step
from holdfast_core.messages.schema import Progress


class ProgressReporter:
    """Collects metrics and the cost of saves, and sends them with each finished step."""

    def __init__(self, session: Session, rank: Rank) -> None:
        self._session = session
        self._rank = rank
        self._metrics: dict[str, float] = {}
        self._blocked_seconds = 0.0
        self._skipped = 0
        self._done: Step | None = None
        self._sent: Step | None = None

    def measured(self, metrics: Mapping[str, Any]) -> None:
        """Keep the newest finite value of each metric. Scalar tensors are copied to the host."""
        for name, value in metrics.items():
            number = float(value.detach() if hasattr(value, "detach") else value)
            if math.isfinite(number):
                self._metrics[name] = number

    def blocked(self, seconds: float) -> None:
        """Add time that a save took from the training thread."""
        self._blocked_seconds += seconds

    def skipped(self) -> None:
        """Count a save that was left out."""
        self._skipped += 1

    def finished(self, step: Step) -> None:
        """Record that `step` optimizer steps are done. `send` reports it."""
        self._done = step

    def send(self) -> None:
        """Send the newest finished step, if it or the costs changed since the last message.

        Without a connection the costs stay here for the next message, and the session sends the step
        again when it is connected.
        """
        if self._done is None:
            return
        if self._done == self._sent and not self._blocked_seconds and not self._skipped:
            return
        delivered = self._session.progress(
            Progress(
                self._session.current_round,
                self._rank,
                self._done,
                dict(self._metrics),
                self._blocked_seconds,
                self._skipped,
            )
        )
        self._sent = self._done
        if delivered:
            self._blocked_seconds = 0.0
            self._skipped = 0
