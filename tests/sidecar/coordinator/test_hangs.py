"""When a gang that finishes no step counts as hung, and which ranks the report names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast_core.ids import Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import DeadRank, Policy, Progress, RankStack, WorkerReport
from holdfast_sidecar.coordinator.gathered import Gathered
from holdfast_sidecar.coordinator.watchdog import HangWatch, find_late

ROUND = RestartRound(0)
WORKERS = 3
AUTO = Policy(interval_steps=10, hang_steps=10)
FIXED = Policy(interval_steps=10, hang_seconds=30.0)
OFF = Policy(interval_steps=10)
WAITS = "all_reduce (distributed_c10d.py:1) < train (train.py:9)"
SLEEPS = "sleep (train.py:5)"

Change = Callable[[WorkerReport], WorkerReport]


def unchanged(report: WorkerReport) -> WorkerReport:
    return report


def with_progress(**changes: object) -> Change:
    """Return a change of the rank's progress."""

    def change(report: WorkerReport) -> WorkerReport:
        (progress,) = report.progress
        return replace(report, progress=(replace(progress, **changes),))  # type: ignore[arg-type]

    return change


def on_worker(worker: int, change: Change) -> Change:
    return lambda report: change(report) if report.worker == worker else report


class Training:
    """A gang with one rank for each worker, whose reports arrive every second."""

    def __init__(self, policy: Policy = AUTO, step_seconds: float | None = 2.0) -> None:
        self.now = 1000.0
        self.gathered = Gathered(frozenset(map(Worker, range(WORKERS))), WORKERS, self.now)
        self.watch = HangWatch(self.gathered, "instance")
        self.policy = policy
        self.step_seconds = step_seconds
        self.finished = 0
        self.stacks: dict[int, RankStack] = {}
        self.changed = 0

    def run(self, seconds: int, change: Change = unchanged, *, silent: int | None = None) -> None:
        """Let this time pass without a step. Worker `silent` sends no report."""
        for _ in range(seconds):
            self.now += 1.0
            self.report(change, silent)
            self.changed += self.watch.look(self.policy, self.now)

    def step(self, seconds: int = 1) -> None:
        self.finished += 1
        self.run(seconds)

    def report(self, change: Change, silent: int | None) -> None:
        for worker in range(WORKERS):
            if worker == silent:
                continue
            rank, step = Rank(worker), Step(self.finished)
            progress = Progress(
                ROUND, rank, step, finished=self.finished, step_seconds=self.step_seconds
            )
            token = self.watch.token if worker in self.stacks else ""
            report = WorkerReport(
                ROUND,
                Worker(worker),
                progress=(progress,),
                stacks_token=token,
                stacks=(self.stacks[worker],) if token else (),
            )
            self.gathered.receive(change(report), self.now)

    def answers(self, *stacks: RankStack) -> None:
        """Answer each request for stacks with these."""
        self.stacks = {s.rank: s for s in stacks}


def waiting(rank: int) -> RankStack:
    return RankStack(Rank(rank), WAITS, True, waits=True)


def sleeping(rank: int, *, moves: bool = False) -> RankStack:
    return RankStack(Rank(rank), SLEEPS, True, moves=moves)


def unknown(rank: int) -> RankStack:
    return RankStack(Rank(rank), "its process is stopped, in state T", is_known=False, stopped=True)


def elsewhere(rank: int) -> RankStack:
    """Return the stack of a rank that waits in another collective than the others."""
    return replace(waiting(rank), stack="barrier (distributed_c10d.py:2)")


def trained(policy: Policy = AUTO, step_seconds: float | None = 2.0) -> Training:
    """Return a gang that has trained, and whose rank 1 waits in another collective than the others."""
    training = Training(policy, step_seconds)
    training.answers(waiting(0), elsewhere(1), waiting(2))
    for _ in range(4):
        training.step()
    return training


