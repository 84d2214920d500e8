"""Keeps background bytes from slowing a trainer down: its steps in, a shared limit out.

One for each process that persists a trainer's saves. Movers of bytes call `take`; whoever hears of
finished steps calls `step_done`, from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from holdfast_core.pacing.foreground_copies import GivingWay
from holdfast_core.pacing.rate import Pace
from holdfast_core.pacing.throttle import Throttle

HEADROOM = 1.25
"""A checkpoint is moved in this part of the time until the next one."""
LEAST_BYTES_PER_SECOND = float(16 << 20)
"""Also where nothing is due: what was asked for by hand must end."""


class Pacing:
    """`slots_dir`: where the trainer copies to; `gave_way` hears each time how many seconds it took."""

    def __init__(
        self,
        slots_dir: Path,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        gave_way: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._throttle = Throttle(monotonic, sleep)
        self._giving_way = GivingWay(slots_dir, monotonic, sleep)
        self._gave_way = gave_way
        self._monotonic = monotonic
        self._pace = Pace()
        self._last: float | None = None
        self._step: int | None = None
        self._blocked_since = 0.0
        """What saves after the newest step have cost: not yet taken off a step."""
        self._moved = 0
        self._bytes_each_step = 0.0
        self._hurrying = False

    @property
    def limit(self) -> float | None:
        """Bytes a second in force now; None: no limit."""
        return None if self._hurrying else self._pace.limit

    def take(self, byte_count: int) -> None:
        """Returns when `byte_count` more bytes may be moved: the limit allows it, and no rank copies."""
        self._throttle.take(byte_count)
        if not self._hurrying:
            seconds = self._giving_way.stand_aside()
            if seconds:
                self._gave_way(seconds)

    def begin(self) -> None:
        """A round starts: nothing is in a hurry, and the next step is the first one."""
        self._hurrying = False
        self._last = self._step = None
        self._blocked_since = 0.0
        self._apply()

    def expect(self, bytes_each_step: float) -> None:
        """What this process has to move, averaged over steps: the limit never falls below it."""
        self._bytes_each_step = bytes_each_step

    def hurry(self) -> None:
        """Somebody waits for what is on its way, and no trainer runs that could suffer."""
        self._hurrying = True
        self._apply()

    def step_done(self, step: int, blocked_seconds: float) -> None:
        """`step` ended now, of which saving blocked so much (that is the save's cost, not ours).

        A step may be reported again, when a save after it has cost time: that is taken off the next
        step, and is no step of its own.
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
    """What a rank's saves make its pod move, averaged over steps: to the node tier, to peers, to the
    object store."""
    if interval_steps < 1:
        return 0.0
    moved = payload_bytes * (1 + copies) / interval_steps
    return moved + (payload_bytes / object_every_steps if object_every_steps else 0.0)
