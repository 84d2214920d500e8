"""The faults of a soak, by a seed, and the figures of its result. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from benchmarks.report import Figure, at_most, for_orientation

SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 6.0, 20.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault."""

    name: str
    weight: int
    rounds: int
    """Most restart rounds that one such fault may cost."""


KINDS = (
    Kind("rank killed", 4, 1),
    Kind("pod deleted", 4, 1),
    Kind("two pods deleted", 2, 1),
    Kind("all pods deleted", 1, 1),
    Kind("out of memory", 1, 1),
    Kind("sidecar killed", 3, 1),
    Kind("node powered off", 2, 1),
    Kind("node partitioned", 1, 1),
    Kind("store away", 2, 0),
    Kind("control ports silent", 1, 0),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that the plan wants next."""

    pause_seconds: float
    """Wait before the fault."""
    kind: Kind
    worker: int
    lasts_seconds: float
    """For a fault that is ended: its duration."""


@dataclass(slots=True)
class Outcome:
    """What one training of the soak has shown."""

    number: int
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    longest_recovery_seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    """Sentences of the oracle: violations of I1 to I7."""

    @property
    def double(self) -> int:
        """Return the rounds that no fault explains."""
        return max(0, self.rounds - sum(n * _ROUNDS[kind] for kind, n in self.faults.items()))


_ROUNDS = {kind.name: kind.rounds for kind in KINDS}


def faults(seed: int, workers: int) -> Iterator[Fault]:
    """Yield the faults of one training, without an end. Equal seeds give equal faults."""
    chance = Random(seed)
    while True:
        (kind,) = chance.choices(KINDS, [k.weight for k in KINDS])
        yield Fault(
            chance.uniform(SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS),
            kind,
            chance.randrange(workers),
            chance.uniform(5.0, 25.0),
        )


def figures(outcomes: Sequence[Outcome], operator_kills: int, minutes: float) -> list[Figure]:
    """Return the rows of the result. `outcomes` is not empty."""
    total = sum((o.faults for o in outcomes), Counter[str]())
    problems = [problem for o in outcomes for problem in o.problems]
    setting = {
        "minutes": round(minutes, 1),
        "faults": dict(total),
        "operator_kills": operator_kills,
    }
    return [
        at_most(
            "C4-lost", [len(problems)], "violations of I1 to I7", 0, problems=problems, **setting
        ),
        at_most(
            "C4-double", [sum(o.double for o in outcomes)], "rounds without a fault", 0, **setting
        ),
        for_orientation("C4-trainings", [len(outcomes)], "trainings", **setting),
        for_orientation("C4-rounds", [sum(o.rounds for o in outcomes)], "rounds", **setting),
        for_orientation(
            "C4-longest", [max(o.longest_recovery_seconds for o in outcomes)], "s", **setting
        ),
    ]
