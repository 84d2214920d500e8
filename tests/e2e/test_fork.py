"""A fork of a job by `kubectl holdfast restore JOB --to-new-job NAME`."""

from __future__ import annotations

import subprocess
from dataclasses import replace

from testbed.driver.command_line import run_holdfast
from testbed.driver.jobs import Job
from testbed.driver.scenario import SHORT, Scenario

LONG = replace(SHORT, steps=120)


def fork(job: Job, name: str, step: int) -> subprocess.CompletedProcess[str]:
    """Run `kubectl holdfast restore JOB@STEP --to-new-job NAME --yes`."""
    words = ("restore", f"{job.name}@{step}", "--to-new-job", name, "--yes")
    return run_holdfast(job.namespace, *words)


def follow(scenario: Scenario, name: str) -> Job:
    job = Job(scenario.kube, scenario.namespace, name)
    scenario.jobs.append(job)
    return job.follow()


def test_a_fork_of_a_job_that_trains_ends_in_the_bits_of_its_source(scenario):
    source = scenario.start(LONG, object_every=10, keep_last=20)
    step = source.wait_persisted(20)["step"]
    refused = fork(source, "fork", 3)
    assert refused.returncode == 5, refused.stderr
    assert "step 3 of job gpt" in refused.stderr, refused.stderr
    ended = fork(source, "fork", step)
    assert ended.returncode == 0, ended.stderr
    again = fork(source, "fork", step)
    assert again.returncode == 6, again.stderr
    assert "exists already" in again.stderr, again.stderr
    forked = follow(scenario, "fork")
    forked.wait_round(0)
    point = forked.status["lineage"][0]
    assert point["base"].startswith(f"s{step}-r"), point
    forked.wait(
        "the source in condition Accepted",
        lambda: f"began from step {step}" in forked.wait_condition("Accepted")["message"],
    )
    scenario.finish_and_judge(source, LONG)
    scenario.finish_and_judge(forked, LONG)
