"""A rank that is slower than the others at the same work for many steps is a straggler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from holdfast_core.ids import Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import (
    DeadRank,
    Policy,
    Progress,
    RankWork,
    Straggler,
    WorkerReport,
)
from holdfast_sidecar.coordinator.gathered import Gathered
from holdfast_sidecar.coordinator.watchdog import StragglerWatch

ROUND = RestartRound(0)
POLICY = Policy(interval_steps=10, straggler_factor=1.5, straggler_steps=20)
OFF = Policy(interval_steps=10)

Work = RankWork | None


def work(seconds: float, input_seconds: float = 0.1, parameters: int = 7) -> RankWork:
    return RankWork(input_seconds, seconds, parameters)


class Training:
    """A gang with one rank for each worker. A step takes 4 seconds unless the test says otherwise."""

    def __init__(self, ranks: int = 4, step_seconds: float = 4.0, policy: Policy = POLICY) -> None:
        self.gathered = Gathered(frozenset(map(Worker, range(ranks))), ranks, 0.0)
        self.watch = StragglerWatch(self.gathered)
        self.finished = 0
        self.step_seconds = step_seconds
        self.policy = policy
        self.changes = 0

    def train(self, steps: int, works: Sequence[Work]) -> list[int]:
        """Let the ranks finish these steps, with a look after each. Return the stragglers."""
        for _ in range(steps):
            self.finished += 1
            for rank, one in enumerate(works):
                self.report(rank, one)
            self.changes += self.watch.look(self.policy)
        return self.watch.ranks

    def report(self, rank: int, one: Work, dead: tuple[DeadRank, ...] = ()) -> None:
        progress = Progress(
            ROUND,
            Rank(rank),
            Step(100 + self.finished),
            finished=self.finished,
            step_seconds=self.step_seconds,
            work=one,
        )
        report = WorkerReport(ROUND, Worker(rank), progress=(progress,), dead=dead)
        self.gathered.receive(report, float(self.finished))


def gang(ranks: int = 4, **slow: Work) -> list[Work]:
    """Return the work of a gang. `r2=work(3.0)` sets that of rank 2."""
    works: list[Work] = [work(1.0)] * ranks
    for name, one in slow.items():
        works[int(name[1:])] = one
    return works


def test_a_rank_is_a_straggler_after_the_steps_of_the_policy() -> None:
    training = Training()
    assert training.train(20, gang(r2=work(2.1))) == []
    assert training.train(1, gang(r2=work(2.1))) == [2]
    assert training.watch.found == (Straggler(Rank(2), 2.0, Step(101), "Forward"),)
    assert training.changes == 1


JUDGED: Mapping[str, tuple[list[Work], list[int]]] = {
    "all are equal": (gang(), []),
    "one takes 1.4 times as long": (gang(r1=work(1.44)), []),
    "one takes 1.6 times as long": (gang(r1=work(1.66)), [1]),
    "one waits for its batches": (gang(r3=work(1.0, input_seconds=2.0)), [3]),
    "two of four": (gang(r0=work(3.0), r1=work(3.0)), [0, 1]),
    "three of four are the median": (gang(r0=work(3.0), r1=work(3.0), r2=work(3.0)), []),
    "one is faster": (gang(r1=work(0.1)), []),
    "one of two": (gang(ranks=2, r1=work(2.0)), [1]),
    "one rank": (gang(ranks=1), []),
    "stages of a pipeline have other work": (gang(r3=work(3.0, parameters=9)), []),
    "a slow replica of a stage": (
        [work(1.0), work(1.0), work(3.0, parameters=9), work(6.0, parameters=9)],
        [3],
    ),
    "a rank measures nothing": (gang(r0=None, r2=work(3.0)), [2]),
    "no rank measures anything": ([None] * 4, []),
    "its peers take no time": ([work(0.0, 0.0), work(0.0, 0.0), work(1.0, 0.0)], [2]),
}


@pytest.mark.fault("A rank is slower than the others (its forward passes, its batches)")
@pytest.mark.parametrize(("works", "stragglers"), JUDGED.values(), ids=JUDGED.keys())
def test_ranks_with_the_same_work_are_compared(works: list[Work], stragglers: list[int]) -> None:
    training = Training(len(works))
    assert training.train(25, works) == stragglers


@pytest.mark.parametrize(("seconds", "stragglers"), [(19.0, [1]), (21.0, [])])
def test_a_rank_that_delays_no_step_noticeably_is_none(
    seconds: float, stragglers: list[int]
) -> None:
    """Rank 1 takes ten times as long, which is one second: 5 % of a step of 20 seconds."""
    training = Training(step_seconds=seconds)
    works = [work(1.1, 0.0) if rank == 1 else work(0.1, 0.0) for rank in range(4)]
    assert training.train(25, works) == stragglers


def test_a_short_delay_is_none_and_the_steps_count_again() -> None:
    training = Training()
    assert training.train(19, gang(r2=work(3.0))) == []
    assert training.train(1, gang()) == []
    assert training.train(19, gang(r2=work(3.0))) == []
    assert training.train(2, gang(r2=work(3.0))) == [2]


def test_a_straggler_stays_one_until_it_is_clearly_faster() -> None:
    """A rank whose factor moves around the limit causes no Event again and again."""
    training = Training()
    training.train(25, gang(r2=work(2.1)))
    assert training.train(25, gang(r2=work(1.5))) == [2], "1.45 times the median"
    assert training.watch.found[0].factor == 1.45
    assert training.train(1, gang(r2=work(1.2))) == [], "1.18 times the median"
    assert training.train(15, gang(r2=work(2.1))) == [], "it was none for long enough"
    assert training.changes == 2


def test_the_part_of_the_step_that_is_slow_is_named() -> None:
    training = Training()
    training.train(25, gang(r1=work(1.5, input_seconds=4.0)))
    assert [s.slow_part for s in training.watch.found] == ["Input"]
    training.train(25, gang(r1=work(5.0, input_seconds=0.2)))
    assert [s.slow_part for s in training.watch.found] == ["Forward"]


def test_the_slowest_ranks_are_named_in_their_order() -> None:
    training = Training(50)
    works: list[Work] = [work(1.0)] * 50
    for rank in range(20):
        works[rank] = work(3.0 + rank)
    assert training.train(25, works) == list(range(4, 20))


def test_there_is_none_if_the_detection_is_off() -> None:
    training = Training(policy=OFF)
    assert training.train(50, gang(r2=work(9.0))) == []


def test_there_is_none_after_a_rank_has_ended() -> None:
    training = Training()
    training.train(25, gang(r2=work(3.0)))
    training.report(1, work(1.0), dead=(DeadRank(Rank(1), Worker(1), 1),))
    assert training.watch.look(POLICY)
    assert training.watch.found == ()
