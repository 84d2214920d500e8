"""The phase of a Checkpoint object, and the conditions that follow from it."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tests.support.operator.builders import START, condition, now

from holdfast_core.api import CheckpointCondition, CheckpointPhase, CheckpointStatus
from holdfast_operator.decide.checkpoints import with_phase


def true_conditions(status: CheckpointStatus) -> set[str]:
    return {c.type for c in status.conditions if c.is_true}


@pytest.mark.parametrize(
    ("phase", "persisted", "pinned", "expected"),
    [
        pytest.param(CheckpointPhase.IN_PROGRESS, False, False, set(), id="a save in progress"),
        pytest.param(CheckpointPhase.FAILED, False, True, {"Pinned"}, id="a request that failed"),
        pytest.param(
            CheckpointPhase.COMMITTED,
            True,
            True,
            {"Committed", "Replicated", "Persisted", "Restorable", "Pinned"},
            id="committed and pinned",
        ),
        pytest.param(
            CheckpointPhase.COMMITTED,
            False,
            False,
            {"Committed", "Replicated", "Restorable"},
            id="not in an object store",
        ),
        pytest.param(
            CheckpointPhase.DELETING,
            True,
            False,
            {"Committed", "Replicated", "Persisted"},
            id="being pruned",
        ),
    ],
)
def test_the_conditions_follow_from_the_phase(
    phase: CheckpointPhase, persisted: bool, pinned: bool, expected: set[str]
) -> None:
    status = with_phase(CheckpointStatus(), phase, now(), pinned=pinned, persisted=persisted)
    assert status.phase is phase
    assert true_conditions(status) == expected
    assert all(c.status != "Unknown" and c.reason for c in status.conditions)


def test_other_conditions_and_the_times_of_those_that_do_not_change_are_kept() -> None:
    before = CheckpointStatus(
        bytes=10,
        conditions=(
            condition(CheckpointCondition.COMMITTED, True, "Committed"),
            condition(CheckpointCondition.QUARANTINED, True, "NoProgress"),
        ),
    )
    after = with_phase(before, CheckpointPhase.COMMITTED, now(5.0), pinned=False, persisted=True)
    times = {c.type: c.last_transition_time for c in after.conditions}
    assert times["Committed"] == times["Quarantined"] == START
    assert times["Persisted"] == START + timedelta(seconds=5)
    assert after.is_true("Quarantined")
    assert after.bytes == 10
