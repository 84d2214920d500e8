"""What the status shows of a job that has no gang any more."""

from __future__ import annotations

import pytest
from tests.support.operator.life import Life


@pytest.mark.parametrize("end", ["success", "failure", "suspension"])
def test_the_workers_column_says_what_is_true_of_a_job_without_a_gang(end: str) -> None:
    """Pods end one after another, and nothing writes the status for that. All workers of a success count."""
    life = Life(store=True, every=5, total_steps=40 if end == "success" else 1000)
    life.run(30)
    assert life.status.ready_workers == "4/4"
    if end == "failure":
        life.change_spec(failurePolicy={"maxRestarts": 0})
        life.rank_dies()
    if end == "suspension":
        life.change_spec(suspend=True)
    life.run(120)
    assert life.status.phase in ("Succeeded", "Failed", "Suspended")
    assert life.status.ready_workers == ("4/4" if end == "success" else "0/4")


def test_the_status_of_a_success_has_the_last_step_and_its_copy_in_the_store() -> None:
    life = Life(store=True, every=5, total_steps=40)
    life.run(150)
    assert life.status.phase == "Succeeded"
    assert (life.status.step, life.status.last_committed_step) == (40, 40)
    assert life.status.last_persisted.step == 40
