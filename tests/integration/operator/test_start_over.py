"""A job that has lost every checkpoint: the operator's process, the API server and the command together."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.operator.operator_bed import OperatorBed, training_job

pytestmark = pytest.mark.integration
RESTART = ("restart", "gpt", "--from-start")


def job_with(at_most: str) -> dict[str, Any]:
    job = training_job()
    job["spec"]["failurePolicy"] = {"startOver": {"atMost": at_most}}
    return job


def lose_everything(bed: OperatorBed) -> None:
    """Train until the status has a commit, and delete all pods with their volumes.

    No sidecar answers after the first pod is gone. Otherwise the round could have its restore point before
    the second one is gone, and that would begin another round.
    """
    bed.until("the commit", lambda: "lastCommittedStep" in bed.status())
    pods = [bed.pod(worker, 0) for worker in (0, 1)]
    for pod in pods:
        bed.kubelet.kill_sidecar(pod)
    for pod in pods:
        bed.kubelet.delete_pod(pod)
    bed.until("round 1", lambda: bed.status().get("restartRound") == 1)
    fresh = [bed.pod(worker, 1) for worker in (0, 1)]
    bed.until("new pods", lambda: bed.pod_names() == sorted(fresh))
    for name in fresh:
        bed.kubelet.run_pod(name)


@pytest.mark.fault("All copies of the only checkpoint are lost with pods and volumes")
def test_a_young_job_starts_over_by_itself(empty_bed: OperatorBed) -> None:
    empty_bed.start_operator()
    empty_bed.train(job_with("30m"))
    lose_everything(empty_bed)
    empty_bed.until("a start over", lambda: "restorePoint" in empty_bed.status())
    status = empty_bed.status()
    assert status["restorePoint"] == {}
    assert status["lineage"] == [{"round": 1}]
    assert status["recoveries"][-1]["lostSteps"] == 40
    assert "lastCommittedStep" not in status
    assert status["trainedSeconds"] == 0


@pytest.mark.fault("A start over is asked of a job that is over, deleted, suspended or training")
def test_a_job_that_may_not_waits_for_the_command(empty_bed: OperatorBed) -> None:
    empty_bed.start_operator()
    empty_bed.train(job_with("0s"))
    refused = empty_bed.verb(*RESTART)
    assert refused.returncode == 6
    assert "gpt trains" in refused.stderr
    lose_everything(empty_bed)
    lost = "CheckpointsLost"
    empty_bed.until("the wait", lambda: empty_bed.condition(lost).get("status") == "True")
    assert "restorePoint" not in empty_bed.status()
    ended = empty_bed.verb(*RESTART)
    assert ended.returncode == 0, ended.stderr
    empty_bed.until("a start over", lambda: "restorePoint" in empty_bed.status())
    assert empty_bed.status()["lineage"] == [{"round": 1}]
    empty_bed.until("the end of the wait", lambda: empty_bed.condition(lost)["status"] == "False")
    assert empty_bed.verb(*RESTART).returncode == 6, "it waits for nothing any more"
