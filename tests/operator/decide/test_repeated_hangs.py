"""A gang that hangs at one step in each round gets longer limits, and its user learns what to announce."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.operator.builders import job, now, pod, sidecar, status
from tests.support.operator.decisions import begun, of_kind
from tests.support.operator.progress import progress_of

from holdfast_core.api import HangsStatus, RestorePointStatus, TrainingJobStatus, changed
from holdfast_core.ids import Rank, RestartRound, Worker
from holdfast_core.messages.schema import CoordinatorState
from holdfast_operator.decide.decide import decide
from holdfast_operator.model.actions import WriteStatus
from holdfast_operator.model.job import JobMemory, Observed

TEXT = "no rank has finished a step for 61 s; rank 1 did not arrive: evaluate (train.py:9)"


def gang(step: int, hangs: HangsStatus | None = None, *, hung: bool = True) -> Observed:
    """Return a gang of two ranks that have finished `step`."""
    pods = (pod(0), pod(1))
    known = status(
        2, (0, 0), restore_point=RestorePointStatus(), coordinator=Worker(0), hangs=hangs
    )
    if hangs is not None:
        known = known.with_condition("HangsRepeat", True, "Hung", TEXT, now().utc)
    return Observed(
        job=job(2, known),
        pods=pods,
        sidecars=tuple(sidecar(p, 2, version=1) for p in pods),
        coordinator=CoordinatorState(
            version=7,
            round=RestartRound(2),
            running=True,
            progress=progress_of(step, step),
            hang=TEXT if hung else "",
            late=(Rank(1),) if hung else (),
        ),
        memory=JobMemory(round=RestartRound(2), round_seen_at=0.0),
    )


def after_hang(observed: Observed) -> TrainingJobStatus:
    new = begun(decide(observed, now()))
    return new.status


def condition(found: TrainingJobStatus) -> tuple[bool, str]:
    known = found.condition("HangsRepeat")
    return known.is_true, known.message


def sent_factor(known: TrainingJobStatus) -> float:
    """Return the factor in ROUND of a round with this status."""
    observed = gang(30, hung=False)
    ready = changed(
        known, members=(0, 0), restore_point=RestorePointStatus(), coordinator=Worker(0)
    )
    found = replace(
        observed,
        job=changed(observed.job, status=ready),
        sidecars=tuple(sidecar(p, known.restart_round) for p in observed.pods),
        coordinator=None,
        memory=JobMemory(round=known.restart_round),
    )
    rounds = of_kind(decide(found, now()).actions, "call /v1/round")
    return rounds[0].message.message.policy.hang_factor


@pytest.mark.fault("Ranks work for minutes without a step, unannounced")
def test_each_hang_at_the_same_step_doubles_the_limits_and_says_what_to_announce() -> None:
    first = after_hang(gang(44))
    assert first.hangs == HangsStatus(step=44, restarts=1)
    assert first.condition("HangsRepeat") is None, "nothing has repeated yet"
    assert sent_factor(first) == 2.0

    second = after_hang(gang(44, first.hangs))
    assert second.hangs == HangsStatus(step=44, restarts=2)
    is_true, text = condition(second)
    assert is_true
    assert "in 2 rounds in a row" in text
    assert "evaluate (train.py:9)" in text
    assert '`with checkpointer.paused("an evaluation"):`' in text
    assert "failurePolicy.hangs.seconds" in text
    assert sent_factor(second) == 4.0


def test_a_hang_before_the_step_of_the_last_one_counts_as_the_same() -> None:
    found = after_hang(gang(43, HangsStatus(step=44, restarts=2)))
    assert found.hangs == HangsStatus(step=44, restarts=3)


def test_a_hang_at_a_later_step_begins_the_count_again() -> None:
    found = after_hang(gang(60, HangsStatus(step=44, restarts=2)))
    assert found.hangs == HangsStatus(step=60, restarts=1)
    assert condition(found) == (False, "a step followed step 44")


def test_the_limits_are_as_before_when_the_gang_has_passed_the_step() -> None:
    known = HangsStatus(step=44, restarts=2)
    for step, passed in ((44, False), (45, True)):
        decision = decide(gang(step, known, hung=False), now())
        [write] = (a for a in decision.actions if isinstance(a, WriteStatus))
        assert (write.status.hangs is None) == passed
        assert condition(write.status)[0] != passed


def test_the_factor_is_bounded() -> None:
    assert sent_factor(after_hang(gang(44, HangsStatus(step=44, restarts=50)))) == 64.0
