"""The retry wrapper: what it retries, how long it waits, when it gives up."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.clock import ManualClock
from tests.support.hang import HANG_SECONDS

from holdfast_core.errors import AccessDeniedError, HoldfastError, NotFoundError, UnavailableError
from holdfast_core.store.s3.errors import Retrier, RetryPolicy


@dataclass
class Flaky:
    """A function that raises the given errors in order and then returns 42."""

    errors: list[Exception]
    calls: int = field(default=0)

    def __call__(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return 42


def longest(low: float, high: float) -> float:
    return high


def make(policy: RetryPolicy, waits: list[float], clock: ManualClock) -> Retrier:
    def sleep(seconds: float) -> None:
        waits.append(seconds)
        clock.advance(seconds)

    return Retrier(policy, clock, longest, sleep)


def test_waits_double_up_to_the_cap() -> None:
    waits: list[float] = []
    policy = RetryPolicy(max_attempts=9, budget_seconds=1000, base_seconds=1, cap_seconds=10)
    retrier = make(policy, waits, ManualClock())
    operation = Flaky([UnavailableError("503")] * 6)
    assert retrier.call("it", operation) == 42
    assert waits == [1, 2, 4, 8, 10, 10]


@pytest.mark.parametrize(
    "error", [AccessDeniedError("403"), NotFoundError("404")], ids=["denied", "absent"]
)
def test_an_error_that_is_not_retryable_is_raised_at_once(error: HoldfastError) -> None:
    waits: list[float] = []
    operation = Flaky([error])
    with pytest.raises(type(error)) as caught:
        make(RetryPolicy(), waits, ManualClock()).call("it", operation)
    assert caught.value is error
    assert (operation.calls, waits) == (1, [])


def test_attempts_are_limited_and_the_last_error_is_raised() -> None:
    operation = Flaky([UnavailableError(f"failure {n}") for n in range(9)])
    retrier = make(RetryPolicy(max_attempts=3), [], ManualClock())
    with pytest.raises(UnavailableError, match=r"put of x: given up after 3 attempt.*failure 2"):
        retrier.call("put of x", operation)
    assert operation.calls == 3


def test_no_attempt_begins_after_the_budget() -> None:
    waits: list[float] = []
    policy = RetryPolicy(max_attempts=99, budget_seconds=10, base_seconds=4, cap_seconds=4)
    operation = Flaky([UnavailableError("503")] * 50)
    with pytest.raises(UnavailableError):
        make(policy, waits, ManualClock()).call("it", operation)
    assert waits == [4, 4]


def test_a_stop_ends_a_wait_and_all_retries() -> None:
    stop = threading.Event()
    policy = RetryPolicy(budget_seconds=1e6, base_seconds=1e5, cap_seconds=1e5)
    retrier = Retrier(policy, uniform=longest, stop=stop)
    waiting = threading.Event()

    def operation() -> None:
        waiting.set()
        raise UnavailableError("503")

    raised: list[BaseException] = []

    def run() -> None:
        try:
            retrier.call("it", operation)
        except UnavailableError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert waiting.wait(HANG_SECONDS)
    stop.set()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()
    assert len(raised) == 1


@given(failures=st.integers(1, 10_000), cap=st.floats(0.1, 100))
def test_the_ceiling_is_positive_and_never_above_the_cap(failures: int, cap: float) -> None:
    assert 0 < RetryPolicy(cap_seconds=cap).ceiling_seconds(failures) <= cap


@pytest.mark.parametrize(
    ("found", "expected", "looks"),
    [
        ([42], 42, 1),
        ([None, 42], 42, 2),
        ([None, None, 42], 42, 3),
        ([None, None, None, 42], None, 3),
    ],
    ids=["at-once", "second", "third", "never"],
)
def test_an_absent_object_is_requested_a_few_times(
    found: list[int | None], expected: int | None, looks: int
) -> None:
    waits: list[float] = []
    seen: list[int | None] = []

    def operation() -> int | None:
        seen.append(found[len(seen)])
        return seen[-1]

    assert make(RetryPolicy(), waits, ManualClock()).look("it", operation) == expected
    assert (len(seen), len(waits)) == (looks, looks - 1)


def test_an_outage_does_not_count_as_an_absence() -> None:
    waits: list[float] = []
    answers: list[UnavailableError | None] = [None, UnavailableError("503"), None, None]

    def operation() -> int | None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return None

    assert make(RetryPolicy(), waits, ManualClock()).look("it", operation) is None
    assert answers == []
