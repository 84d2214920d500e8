"""Loss of every copy of the only checkpoint, before its first upload."""

from __future__ import annotations

import subprocess
from dataclasses import replace

from testbed import faults
from testbed.driver.command_line import run_holdfast
from testbed.driver.jobs import Job
from testbed.driver.kube import condition
from testbed.driver.scenario import SHORT

SLOW = replace(SHORT, sleep_per_step=0.8)  # the pods must be lost during the run


def _lose_two(job: Job) -> None:
    """Delete two pods with their volumes, which are the only ones with the shard of one of them.

    Three workers are on two nodes, and a copy is never on the node of its shard. So the worker that is alone
    on its node has the copies of the two others.
    """
    nodes = [job.node_of(worker) for worker in range(3)]
    alone = next(worker for worker in range(3) if nodes.count(nodes[worker]) == 1)
    assert len(set(nodes)) == 2, f"the gang of three is on {nodes}, expected two nodes"
    job.kube.lose_pods(job.namespace, [job.pod_name(w) for w in (alone, (alone + 1) % 3)])


def _is_waiting_for(job: Job, reason: str) -> bool:
    return condition(job.read(), "Running").get("reason") == reason


def _restart(job: Job) -> subprocess.CompletedProcess[str]:
    """Run `kubectl holdfast restart JOB --from-start --yes`."""
    return run_holdfast(job.namespace, "restart", job.name, "--from-start", "--yes")


def test_a_young_job_that_lost_everything_starts_over_by_itself(scenario):
    """While the store is away, it may have a checkpoint: the gang waits for its answer."""
    with faults.store_down(nodes=scenario.nodes):
        job = scenario.start(SLOW)
        job.wait_replicated(10)
        job.wait("the commit in the status", lambda: "lastCommittedStep" in job.status)
        _lose_two(job)
        job.wait("the store's answer", lambda: _is_waiting_for(job, "WaitingForStore"))
    job.wait_round(1)
    assert job.status["lineage"] == [{"round": job.round}], "it has no restore point"
    assert job.status["recoveries"][-1]["lostSteps"] >= 10
    job.wait(
        "the Event of the start over",
        lambda: "StartedOver" in {e["reason"] for e in job.kube.events(job.namespace)},
    )
    scenario.finish_and_judge(job)


def test_a_job_that_may_not_start_over_waits_for_one_command(scenario):
    never = {"failurePolicy": {"maxRestarts": 30, "window": "1h", "startOver": {"atMost": "0s"}}}
    job = scenario.start(SLOW, object_every=None, more=never)
    job.wait_replicated(10)
    job.wait("the commit in the status", lambda: "lastCommittedStep" in job.status)
    refused = _restart(job)
    assert refused.returncode == 6, refused.stderr
    assert "would lose step" in refused.stderr, refused.stderr
    _lose_two(job)
    lost = job.wait_condition("CheckpointsLost")
    assert f"holdfast restart {job.name}" in lost["message"]
    ended = _restart(job)
    assert ended.returncode == 0, ended.stderr
    _restart(job)  # it starts over once, whatever the second command meets
    job.wait_round(1)
    job.wait_condition("CheckpointsLost", "False")
    assert job.status["lineage"] == [{"round": 1}], "it started over once"
    scenario.finish_and_judge(job)
