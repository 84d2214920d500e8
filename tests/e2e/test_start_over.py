"""Loss of every copy of the only checkpoint of a job without a store.

The same loss while a store is away is in test_lost_nodes.py, because it cuts off nodes.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace

from testbed.driver.command_line import run_holdfast
from testbed.driver.jobs import Job
from testbed.driver.scenario import SHORT


def _restart(job: Job) -> subprocess.CompletedProcess[str]:
    """Run `kubectl holdfast restart JOB --from-start --yes`."""
    return run_holdfast(job.namespace, "restart", job.name, "--from-start", "--yes")


def test_a_job_that_may_not_start_over_waits_for_one_command(scenario):
    never = {"failurePolicy": {"maxRestarts": 30, "window": "1h", "startOver": {"atMost": "0s"}}}
    slow = replace(SHORT, sleep_per_step=0.8)  # the pods must be lost during the run
    job = scenario.start(slow, object_every=None, more=never)
    job.wait_replicated(10)
    job.wait("the commit in the status", lambda: "lastCommittedStep" in job.status)
    refused = _restart(job)
    assert refused.returncode == 6, refused.stderr
    assert "would lose step" in refused.stderr, refused.stderr
    job.lose_a_shard_and_its_copy()
    lost = job.wait_condition("CheckpointsLost")
    assert f"holdfast restart {job.name}" in lost["message"]
    ended = _restart(job)
    assert ended.returncode == 0, ended.stderr
    _restart(job)  # it starts over once, whatever the second command meets
    job.wait_round(1)
    job.wait_condition("CheckpointsLost", "False")
    assert job.status["lineage"] == [{"round": 1}], "it started over once"
    scenario.finish_and_judge(job)
