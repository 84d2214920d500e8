"""The interval between saves as a time: what ranks get, and how often the job is expected to fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.operator.builders import job, now, pod, sidecar, status
from tests.support.operator.decisions import of_kind

from holdfast_core.api import GoodputStatus, RestorePointStatus, changed
from holdfast_core.api.checkpoint_policy import SaveInterval
from holdfast_core.contract import DEFAULT_MTBF_SECONDS
from holdfast_core.ids import Rank, RestartRound, Worker
from holdfast_core.messages.schema import CoordinatorState, DeadRank, Timing
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.gang import estimated_mtbf
from holdfast_operator.model.actions import BeginRound
from holdfast_operator.model.job import JobMemory, Observed

CHOSEN = status(1, (0, 1), restore_point=RestorePointStatus(), coordinator=Worker(0))
AUTO = SaveInterval(auto=True, mtbf="1h")
HOUR = 3600.0


def running(spec: SaveInterval, /, **status: object) -> Observed:
    pods = (pod(0), pod(1, 1))
    return Observed(
        job=job(2, changed(CHOSEN, **status), interval=spec),
        pods=pods,
        sidecars=tuple(sidecar(p, 1) for p in pods),
        memory=JobMemory(round=RestartRound(1), round_seen_at=900.0),
    )


def sent_timing(observed: Observed) -> Timing | None:
    return of_kind(decide(observed, now()).actions, "call /v1/round")[
        0
    ].message.message.policy.timing


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        pytest.param(SaveInterval(steps=10), None, id="steps"),
        pytest.param(SaveInterval(seconds=300), Timing(300.0, DEFAULT_MTBF_SECONDS), id="seconds"),
        pytest.param(AUTO, Timing(None, HOUR), id="auto"),
        pytest.param(SaveInterval(auto=True), Timing(None, DEFAULT_MTBF_SECONDS), id="no mtbf"),
    ],
)
def test_ranks_get_the_interval_of_the_spec(
    interval: SaveInterval, expected: Timing | None
) -> None:
    assert sent_timing(running(interval)) == expected


def failed(spec: SaveInterval, /, **status: object) -> BeginRound:
    """Return the round that begins after the death of a rank."""
    dead = CoordinatorState(5, RestartRound(1), dead=(DeadRank(Rank(1), Worker(1), 1, "boom"),))
    found = of_kind(
        decide(replace(running(spec, **status), coordinator=dead), now()).actions, BeginRound
    )
    return found[0]


def test_a_round_expects_failures_as_often_as_they_were() -> None:
    trained = GoodputStatus(ratio=1.0, training_seconds=8 * HOUR)
    begun = failed(AUTO, restarts=2, goodput=trained).status
    assert begun.restarts == 3
    assert begun.expected_mtbf_seconds == 9 * HOUR / 4


def test_the_expectation_stays_the_same_during_a_round() -> None:
    """Otherwise each pass would send a ROUND message with another policy."""
    trained = GoodputStatus(ratio=1.0, training_seconds=8 * HOUR)
    found = running(AUTO, expected_mtbf_seconds=1234.0, goodput=trained)
    assert sent_timing(found) == Timing(None, 1234.0)


@pytest.mark.parametrize("interval", [SaveInterval(steps=10), SaveInterval(seconds=60)])
def test_only_an_automatic_interval_has_an_expectation(interval: SaveInterval) -> None:
    """An interval that was automatic in the round before does not stay in the status."""
    begun = failed(interval, expected_mtbf_seconds=1234.0).status
    assert begun.expected_mtbf_seconds is None


@pytest.mark.parametrize(
    ("trained", "restarts", "expected"),
    [
        pytest.param(0.0, 0, HOUR, id="nothing is known"),
        pytest.param(9 * HOUR, 0, 10 * HOUR, id="no failure yet"),
        pytest.param(0.0, 1, HOUR / 2, id="one failure at the start"),
        pytest.param(99 * HOUR, 99, HOUR, id="as expected"),
        pytest.param(99 * HOUR, 999, HOUR / 10, id="ten times as many"),
    ],
)
def test_the_estimate_of_the_time_between_failures(
    trained: float, restarts: int, expected: float
) -> None:
    assert estimated_mtbf(HOUR, trained, restarts) == pytest.approx(expected)
