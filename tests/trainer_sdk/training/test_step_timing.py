"""A rank measures what a step takes it by itself, without evaluations, pauses and waits for other ranks."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.clock import ManualClock
from tests.support.trainer.watched_sidecar import WatchedSidecar
from torch import nn

import holdfast
from holdfast.training.step_timing import (
    FEWEST_STEPS,
    MOST_PASSES,
    MOST_PENDING,
    MOST_UNITS,
    WARM_UP_STEPS,
    StepTiming,
    units_of,
)
from holdfast_core.messages.schema import Progress, RankWork

ENOUGH = WARM_UP_STEPS + FEWEST_STEPS


class Layer(nn.Module):
    """A layer whose forward pass takes this many seconds of the test's clock."""

    def __init__(self, clock: ManualClock, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.clock = clock
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.advance(self.seconds)
        return self.linear(x)


class Rank:
    """A rank that trains two layers. A batch takes 2 seconds, a layer 5, all after the forward pass 100."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.model = nn.Sequential(Layer(self.clock, 5.0), Layer(self.clock, 5.0))
        self.work = StepTiming(self.clock.monotonic)
        self.work.watch({"model": self.model, "step": 0})

    def forward(self, model: nn.Module | None = None) -> None:
        (model or self.model)(torch.ones(1, 3))

    def step(self, between: Callable[[], None] = lambda: None, passes: int = 1) -> None:
        self.clock.advance(2.0)
        between()
        for _ in range(passes):
            self.forward()
        self.clock.advance(100.0)
        self.work.finished()

    def train(self, between: Callable[[], None] = lambda: None, passes: int = 1) -> RankWork | None:
        """Train enough steps for a report, after the one before the first that is measured."""
        for _ in range(1 + ENOUGH):
            self.step(between, passes)
        return self.work.found


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_input_and_forward_passes_are_measured() -> None:
    rank = Rank()
    assert rank.train() == RankWork(2.0, 10.0, parameters(rank.model))


def test_the_first_steps_do_not_count() -> None:
    rank = Rank()
    rank.work.finished()
    for _ in range(ENOUGH - 1):
        rank.step()
    assert rank.work.found is None
    rank.step()
    assert rank.work.found is not None


def test_all_passes_of_a_step_count() -> None:
    """A script may accumulate gradients over several batches."""
    found = Rank().train(passes=3)
    assert (found.input_seconds, found.forward_seconds) == (2.0, 30.0)


class KeptMarks:
    """Counts the points in time that are kept, each of which is an event of a GPU."""

    def __init__(self) -> None:
        self.kept = weakref.WeakSet[Any]()

    def take(self) -> Any:
        mark = threading.Event()  # any object that may be referred to weakly
        self.kept.add(mark)
        return mark

    def is_done(self, mark: Any) -> bool:
        return True

    def seconds(self, start: Any, end: Any) -> float:
        return 1.0


@pytest.mark.fault("A script trains for hours and reports no step")
def test_a_step_of_endless_passes_takes_no_memory_and_does_not_count() -> None:
    model, marks = nn.Linear(3, 3), KeptMarks()
    work = StepTiming(ManualClock().monotonic, marks)
    work.watch({"model": model})
    for _ in range(2):  # before and after the first step that is finished
        for _ in range(2 * MOST_PASSES):
            model(torch.ones(1, 3))
            assert len(marks.kept) <= 2 * MOST_PASSES + 2
        work.finished()
    assert not marks.kept, "neither step counts"


def test_evaluations_do_not_count() -> None:
    rank = Rank()

    def evaluate() -> None:
        with torch.no_grad():
            rank.forward()
        rank.model.eval()
        rank.forward()
        rank.model.train()

    def announced() -> None:
        began = rank.clock.monotonic()
        evaluate()
        rank.work.paused(began)

    found = rank.train(announced)
    assert (found.input_seconds, found.forward_seconds) == (2.0, 10.0)


def test_a_save_at_the_end_of_a_step_does_not_count() -> None:
    """`save` reports its step within its own pause."""
    rank = Rank()

    def save() -> None:
        began = rank.clock.monotonic()
        rank.clock.advance(50.0)
        rank.work.finished()
        rank.clock.advance(50.0)
        rank.work.paused(began)

    for _ in range(1 + ENOUGH):
        rank.clock.advance(2.0)
        rank.forward()
        save()
    found = rank.work.found
    assert (found.input_seconds, found.forward_seconds) == (2.0, 10.0)


def test_a_step_without_a_forward_pass_does_not_count() -> None:
    rank = Rank()
    for _ in range(1 + 2 * ENOUGH):
        rank.clock.advance(2.0)
        rank.work.finished()
    assert rank.work.found is None


def test_a_forward_pass_that_raises_does_no_harm() -> None:
    rank = Rank()

    def fails() -> None:
        with pytest.raises(RuntimeError):
            rank.model(torch.ones(1, 4))

    found = rank.train(fails)
    assert found.forward_seconds == 10.0


def test_a_part_of_a_model_counts_once() -> None:
    rank = Rank()
    rank.work.watch({"model": rank.model, "head": rank.model[1], "again": rank.model})
    found = rank.train()
    assert found.forward_seconds == 10.0


def test_copies_of_the_model_are_not_measured() -> None:
    """The average of a model's weights is a copy of the model, and scripts pickle whole models."""
    rank = Rank()
    average, loaded = copy.deepcopy(rank.model), pickle.loads(pickle.dumps(rank.model))

    def others() -> None:
        rank.forward(average)
        rank.forward(loaded)

    found = rank.train(others)
    assert found.forward_seconds == 10.0


def test_nothing_is_measured_after_the_end_of_the_loop() -> None:
    rank = Rank()
    rank.work.watch({"again": [rank.model]})
    rank.work.stop()
    assert rank.train() is None


def test_a_compiled_model_is_still_one_graph() -> None:
    """With fullgraph=True, a hook that breaks the graph would end the training."""
    rank = Rank()
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    rank.work.watch({"model": model})
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(1, 3)), model(torch.ones(1, 3)))


