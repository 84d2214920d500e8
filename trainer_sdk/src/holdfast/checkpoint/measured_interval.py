"""An interval between saves that is given as a time, as a number of steps. Pure.

Saves follow from the number of the step, so that all ranks save the same steps without an agreement about
each of them. Rank 0 therefore converts a time to a number of steps and lets the ranks agree on that number
when it changes (ADR 0017).

With `interval="auto"` the time is the optimum of Daly (2006, "A higher order estimate of the optimum
checkpoint interval for restart dumps"). It balances the time that saves cost with the steps that a failure
loses.
"""

from __future__ import annotations

import math

from holdfast_core.messages.schema import Interval, Timing

_FIRST_COST_SECONDS = 0.1
"""Assumed cost before a save was measured. It is low, so that the first save comes early."""
_LEAST_COST_SECONDS = 0.001
_LEAST_STEPS_SEEN = 2
_MEMORY_INTERVALS = 4.0
"""Intervals over which the mean duration of a step is taken. With fewer of them, a validation between some
steps would change the interval again and again."""
_LEAST_CHANGE = 1.25
"""Factor by which the interval has to differ from the current one before the ranks agree on it."""
_COSTS_KEPT = 8
MOST_STEPS = 10**9


class MeasuredInterval:
    """Measures steps and saves of one rank. Only the training thread uses it."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._last: tuple[float, float] | None = None
        """Time of the last step, and the seconds that saves had blocked training by then."""
        self._sum_seconds = 0.0
        self._sum_steps = 0.0
        self._seen = 0
        self._costs: list[float] = []

    def begin(self, now: float, blocked_seconds: float) -> None:
        """Begin to measure: the next step is about to start."""
        self._last = now, blocked_seconds

    def step_done(self, now: float, blocked_seconds: float, *, saved: bool) -> None:
        """Measure a step, and the save before it.

        Args:
            now: Seconds of a monotonic clock.
            blocked_seconds: Seconds that saves have blocked training so far.
            saved: Whether a save ended since the last step and was not left out.
        """
        if self._last is None:
            self.begin(now, blocked_seconds)
            return
        blocked = blocked_seconds - self._last[1]
        duration = max(0.0, now - self._last[0] - blocked)
        self._last = now, blocked_seconds
        if saved and blocked > 0:
            self._costs = [*self._costs, blocked][-_COSTS_KEPT:]
        self._seen += 1
        if self._seen == 1:
            return  # the first step compiles and warms up
        # A pause counts as one interval at most. Longer steps are saved one by one in any case.
        duration = min(duration, self.seconds)
        weight = math.exp(-duration / (_MEMORY_INTERVALS * self.seconds))
        self._sum_seconds = self._sum_seconds * weight + duration
        self._sum_steps = self._sum_steps * weight + 1

    @property
    def seconds(self) -> float:
        """Seconds between saves."""
        if self._timing.seconds is not None:
            return self._timing.seconds
        return daly_seconds(self._cost_seconds, self._timing.mtbf_seconds)

    @property
    def step_seconds(self) -> float | None:
        """Mean duration of a step, or None before enough steps were measured."""
        if self._seen < 1 + _LEAST_STEPS_SEEN:
            return None
        return self._sum_seconds / self._sum_steps

    def wanted(self, steps: int) -> int | None:
        """Return the number of steps to agree on instead of `steps`, or None if there is no need to."""
        step_seconds = self.step_seconds
        if step_seconds is None:
            return None
        most = MOST_STEPS * max(step_seconds, 1e-9)
        found = max(1, round(min(self.seconds, most) / max(step_seconds, 1e-9)))
        found = min(found, MOST_STEPS)
        if steps > 0 and max(found, steps) < _LEAST_CHANGE * min(found, steps):
            return None
        return found if found != steps else None

    def report(self, steps: int) -> Interval:
        """Return the interval of `steps` with what it follows from."""
        is_auto = self._timing.seconds is None
        return Interval(
            steps,
            self.seconds,
            self.step_seconds,
            self._cost_seconds if is_auto and self._costs else None,
            self._timing.mtbf_seconds if is_auto else None,
        )

    @property
    def _cost_seconds(self) -> float:
        if not self._costs:
            return _FIRST_COST_SECONDS
        return sorted(self._costs)[len(self._costs) // 2]


def daly_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """Return the time between saves at which saves and lost steps cost the least in total.

    Args:
        cost_seconds: Time for which a save blocks training.
        mtbf_seconds: Mean time between failures.
    """
    cost = max(cost_seconds, _LEAST_COST_SECONDS)
    if cost >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = cost / (2 * mtbf_seconds)
    return math.sqrt(2 * cost * mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost
