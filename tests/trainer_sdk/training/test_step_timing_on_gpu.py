"""Forward passes on a real GPU are measured by its events, without a wait. Skipped without a GPU."""

from __future__ import annotations

import time

import torch
from tests.support.gpu import needs_gpu
from torch import nn

from holdfast.training.step_timing import FEWEST_STEPS, WARM_UP_STEPS, StepTiming

CYCLES = 20_000_000
"""Cycles of a forward pass, about 10 ms. A layer of this size takes the GPU some microseconds."""
ENOUGH = WARM_UP_STEPS + FEWEST_STEPS


class Layer(nn.Module):
    """A layer that keeps the GPU busy for this many cycles, and the host for none."""

    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.cycles = cycles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(self.cycles)
        return self.linear(x)


def measured(cycles: int, cycles_of_the_rest: int = 0) -> float:
    """Return the forward seconds of a rank whose steps also take other work after the forward pass."""
    model = Layer(cycles).cuda()
    work = StepTiming(time.monotonic)
    work.watch({"model": model})
    batch = torch.ones(1, 8, device="cuda")
    for _ in range(1 + ENOUGH):
        model(batch).sum().backward()
        torch.cuda._sleep(cycles_of_the_rest)
        torch.cuda.synchronize()
        work.finished()
    found = work.found
    return found.forward_seconds


@needs_gpu
def test_the_time_is_that_of_the_gpu() -> None:
    """The host only queues a pass, in microseconds."""
    once, thrice = measured(CYCLES), measured(3 * CYCLES)
    assert 2.0 < thrice / once < 4.0


@needs_gpu
def test_work_after_the_forward_pass_does_not_count() -> None:
    assert 0.5 < measured(CYCLES, cycles_of_the_rest=4 * CYCLES) / measured(CYCLES) < 2.0


@needs_gpu
def test_a_gpu_that_lags_is_not_waited_for() -> None:
    model = Layer(CYCLES).cuda()
    work = StepTiming(time.monotonic)
    work.watch({"model": model})
    batch = torch.ones(1, 8, device="cuda")
    for _ in range(1 + ENOUGH):
        model(batch).sum().backward()
        torch.cuda.synchronize()
        work.finished()
    torch.cuda._sleep(100 * CYCLES)
    event = torch.cuda.Event()
    event.record()
    model(batch).sum().backward()
    work.finished()
    assert not event.query(), "the rank has waited for its GPU"
    torch.cuda.synchronize()
    model(batch)
    work.finished()
    assert work.found is not None


@needs_gpu
def test_a_pass_in_a_captured_graph_is_not_timed() -> None:
    """A timed event in a captured graph would raise in the script's capture, or have no time."""
    model = nn.Linear(8, 8).cuda()
    batch = torch.ones(1, 8, device="cuda")
    work = StepTiming(time.monotonic)
    work.watch({"model": model})
    work.finished()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model(batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(batch)
    for _ in range(ENOUGH):
        graph.replay()
        torch.cuda.synchronize()
        work.finished()
    assert torch.isfinite(out).all()
    assert work.found is None
