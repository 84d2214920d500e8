"""A drill finds what was damaged in the object store, and the job restores the next older checkpoint."""

from __future__ import annotations

import io
import subprocess
from contextlib import closing
from dataclasses import replace

import pytest
from testbed.driver.command_line import run_holdfast
from testbed.driver.jobs import BUCKET, STORE_NAME, Job
from testbed.driver.kube import Kube, Object, condition, wait_for
from testbed.driver.scenario import SHORT
from testbed.driver.store import store_client

SLOW = replace(SHORT, sleep_per_step=0.7)  # the suspension must hit the run


def _checkpoints(job: Job) -> list[Object]:
    """Return the job's Checkpoints in the object store, the newest step first."""
    own = [
        item
        for item in job.kube.items("Checkpoint", job.namespace)
        if item["spec"]["jobRef"]["name"] == job.name
        and condition(item, "Persisted").get("status") == "True"
        and item["status"].get("phase") == "Committed"
    ]
    return sorted(own, key=lambda item: int(item["spec"]["step"]), reverse=True)


def _verify(job: Job, checkpoint: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `kubectl holdfast verify CHECKPOINT`."""
    return run_holdfast(job.namespace, "verify", checkpoint, *options)


def _damage(job: Job, checkpoint: Object) -> str:
    """Flip a byte in the middle of the shard of rank 1, and return the key."""
    step, round_ = int(checkpoint["spec"]["step"]), int(checkpoint["status"]["round"])
    folder = f"e2e/{job.namespace}/{job.uid}/shards/s{step:012d}-r{round_:06d}/rank000001-"
    store = store_client(job.kube)
    names = [str(o.object_name) for o in store.list_objects(BUCKET, folder, recursive=True)]
    name = next(n for n in names if n.endswith((".shard", ".pack")))
    with closing(store.get_object(BUCKET, name)) as reply:
        data = bytearray(reply.read())
    data[len(data) // 2] ^= 1
    store.put_object(BUCKET, name, io.BytesIO(bytes(data)), len(data))
    return name


@pytest.mark.fault("A drill finds damage in the object store of a real cluster")
def test_a_damaged_checkpoint_is_quarantined_and_the_next_older_one_is_restored(scenario):
    """The job is suspended meanwhile, so that only the store has its checkpoints."""
    job = scenario.start(SLOW)
    job.wait("two checkpoints in the store", lambda: len(_checkpoints(job)) >= 2)
    job.kube.patch("TrainingJob", job.namespace, job.name, {"spec": {"suspend": True}})
    job.wait_condition("Suspended")
    job.wait("no pods", lambda: not job.pods())
    newest, older = _checkpoints(job)[:2]
    intact = _verify(job, older["metadata"]["name"], "--restore", "--world-size", "2")
    assert intact.returncode == 0, intact.stderr + intact.stdout
    assert "assembled for 2 ranks: equal" in intact.stdout

    _damage(job, newest)
    bad = newest["metadata"]["name"]
    damaged = _verify(job, bad)
    assert damaged.returncode == 3, damaged.stderr + damaged.stdout
    assert "rank 1" in damaged.stdout
    found = job.kube.get("Checkpoint", job.namespace, bad)
    assert condition(found, "Verified")["status"] == "False"
    assert condition(found, "Quarantined")["reason"] == "Damaged"
    assert found["status"]["drill"]["bytes"] > 0
    text = f"would restore step {older['spec']['step']} of"
    job.wait(  # the Event is created after the status
        "the Event of the damage",
        lambda: any(
            e["reason"] == "Damaged" and text in e["message"]
            for e in job.kube.events(job.namespace)
        ),
    )

    before = job.round
    job.kube.patch("TrainingJob", job.namespace, job.name, {"spec": {"suspend": False}})
    resumed = job.wait(  # the suspended job has the one of its last round
        "a restore point of the next round",
        lambda: (s := job.status)["restartRound"] > before and "restorePoint" in s and s,
    )
    assert condition({"status": resumed}, "Quarantined")["status"] == "True"
    step, round_ = newest["spec"]["step"], newest["status"]["round"]
    assert resumed["quarantined"] == [f"s{step}-r{round_}"]
    assert resumed["restorePoint"]["step"] == older["spec"]["step"]
    scenario.finish_and_judge(job)


@pytest.mark.fault("A store is drilled from time to time on a real cluster")
def test_the_checkpoints_of_a_store_are_drilled_in_turn(scenario):
    job = scenario.start()
    verify = {"every": "1m", "sample": 2, "restore": True}
    job.kube.patch("CheckpointStore", job.namespace, STORE_NAME, {"spec": {"verify": verify}})
    try:
        wait_for(
            "a checkpoint that a drill has verified",
            lambda: _verified(job.kube, job.namespace),
            describe=job.describe,
        )
    finally:
        job.kube.patch("CheckpointStore", job.namespace, STORE_NAME, {"spec": {"verify": None}})
    scenario.finish_and_judge(job)


def _verified(kube: Kube, namespace: str) -> bool:
    items = kube.items("Checkpoint", namespace)
    states = {condition(item, "Verified").get("status") for item in items}
    assert "False" not in states, states
    return "True" in states
