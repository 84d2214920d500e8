"""The rate of background bytes adapts to a trainer whose steps they slow down."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from holdfast_core.pacing import OBSERVATIONS, TOLERATED_SLOWDOWN, AdaptiveRate

STEP_SECONDS = 0.1
DISK = 2.0e9
CHECKPOINT_BYTES = 1_000_000_000


def train(
    pace: AdaptiveRate, checkpoints: int, slowdown: Callable[[float], float], seed: int = 0
) -> float:
    """Run checkpoints and return the mean slowdown of the last one. `slowdown(rate)` is the share by which
    a step becomes longer."""
    noise = random.Random(seed)
    suffered = 0.0
    for _ in range(checkpoints):
        for _ in range(20):
            pace.step(STEP_SECONDS * noise.uniform(0.99, 1.01), 0)
        left, times = CHECKPOINT_BYTES, []
        while left > 0:
            rate = min(DISK, pace.limit or DISK)
            seconds = STEP_SECONDS * (1 + slowdown(rate)) * noise.uniform(0.99, 1.01)
            moved = min(left, int(rate * seconds))
            left -= moved
            times.append(seconds)
            pace.step(seconds, moved)
        suffered = sum(times) / len(times) / STEP_SECONDS - 1
    return suffered


def test_a_trainer_that_does_not_suffer_is_never_limited() -> None:
    pace = AdaptiveRate()
    train(pace, 50, lambda rate: 0.0)
    assert pace.limit is None


def test_the_rate_falls_until_the_trainer_hardly_suffers() -> None:
    pace = AdaptiveRate()
    suffered = train(pace, 60, lambda rate: rate / DISK)
    assert pace.limit < DISK / 10
    assert suffered < 3 * TOLERATED_SLOWDOWN


def test_it_never_falls_below_what_checkpoints_need() -> None:
    pace = AdaptiveRate()
    pace.floor = DISK / 2
    train(pace, 60, lambda rate: rate / DISK)
    assert pace.limit == pytest.approx(DISK / 2, rel=0.3)
    assert pace.limit >= pace.floor


def test_it_rises_again_when_the_machine_is_free() -> None:
    pace = AdaptiveRate()
    train(pace, 60, lambda rate: rate / DISK)
    train(pace, 200, lambda rate: 0.0)
    assert pace.limit is None


def test_without_undisturbed_steps_there_is_no_limit() -> None:
    """With a checkpoint at every step, there is no undisturbed step to compare with."""
    pace = AdaptiveRate()
    for _ in range(10 * OBSERVATIONS):
        pace.step(1.0, 1_000_000)
    assert pace.limit is None
    assert pace.quiet_step_seconds is None
