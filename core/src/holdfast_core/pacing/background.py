"""Keep background transfers from slowing training, by a shared limit that follows the step times.

Each process that persists a trainer's saves has one `Pacing`. Any thread that moves bytes calls `take`.
One thread calls `step_done` for each finished step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from holdfast_core.pacing.foreground_copies import ForegroundCopyGate
from holdfast_core.pacing.rate import Pace
from holdfast_core.pacing.throttle import Throttle

HEADROOM = 1.25
"""The lowest limit is this factor times the rate that finishes each checkpoint just as the next is due."""
LEAST_BYTES_PER_SECOND = float(16 << 20)
"""The limit is never below this, even where no save is due, so that saves on request come to an end."""


class Pacing:
    """Rate limit of one process for background transfers."""

    def __init__(
        self,
        slots_dir: Path,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        waited_for_copies: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """Create the pacing of one process, without a limit.

        Args:
            slots_dir: Directory of the slots that the trainer copies its saves into.
            waited_for_copies: Called after each wait for such a copy, with its seconds.
        """
        self._throttle = Throttle(monotonic, sleep)
        self._copy_gate = ForegroundCopyGate(slots_dir, monotonic, sleep)
        self._waited_for_copies = waited_for_copies
        self._monotonic = monotonic
        self._pace = Pace()
        self._last: float | None = None
        self._step: int | None = None
        self._blocked_since = 0.0
        """Seconds for which saves after the newest step blocked training. The next step's time is reduced by
        them."""
        self._moved = 0
        self._bytes_each_step = 0.0
        self._hurrying = False

    @property
    def limit(self) -> float | None:
        """Return the present limit in bytes per second. None means no limit."""
        return None if self._hurrying else self._pace.limit

    def take(self, byte_count: int) -> None:
        """Block until `byte_count` more bytes may be moved: the limit allows them, and no rank copies a save.

        ForegroundCopyGate bounds the wait for a copy.
        """
        self._throttle.take(byte_count)
        if not self._hurrying:
            seconds = self._copy_gate.wait_for_copies()
            if seconds:
                self._waited_for_copies(seconds)

    def begin(self) -> None:
        """Start a round: apply the limit again, and count the next step as the first one."""
        self._hurrying = False
        self._last = self._step = None
        self._blocked_since = 0.0
        self._apply()

    def expect(self, bytes_each_step: float) -> None:
        """Set how many bytes this process must move per step on average. The lowest limit follows from it."""
        self._bytes_each_step = bytes_each_step

    def hurry(self) -> None:
        """Remove the limit and the pauses until `begin`.

        Call it while no trainer runs and the transfers are waited for.
        """
        self._hurrying = True
        self._apply()

    def step_done(self, step: int, blocked_seconds: float) -> None:
        """Record that `step` has ended now, and adapt the limit.

        Args:
            blocked_seconds: Time of the step for which saving blocked training. It is subtracted, because
                background transfers do not cause it.

        The same step may be reported again after a save that follows it. Then its `blocked_seconds` are
        subtracted from the next step.
        """
        if step == self._step:
            self._blocked_since += blocked_seconds
            return
        blocked_seconds, self._blocked_since = blocked_seconds + self._blocked_since, 0.0
        self._step = step
        now, moved = self._monotonic(), self._throttle.moved_bytes
        if self._last is not None:
            seconds = max(0.0, now - self._last - blocked_seconds)
            quiet = self._pace.quiet_step_seconds
            needed = 0.0 if not quiet else HEADROOM * self._bytes_each_step / quiet
            self._pace.floor = max(LEAST_BYTES_PER_SECOND, needed)
            self._pace.step(seconds, moved - self._moved)
            self._apply()
        self._last, self._moved = now, moved

    def _apply(self) -> None:
        self._throttle.set_limit(self.limit)


def bytes_each_step(
    payload_bytes: int, interval_steps: int, copies: int, object_every_steps: int | None
) -> float:
    """Return the bytes that a rank's saves move on average per step.

    They go to the node tier, to peers and to the object store.

    Args:
        interval_steps: Steps between two saves. Below 1 nothing is saved.
        copies: Copies of each shard on peers.
        object_every_steps: Steps between two uploads. None means no uploads.
    """
    if interval_steps < 1:
        return 0.0
    moved = payload_bytes * (1 + copies) / interval_steps
    return moved + (payload_bytes / object_every_steps if object_every_steps else 0.0)