def test_a_state_without_a_model_is_not_measured() -> None:
    rank = Rank()
    scripted = torch.jit.trace(nn.Linear(3, 3), torch.ones(1, 3))
    rank.work.watch({"w": torch.ones(3), "nested": ({"n": 1}, scripted)})
    assert rank.train() is None


class LaggingDevice:
    """A device that reaches a point in time only when the test lets it, and whose clock runs ten times as
    fast as that of the host."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.reached = float("inf")
        self.captures = False

    def take(self) -> float | None:
        return None if self.captures else self._clock.monotonic()

    def is_done(self, mark: float) -> bool:
        return mark <= self.reached

    def seconds(self, start: float, end: float) -> float:
        assert self.is_done(end), "a mark was read too early"
        return 10.0 * (end - start)


def on_device(rank: Rank) -> LaggingDevice:
    device = LaggingDevice(rank.clock)
    rank.work = StepTiming(rank.clock.monotonic, device)
    rank.work.watch({"model": rank.model})
    return device


def test_a_device_that_lags_is_read_when_it_is_done() -> None:
    rank = Rank()
    device = on_device(rank)
    device.reached = rank.clock.monotonic()
    assert rank.train() is None
    device.reached = float("inf")
    rank.step()
    assert rank.work.found is None, (
        f"{MOST_PENDING} steps have waited, of which the first do not count"
    )
    rank.step()
    rank.step()
    assert rank.work.found == RankWork(2.0, 100.0, parameters(rank.model))


def test_a_pass_that_is_captured_has_no_time() -> None:
    rank = Rank()
    device = on_device(rank)
    device.captures = True
    found = rank.train()
    assert found.forward_seconds == 0.0


def test_a_model_of_many_sharded_layers_has_few_hooks() -> None:
    from torch.distributed.fsdp import FSDPModule

    class Sharded(FSDPModule, nn.Linear):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return nn.Linear.__new__(cls)

    layers = [Sharded(1, 1) for _ in range(50)]
    found = units_of(nn.Sequential(*layers))
    assert len(found) == MOST_UNITS
    assert found[0] is layers[0]
    assert units_of(nn.Sequential(*layers[:2])) == layers[:2]


@pytest.mark.parametrize(("factor", "measures"), [(1.5, True), (0.0, False)])
def test_the_sidecar_receives_the_work_if_the_job_looks_for_stragglers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, measures: bool
) -> None:
    model = nn.Linear(3, 3)
    with WatchedSidecar(tmp_path / "shared", tmp_path / "node", straggler_factor=factor) as sidecar:
        for name, value in sidecar.environment(HOLDFAST_ROUND="0").items():
            monkeypatch.setenv(name, value)
        with holdfast.Checkpointer() as ckpt:
            for _ in ckpt.steps(1 + ENOUGH, {"model": model}):
                model(torch.ones(1, 3)).sum().backward()
        sidecar.wait_for(Progress)
        found = sidecar.messages(Progress)[-1].work
    assert (found is not None) == measures
    if found is not None:
        assert found.parameters == 12
