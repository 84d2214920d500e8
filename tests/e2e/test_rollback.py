"""A person rolls a job back while it trains, by `kubectl holdfast restore`."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest
from testbed.driver.command_line import run_holdfast
from testbed.driver.jobs import Job
from testbed.driver.scenario import SHORT

LONG = replace(SHORT, steps=120, sleep_per_step=0.4)  # the rollbacks must hit the training


def restore(job: Job, step: int) -> subprocess.CompletedProcess[str]:
    """Run `kubectl holdfast restore JOB@STEP --yes`."""
    return run_holdfast(job.namespace, "restore", f"{job.name}@{step}", "--yes")


def roll_back(job: Job, step: int) -> None:
    """Roll the job back while it trains, and wait until it trains again."""
    before = job.round
    ended = restore(job, step)
    assert ended.returncode == 0, ended.stderr
    job.wait_round(before + 1)
    newest = job.status["lineage"][-1]
    assert newest["base"].startswith(f"s{step}-r"), newest
    assert newest["rolledBackFrom"] > step
    job.wait_condition("RolledBack")


@pytest.mark.long  # integration/operator/test_rollback.py and integration/sidecars show its parts
def test_a_job_that_is_rolled_back_three_times_ends_in_the_same_bits(scenario):
    """The reference run was never rolled back."""
    job = scenario.start(LONG, object_every=10, keep_last=10)
    base = job.wait_persisted(20)["step"]
    refused = restore(job, 3)
    assert refused.returncode == 5, refused.stderr
    assert "no checkpoint of step 3" in refused.stderr
    pods = job.pod_uids()
    for _ in range(3):
        job.wait_step(base + 8)
        roll_back(job, base)
    assert job.pod_uids() == pods, "the pods stay"
    assert job.status["restarts"] == 0
    assert [r["reason"] for r in job.status["recoveries"]] == ["RolledBack"] * 3
    job.wait_persisted(base + 10)
    scenario.finish_and_judge(job, LONG)
