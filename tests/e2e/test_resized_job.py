"""The number of workers changes while a job trains: by its spec, and by missing nodes if it is elastic."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from testbed.driver.jobs import Training
from testbed.driver.kube import Kube

SCRIPT = """
import hashlib, json, os, sys, time
import torch, torch.distributed as dist
from torch import nn
import holdfast

steps, pause = int(sys.argv[1]), float(sys.argv[2])
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(1)
model = nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = {"model": model, "optim": optimizer}
with holdfast.Checkpointer() as ckpt:
    for step in ckpt.steps(steps, state):
        # Every rank has the same batch, so that the state does not depend on the number of ranks.
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()
        time.sleep(pause)
    finished = not ckpt.stopping
if finished:
    values = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    found = hashlib.sha256(b"".join(v.detach().numpy().tobytes() for v in values)).hexdigest()
    print(json.dumps({"finalDigest": found, "rank": rank, "step": steps}), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@dataclass(frozen=True, slots=True)
class Same(Training):
    """A training whose final bits do not depend on the number of ranks."""

    def command(self) -> list[str]:
        launch = 'printf %s "$0" > /tmp/same.py && exec holdfast run -- python3 /tmp/same.py "$@"'
        return ["sh", "-c", launch, SCRIPT, str(self.steps), str(self.sleep_per_step)]

    @property
    def arithmetic(self) -> tuple[int, ...]:
        return (self.workers, self.steps, zlib.crc32(SCRIPT.encode()))


def _resize(scenario, job, workers: int) -> None:
    """Set the number of workers and wait until a gang of this size has trained."""
    before = job.round
    scenario.kube.patch(job.KIND, job.namespace, job.name, {"spec": {"workers": workers}})

    def trains() -> bool:
        status = job.status
        conditions = {c["type"]: c for c in status.get("conditions", [])}
        over = conditions.get("Resizing", {}).get("reason") == "Resized"
        running = conditions["Running"]["status"] == "True"
        new = status["restartRound"] > before and len(status["members"]) == workers
        return new and running and over and conditions["Resizing"]["status"] == "False"

    job.wait(f"training with {workers} workers", trains, 180)
    record = job.status["recoveries"][-1]
    assert (record["reason"], record["lostSteps"]) == ("Resized", 0), record
    assert job.round == before + 1


def test_two_workers_become_three_and_two_again(scenario):
    training = Same(workers=2, steps=600, sleep_per_step=0.15)
    job = scenario.start(training, interval=50, object_every=100)
    job.wait_step(20)
    _resize(scenario, job, 3)
    grown = job.status["restorePoint"]
    assert grown["sources"]["object"] == 2, "the shards of the two ranks before"
    job.wait_step(grown["step"] + 20)
    _resize(scenario, job, 2)
    shrunk = job.status["restorePoint"]
    assert shrunk["step"] >= grown["step"] + 20
    assert shrunk["sources"]["object"] == 3
    assert job.status["restarts"] == 0
    scenario.finish_and_judge(job, training)


POOL = "example.com/elastic-pool"


@contextmanager
def _pool_of_three_nodes(kube: Kube) -> Iterator[list[str]]:
    """Label three nodes, and yield their names."""
    nodes = [node.metadata.name for node in kube.core.list_node().items]
    workers = sorted(name for name in nodes if "control-plane" not in name)[:3]
    try:
        for name in workers:
            _in_pool(kube, name, True)
        yield workers
    finally:
        for name in workers:
            _in_pool(kube, name, False)


def _in_pool(kube: Kube, node: str, is_in: bool) -> None:
    value = "yes" if is_in else None
    kube.core.patch_node(node, {"metadata": {"labels": {POOL: value}}})


def _placeholders(scenario) -> list[str]:
    names = (pod["metadata"]["name"] for pod in scenario.kube.pods(scenario.namespace))
    return [name for name in names if "placeholder" in name]


def _wait_workers(job, workers: int, reason: str) -> None:
    def trains() -> bool:
        status = job.status
        conditions = {c["type"]: c for c in status.get("conditions", [])}
        record = (status.get("recoveries") or [{}])[-1]
        running = conditions["Running"]["status"] == "True"
        return running and len(status["members"]) == workers and record.get("reason") == reason

    job.wait(f"training with {workers} workers", trains, 240)


@pytest.mark.timeout(600)  # it waits for two time-outs, and trains between them
def test_an_elastic_gang_continues_without_a_node_and_grows_when_it_is_back(scenario):
    training = Same(workers=3, steps=700, sleep_per_step=0.15)
    apart = {
        "labelSelector": {"matchExpressions": [{"key": "holdfast.dev/job", "operator": "Exists"}]},
        "topologyKey": "kubernetes.io/hostname",
    }
    pod = {
        "nodeSelector": {POOL: "yes"},
        "affinity": {
            "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
        },
    }
    elastic = {"elastic": {"min": 2, "shrinkAfterSeconds": 30, "growAfterSeconds": 60}}
    with _pool_of_three_nodes(scenario.kube):
        job = scenario.start(training, interval=20, object_every=20, more=elastic, pod=pod)
        job.wait_step(20)
        node = job.node_of(1)
        job.wait_persisted(40)
        _in_pool(scenario.kube, node, False)
        scenario.kube.delete_pod(scenario.namespace, job.pod_name(1))
        _wait_workers(job, 2, "Shrunk")
        job.wait("two ready workers", lambda: job.status["workers"]["summary"] == "2/3", 60)
        missing = job.wait_condition("WorkersMissing")
        assert missing["reason"] == "Shrunk"
        job.wait("a placeholder", lambda: _placeholders(scenario), 180)
        _in_pool(scenario.kube, node, True)
        _wait_workers(job, 3, "Grown")
        assert job.status["restarts"] == 1, "only the lost pod counts"
        job.wait("the end of the placeholders", lambda: not _placeholders(scenario), 60)
        scenario.finish_and_judge(job, training)
