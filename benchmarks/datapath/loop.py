"""A loop that resembles training for a checkpointer: matrix products with some Python in between."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def training_step() -> Callable[[], None]:
    """Run a step of a few milliseconds.

    It uses one thread, so that a machine with two cores has one for the savers.
    """
    import torch

    torch.set_num_threads(1)
    weight = torch.randn(1024, 1024)
    batch = torch.randn(256, 1024)

    def step() -> None:
        for _ in range(4):
            (batch @ weight).relu_().sum().item()
        total = 0
        for i in range(2000):  # holds the interpreter lock, as a trainer's own code does
            total += i

    for _ in range(20):
        step()
    return step


def calibrated(step: Callable[[], None], seconds: float) -> int:
    """Return how many steps take about `seconds` at the machine's present speed."""
    began = time.perf_counter()
    count = 0
    while time.perf_counter() - began < min(seconds, 1.0):
        step()
        count += 1
    return max(1, round(count * seconds / (time.perf_counter() - began)))


def timed(step: Callable[[], None], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        step()
    return time.perf_counter() - began


@contextmanager
def busy_core() -> Iterator[None]:
    """Keep the last core that this process may use busy with another process."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
            yield
        finally:
            process.kill()
