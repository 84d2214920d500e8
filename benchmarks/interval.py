"""A9: what an automatic interval between saves is worth, beside fixed intervals and Daly's formula.

Trainings are replayed in virtual time with the code that chooses the interval: `MeasuredInterval` of rank 0
and the operator's estimate of the time between failures. Failures come at random, with the same times for
every way to choose the interval. A failure loses the steps since the last save and costs a restart. The
user's expectation of the time between failures is wrong by a factor of four in both directions, too.

Writes results/interval.json and prints it as a table. It needs no cluster and about a minute.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from benchmarks.report import RESULTS
from holdfast.checkpoint.decisions import Schedule
from holdfast.checkpoint.measured_interval import MeasuredInterval, daly_seconds
from holdfast_core.messages.schema import Timing
from holdfast_operator.decide.gang import estimated_mtbf

STEP_SECONDS = 2.0
RESTART_SECONDS = 30.0
FAILURES = 60
SEEDS = (1, 2, 3)
CASES = ((0.1, 1800.0), (1.0, 3600.0), (5.0, 3600.0), (20.0, 7200.0))
"""Seconds that a save blocks training, and the mean time between failures."""


@dataclass(frozen=True, slots=True)
class Result:
    """The share of time that is training which no failure undid, for one way to choose the interval."""

    save_seconds: float
    mtbf_seconds: float
    interval: str
    goodput: float
    formula: float
    """The goodput that Daly's formula expects at its optimum, with the true time between failures."""

    @property
    def points_below_formula(self) -> float:
        return 100 * (self.formula - self.goodput)


class Training:
    """One training of a gang in virtual time.

    Args:
        save_seconds: Time for which a save blocks training.
        failures: Seconds of wall time between failures.
        expected_mtbf: The mean time between failures that the user expects, for an automatic interval.
        fixed_steps: The interval, if it is fixed.
    """

    def __init__(
        self,
        save_seconds: float,
        failures: Iterator[float],
        random_: random.Random,
        *,
        expected_mtbf: float = 0.0,
        fixed_steps: int = 0,
    ) -> None:
        self._save_seconds = save_seconds
        self._failures = failures
        self._random = random_
        self._expected_mtbf = expected_mtbf
        self._fixed_steps = fixed_steps
        self._now = 0.0
        self._saved = 0
        self._trained_seconds = 0.0

    def goodput(self) -> float:
        """Train until the failures have all happened. Return the share of kept training."""
        for restarts, until_failure in enumerate(self._failures):
            fails_at = self._now + until_failure
            self._round(fails_at, restarts)
            self._now = fails_at + RESTART_SECONDS
        return self._saved * STEP_SECONDS / self._now

    def _round(self, fails_at: float, restarts: int) -> None:
        """Train from the last save until the failure, which loses all later steps."""
        expected = estimated_mtbf(self._expected_mtbf, self._trained_seconds, restarts)
        measured = MeasuredInterval(Timing(None, expected))
        step, blocked, saved = self._saved, 0.0, False
        schedule = Schedule(step, self._fixed_steps)
        measured.begin(self._now, blocked)
        while True:
            duration = STEP_SECONDS * self._random.uniform(0.9, 1.1)
            if self._now + duration > fails_at:
                return
            self._now += duration
            self._trained_seconds += duration
            step += 1
            if not self._fixed_steps:
                measured.step_done(self._now, blocked, saved=saved)
                wanted = measured.wanted(schedule.interval_steps)
                if wanted is not None:
                    schedule = schedule.changed(step, wanted)
            saved = schedule.next_due(step) == step
            if not saved:
                continue
            if self._now + self._save_seconds > fails_at:
                return
            self._now += self._save_seconds
            blocked += self._save_seconds
            self._saved = step


def expected_goodput(every: float, save_seconds: float, mtbf: float) -> float:
    """Return the share of kept training that Daly (2006) expects for saves after `every` seconds."""
    spent = mtbf * math.exp(RESTART_SECONDS / mtbf) * (math.exp((every + save_seconds) / mtbf) - 1)
    return every / spent


def replay(save_seconds: float, mtbf: float) -> list[Result]:
    """Return the goodput of each way to choose the interval, as the mean over SEEDS."""
    best = daly_seconds(save_seconds, mtbf)
    formula = expected_goodput(best, save_seconds, mtbf)
    ways: dict[str, tuple[float, int]] = {
        "auto": (mtbf, 0),
        "auto, expects 4 times as many failures": (mtbf / 4, 0),
        "auto, expects a quarter of the failures": (mtbf * 4, 0),
        "T*": (0.0, max(1, round(best / STEP_SECONDS))),
        "T*/4": (0.0, max(1, round(best / 4 / STEP_SECONDS))),
        "4 T*": (0.0, round(best * 4 / STEP_SECONDS)),
    }
    results = []
    for name, (expected_mtbf, fixed_steps) in ways.items():
        found = []
        for seed in SEEDS:
            times = random.Random(seed)
            failures = (times.expovariate(1 / mtbf) for _ in range(FAILURES))
            training = Training(
                save_seconds,
                failures,
                random.Random(seed),
                expected_mtbf=expected_mtbf,
                fixed_steps=fixed_steps,
            )
            found.append(training.goodput())
        results.append(Result(save_seconds, mtbf, name, sum(found) / len(found), formula))
    return results


def main() -> None:
    """Replay all cases, write the result and print it."""
    results = [result for case in CASES for result in replay(*case)]
    rows = [{**asdict(r), "points_below_formula": r.points_below_formula} for r in results]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "interval.json").write_text(json.dumps(rows, indent=1) + "\n")
    print("| save | mean time between failures | interval | goodput | below the formula |")
    print("|---|---|---|---|---|")
    for r in results:
        print(
            f"| {r.save_seconds:g} s | {r.mtbf_seconds / 3600:g} h | {r.interval} "
            f"| {100 * r.goodput:.2f} % | {r.points_below_formula:.2f} points |"
        )


if __name__ == "__main__":
    main()
