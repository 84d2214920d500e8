"""A burst is allowed without a wait. After it, calls are spaced at a steady rate."""

from __future__ import annotations

from holdfast_operator.sidecars.client import Allowance


def test_a_burst_then_a_rate_then_a_burst_again() -> None:
    allowance = Allowance(burst=3, seconds_each=0.5)
    assert [allowance.wait_seconds(100.0) for _ in range(5)] == [0.0, 0.0, 0.0, 0.5, 1.0]
    assert allowance.wait_seconds(200.0) == 0.0
    assert [allowance.wait_seconds(200.0) for _ in range(3)] == [0.0, 0.0, 0.5]


def test_a_use_that_would_have_to_wait_is_not_taken() -> None:
    allowance = Allowance(burst=2, seconds_each=0.5)
    assert [allowance.try_use(100.0) for _ in range(4)] == [True, True, False, False]
    assert [allowance.try_use(100.5) for _ in range(2)] == [True, False]
    assert [allowance.try_use(200.0) for _ in range(3)] == [True, True, False]


def test_a_steady_use_below_the_rate_never_waits() -> None:
    allowance = Allowance(burst=1, seconds_each=0.5)
    assert {allowance.wait_seconds(n * 0.5) for n in range(100)} == {0.0}
