"""A job that is rolled back: the operator's process, the API server and the command together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.operator.operator_bed import DIGEST, OperatorBed, training, training_job

from holdfast_core.ids import RestartRound, Step
from holdfast_core.messages.schema import RestorePoint

pytestmark = pytest.mark.integration
FORK = ("--to-new-job", "fork")


@pytest.mark.fault("A job is rolled back three times in a row while it trains")
def test_a_job_goes_back_by_the_command_three_times_in_a_row(empty_bed: OperatorBed) -> None:
    empty_bed.start_with_gang()
    refused = empty_bed.verb("restore", "gpt@3")
    assert refused.returncode == 5
    assert "no checkpoint of step 3 is known" in refused.stderr
    pods = empty_bed.pod_names()
    empty_bed.until("the commit", lambda: "lastCommittedStep" in empty_bed.status())
    step = str(empty_bed.status()["lastCommittedStep"])
    for round_ in (1, 2, 3):
        ended = empty_bed.verb("restore", f"gpt@{step}")
        assert ended.returncode == 0, ended.stderr
        empty_bed.until(
            f"round {round_}",
            lambda r=round_: (
                (s := empty_bed.status()).get("restartRound") == r and "restorePoint" in s
            ),
        )
        status = empty_bed.status()
        assert status["restorePoint"]["step"] == int(step)
        assert status["lineage"][-1]["base"].startswith(f"s{step}-r")
        assert empty_bed.condition("RolledBack")["status"] == "True"
    assert empty_bed.pod_names() == pods
    assert empty_bed.status()["restarts"] == 0


@pytest.mark.fault("A fork is made of a step that does not exist, or of a job without a store")
def test_a_job_without_a_store_is_not_forked(empty_bed: OperatorBed) -> None:
    empty_bed.start_operator()
    empty_bed.train(training_job())
    refused = empty_bed.verb("restore", "gpt", "--to-new-job", "fork")
    assert refused.returncode == 6
    assert "has no object store" in refused.stderr


@pytest.mark.fault("A fork is made of a step that does not exist, or of a job without a store")
def test_a_fork_starts_from_the_checkpoint_of_the_job(empty_bed: OperatorBed) -> None:
    empty_bed.start_operator()
    empty_bed.add_store()
    empty_bed.train(training_job(object={"storeRef": {"name": "main"}, "every": {"steps": 10}}))
    saved = RestorePoint(Step(40), RestartRound(0), DIGEST)
    empty_bed.kubelet.publish(
        empty_bed.pod(0, 0), replace(training(3, 0, 40), last_persisted=saved)
    )
    empty_bed.until(
        "the Checkpoint",
        lambda: empty_bed.verb("restore", "gpt", *FORK, "--dry-run").returncode == 0,
    )
    refused = empty_bed.verb("restore", "gpt@3", *FORK)
    assert "step 3 of job gpt" in refused.stderr
    ended = empty_bed.verb("restore", "gpt", *FORK)
    assert ended.returncode == 0, ended.stderr
    assert empty_bed.verb("restore", "gpt", *FORK).returncode == 6, "it exists"
    empty_bed.until("the first round", lambda: "restartRound" in empty_bed.status("fork"))
    assert empty_bed.condition("Accepted", "fork")["status"] == "True"
    assert empty_bed.status()["restartRound"] == 0, "its source stays as it is"
