"""`restart JOB --from-start` starts over a job that waits for it, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_cli.gangs import obstacle_to_start_over

LOST = "step 15 was committed, but every copy of one of its shards is lost"


def job(*conditions: str, **changes: Any) -> dict[str, Any]:
    """Return a job. A condition is written as type=status:reason:message."""
    found = []
    for text in conditions:
        kind, _, rest = text.partition("=")
        value, reason, message = rest.split(":", 2)
        found.append({"type": kind, "status": value, "reason": reason, "message": message})
    lineage = [{"round": 0}] if found else []
    status = {"step": 17, "conditions": found, "lineage": lineage}
    return {
        "kind": "TrainingJob",
        "metadata": {"name": "gpt"},
        "spec": {},
        "status": status,
    } | changes


WAITS = ("Running=False:CheckpointsLost:lost", f"CheckpointsLost=True:CheckpointsLost:{LOST}")


def test_a_job_that_waits_for_it_is_started_over() -> None:
    assert obstacle_to_start_over(job(*WAITS)) is None


@pytest.mark.fault("A start over is asked of a job that is over, deleted, suspended or training")
@pytest.mark.parametrize(
    ("gang", "expected"),
    [
        pytest.param(
            job(*WAITS, metadata={"name": "gpt", "deletionTimestamp": "now"}),
            "is being deleted: create another job",
            id="being deleted",
        ),
        pytest.param(
            job(*WAITS, "Failed=True:Deadline:late"), "is over (Failed): create a new job", id="failed"
        ),
        pytest.param(
            job("Complete=True:Completed:done"), "is over (Complete): create", id="complete"
        ),
        pytest.param(
            job("Accepted=False:NameTaken:Job gpt has the name of a pod"),
            "is not accepted: Job gpt has the name of a pod",
            id="another owner has its names",
        ),
        pytest.param(
            job(*WAITS, spec={"suspend": True}), "is suspended: set spec.suspend to false", id="suspend"
        ),
        pytest.param(
            job("Running=True:Training:all is well"), "would lose step 17 and all before", id="trains"
        ),
        pytest.param(
            job("Running=False:WaitingForHolders:worker 2 has not answered"),
            "WaitingForHolders: worker 2 has not answered",
            id="silence",
        ),
        pytest.param(
            job("Running=False:CheckpointMissing:restore the objects"),
            "CheckpointMissing: restore the objects",
            id="a checkpoint is missing",
        ),
        pytest.param(job(), "has not begun", id="new"),
    ],
)  # fmt: skip
def test_no_other_job_is(gang: dict[str, Any], expected: str) -> None:
    found = obstacle_to_start_over(gang)
    assert found is not None and expected in found