@pytest.mark.parametrize(
    ("policy", "step_seconds", "limit"),
    [
        pytest.param(AUTO, 2.0, 60, id="ten short steps are less than a minute"),
        pytest.param(AUTO, 30.0, 300, id="ten long steps"),
        pytest.param(FIXED, None, 30, id="a fixed time"),
    ],
)
def test_a_gang_hangs_after_the_limit_and_names_the_late_rank(
    policy: Policy, step_seconds: float | None, limit: int
) -> None:
    training = trained(policy, step_seconds)
    training.run(limit - 1)
    assert training.watch.token == ""
    training.run(3)
    assert training.watch.late == (1,)
    assert f"the limit is {limit} s; rank 1 did not arrive: barrier (distrib" in training.watch.hang
    assert f"the others are in: {WAITS} (2 ranks)" in training.watch.hang
    training.run(20)
    assert training.changed == 1, "the report of a hang stays as it is"
    training.step()
    assert not training.watch.hang, "a step ends it"
    assert training.changed == 2


NOT_HUNG: dict[str, Callable[[], tuple[Training, Change]]] = {
    "it is off": lambda: (trained(OFF), unchanged),
    "too few steps were measured": lambda: (trained(AUTO, None), unchanged),
    "one rank has measured too few steps": lambda: (
        trained(),
        on_worker(2, with_progress(step_seconds=None)),
    ),
    "one rank evaluates": lambda: (trained(), on_worker(1, with_progress(paused="an evaluation"))),
    "a rank has not finished its first step": lambda: (
        trained(),
        on_worker(2, lambda report: replace(report, progress=())),
    ),
    "a worker's ranks have returned": lambda: (
        trained(),
        on_worker(0, lambda report: replace(report, done=True)),
    ),
    "a rank is dead": lambda: (
        trained(),
        on_worker(0, lambda r: replace(r, dead=(DeadRank(Rank(0), Worker(0), -9),))),
    ),
}


@pytest.mark.parametrize("case", NOT_HUNG)
def test_a_gang_does_not_hang_if(case: str) -> None:
    training, change = NOT_HUNG[case]()
    training.run(700, change)
    assert (training.watch.token, training.watch.hang) == ("", "")


@pytest.mark.fault("A sidecar is silent while the gang finishes no step")
def test_a_silent_sidecar_is_no_hang_and_the_time_counts_again_when_it_reports() -> None:
    training = trained()
    training.run(600, silent=2)
    assert (training.watch.token, training.watch.hang) == ("", "")
    training.run(40)
    assert training.watch.token == ""
    training.run(40)
    assert training.watch.hang


@pytest.mark.fault("The coordinator's process is stopped while the gang trains")
def test_the_time_in_which_the_coordinator_itself_was_stopped_does_not_count() -> None:
    training = trained()
    training.now += 300
    training.run(59)
    assert training.watch.token == ""
    training.run(4)
    assert training.watch.hang


def test_a_pause_that_ends_begins_the_time_again() -> None:
    training = trained()
    training.run(50)
    training.run(100, on_worker(0, with_progress(paused="a save")))
    training.run(58)
    assert training.watch.token == ""


@pytest.mark.parametrize(
    ("policy", "stack", "limit"),
    [
        pytest.param(AUTO, elsewhere(1), 60, id="all wait"),
        pytest.param(AUTO, unknown(1), 60, id="all wait but one, which is stopped"),
        pytest.param(FIXED, elsewhere(1), 30, id="a fixed time, all wait"),
        pytest.param(AUTO, sleeping(1), 600, id="one is elsewhere, and not at work"),
        pytest.param(AUTO, replace(unknown(1), stopped=False), 600, id="one has no stack"),
        pytest.param(AUTO, sleeping(1, moves=True), 1800, id="one is at work"),
        pytest.param(FIXED, sleeping(1), 30, id="a fixed time, one is elsewhere"),
        pytest.param(FIXED, sleeping(1, moves=True), 300, id="a fixed time, one is at work"),
    ],
)
@pytest.mark.parametrize("factor", [1, 2])
def test_only_a_gang_whose_ranks_all_wait_hangs_early(
    policy: Policy, stack: RankStack, limit: int, factor: int
) -> None:
    """Hangs that repeat make the limits of ranks longer that may be at work, and no other ones."""
    training = trained(replace(policy, hang_factor=float(factor)))
    training.answers(waiting(0), stack, waiting(2))
    all_wait = stack.waits or stack.stopped
    training.run((1 if all_wait else factor) * limit - 1)
    assert not training.watch.hang
    if limit >= 600:
        assert f"rank 1: {stack.stack}" in training.watch.at_work
        assert "Checkpointer.paused" in training.watch.at_work
    training.run(30)
    assert training.watch.late == (1,)


