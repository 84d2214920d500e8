"""A limit that all threads share, with a clock of the test."""

from __future__ import annotations

import pytest

from holdfast_core.pacing import BURST_SECONDS, Throttle


class Time:
    """A clock that advances only in sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_without_a_limit_it_only_counts() -> None:
    time = Time()
    throttle = Throttle(lambda: time.now, time.sleep)
    for _ in range(100):
        throttle.take(1 << 20)
    assert time.now == 100.0
    assert throttle.moved_bytes == 100 << 20


def test_a_limit_holds_over_many_pieces() -> None:
    time = Time()
    throttle = Throttle(lambda: time.now, time.sleep)
    throttle.set_limit(1000.0)
    for _ in range(100):
        throttle.take(100)
    assert time.now - 100.0 == pytest.approx(10.0, abs=0.2)


def test_idle_time_is_not_saved_up() -> None:
    time = Time()
    throttle = Throttle(lambda: time.now, time.sleep)
    throttle.set_limit(1000.0)
    throttle.take(1)
    time.now += 3600
    start = time.now
    for _ in range(10):
        throttle.take(100)
    assert time.now - start >= 0.9 - BURST_SECONDS - 0.01


def test_a_limit_may_be_lifted_and_changed() -> None:
    time = Time()
    throttle = Throttle(lambda: time.now, time.sleep)
    throttle.set_limit(1.0)
    throttle.take(10)
    throttle.set_limit(None)
    start = time.now
    throttle.take(1 << 30)
    assert time.now == start
