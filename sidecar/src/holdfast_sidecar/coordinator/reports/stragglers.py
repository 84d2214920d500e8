"""Detection of ranks that are slower than the others at the same work (ADR 0014). No I/O, no clock.

All ranks of a gang have the same step time, because they wait for each other. Each rank therefore reports
what a step takes it without these waits: the time until its batch is there, and that of its forward passes.

1. Ranks with the same number of parameters have the same work. The others, such as the stages of a
   pipeline, are not compared.
2. A rank is slow while it takes `straggler_factor` times the median of these ranks, and this costs the gang
   at least LEAST_SHARE of a step. Without the second condition, noise in very short passes would count.
3. It is a straggler after `straggler_steps` steps for which it was slow without a break.
4. It is one until it is less than half as much slower than rule 2 demands.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import median, median_low

from holdfast_core.ids import Rank, Step
from holdfast_core.messages.codec import MAX_STRAGGLERS
from holdfast_core.messages.common import Policy, RankWork
from holdfast_core.messages.operator import Straggler
from holdfast_core.messages.report import RankProgress
from holdfast_sidecar.coordinator.reports.gathered import Gathered

LEAST_SHARE = 0.05
"""Part of the median step time by which a rank must delay the gang."""
_LONGEST_FACTOR = 1000.0
"""Factor of a rank whose peers take no measurable time."""
INPUT = "Input"
FORWARD = "Forward"


@dataclass(frozen=True, slots=True)
class _Slow:
    """Since when a rank is slow."""

    finished: int
    """Number of steps that it had finished."""
    step: Step
    counts: bool
    """Whether it has been slow for long enough to be a straggler."""


class StragglerWatch:
    """Compare the ranks about once a second.

    Args:
        gathered: The reports.
    """

    def __init__(self, gathered: Gathered) -> None:
        self._gathered = gathered
        self._slow: dict[Rank, _Slow] = {}
        self.found: tuple[Straggler, ...] = ()
        """At most MAX_STRAGGLERS ranks, those with the highest factors, by rank."""

    @property
    def ranks(self) -> list[int]:
        return [s.rank for s in self.found]

    def look(self, policy: Policy) -> bool:
        """Update `found`. Return whether it names other ranks than before.

        Args:
            policy: Has the factor and the number of steps.
        """
        before = self.ranks
        gathered = self._gathered
        if policy.straggler_factor <= 1.0 or gathered.has_ended or not gathered.running:
            self._slow, self.found = {}, ()
            return bool(before)
        steps = gathered.step_seconds
        if not steps:
            return False
        least_seconds = LEAST_SHARE * median(steps)
        progress = [p for r in gathered.reports.values() for p in r.progress]
        found = [
            straggler
            for peers in _comparable(progress)
            for straggler in self._compare(peers, policy, least_seconds)
        ]
        worst = sorted(found, key=lambda s: (-s.factor, s.rank))[:MAX_STRAGGLERS]
        self.found = tuple(sorted(worst, key=lambda s: s.rank))
        return self.ranks != before

    def _compare(
        self, peers: list[tuple[RankProgress, RankWork]], policy: Policy, least_seconds: float
    ) -> list[Straggler]:
        """Return the stragglers of some ranks with the same work.

        With an even number of ranks, the faster one of the two in the middle counts. So one of two ranks can
        be a straggler.
        """
        usual = median_low(_seconds(work) for _, work in peers)
        usual_input = median_low(work.input_seconds for _, work in peers)
        usual_forward = median_low(work.forward_seconds for _, work in peers)
        found = []
        for progress, work in peers:
            rank, excess = progress.rank, _seconds(work) - usual
            known = self._slow.get(rank)
            share = 0.5 if known is not None and known.counts else 1.0
            limit = share * max((policy.straggler_factor - 1.0) * usual, least_seconds)
            if excess <= 0.0 or excess < limit:
                self._slow.pop(rank, None)
                continue
            if known is None:
                known = _Slow(progress.finished, progress.step, counts=False)
            lasted = progress.finished - known.finished
            counts = known.counts or lasted >= policy.straggler_steps
            self._slow[rank] = replace(known, counts=counts)
            if counts:
                of_input = work.input_seconds - usual_input
                of_forward = work.forward_seconds - usual_forward
                factor = _LONGEST_FACTOR
                if usual > 0.0:
                    factor = min(factor, _seconds(work) / usual)
                part = INPUT if of_input > of_forward else FORWARD
                found.append(Straggler(rank, round(factor, 2), known.step, part))
        return found


def _comparable(progress: list[RankProgress]) -> list[list[tuple[RankProgress, RankWork]]]:
    """Return the ranks that measure their work, those with the same work together."""
    found = defaultdict[int, list[tuple[RankProgress, RankWork]]](list)
    for one in progress:
        if one.work is not None:
            found[one.work.parameters].append((one, one.work))
    return list(found.values())


def _seconds(work: RankWork) -> float:
    return work.input_seconds + work.forward_seconds