def test_a_rank_that_ends_its_work_and_waits_for_ever_hangs_with_the_next_look() -> None:
    training = trained()
    training.answers(waiting(0), sleeping(1, moves=True), waiting(2))
    training.run(100)
    assert not training.watch.hang
    training.answers(waiting(0), elsewhere(1), waiting(2))
    training.run(30)
    assert training.watch.hang


@pytest.mark.fault("A launcher does not answer the request for stacks")
def test_a_launcher_that_sends_no_stacks_delays_the_report_for_a_time() -> None:
    training = trained()
    training.answers(waiting(0), waiting(2))
    training.run(600)
    assert not training.watch.hang
    training.run(25)
    assert training.watch.late == (1,)
    assert "rank 1 did not arrive: its launcher sent no stack" in training.watch.hang


def stacks_of(*stacks: RankStack) -> dict[Rank, RankStack]:
    return {s.rank: s for s in stacks}


@pytest.mark.fault(
    "A rank stops in the middle of a collective, which ends on some of the others and not on the "
    "rest"
)
@pytest.mark.parametrize(
    ("steps", "stacks", "late"),
    [
        pytest.param((5, 4, 5), stacks_of(waiting(0), waiting(1)), (1,), id="fewer steps"),
        pytest.param(
            (5, 5, 5), stacks_of(sleeping(0), unknown(1), waiting(2)), (1,), id="no stack"
        ),
        pytest.param((5, 5, 5), {}, (), id="no stacks at all"),
        pytest.param(
            (4, 4, 5),
            stacks_of(waiting(0), unknown(1), waiting(2)),
            (1,),
            id="fewer steps, and one of these ranks has no stack",
        ),
        pytest.param(
            (4, 4, 5),
            stacks_of(waiting(0), sleeping(1), waiting(2)),
            (1,),
            id="fewer steps, and one of these ranks does not wait",
        ),
        pytest.param(
            (4, 4, 5),
            stacks_of(waiting(0), waiting(1), sleeping(2)),
            (0, 1),
            id="fewer steps, and all of these ranks wait",
        ),
        pytest.param((4, 4, 5), {}, (0, 1), id="fewer steps, and no stacks at all"),
        pytest.param(
            (5, 5, 5),
            stacks_of(sleeping(0), sleeping(1), waiting(2)),
            (0, 1),
            id="one waits in torch, most do not",
        ),
        pytest.param(
            (5, 5, 5),
            stacks_of(waiting(0), elsewhere(1), waiting(2)),
            (1,),
            id="another collective",
        ),
        pytest.param(
            (5, 5, 5), stacks_of(waiting(0), waiting(1), waiting(2)), (), id="the same place"
        ),
        pytest.param(
            (5, 5),
            stacks_of(waiting(0), replace(waiting(1), stack="barrier")),
            (),
            id="two collectives of two ranks",
        ),
    ],
)
def test_the_late_ranks(
    steps: tuple[int, ...], stacks: dict[Rank, RankStack], late: tuple[int, ...]
) -> None:
    found, _ = find_late({Rank(r): n for r, n in enumerate(steps)}, stacks, 61.0, 60.0)
    assert found == late


def test_the_message_of_a_large_gang_stays_short() -> None:
    steps = {Rank(r): 5 if r % 2 else 4 for r in range(4096)}
    stacks = {r: RankStack(r, f"f{r} ({'x' * 500})", True) for r in steps}
    late, text = find_late(steps, stacks, 61.0, 60.0)
    assert len(late) == 2048
    assert len(text) < 4096
    assert "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 2040 more did not arrive" in text
