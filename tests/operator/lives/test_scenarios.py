"""Complete lives of a job on the in-memory cluster, from creation to the end."""

from __future__ import annotations

from typing import Any

from tests.support.operator.builders import raw_job
from tests.support.operator.decisions import counting
from tests.support.operator.fake_cluster import FakeCluster, FakeNode
from tests.support.operator.oracle import broken_rules
from tests.support.operator.simulated_operator import SimulatedOperator

from holdfast_core.api import TrainingJob, TrainingJobStatus
from holdfast_core.ids import Rank, Worker
from holdfast_core.messages.schema import DeadRank
from holdfast_operator.model.job import PodPhase

OBJECT = {"storeRef": {"name": "main"}, "every": {"steps": 10}}


def build(workers: int = 3, total_steps: int = 100_000, **checkpoint: Any) -> FakeCluster:
    nodes = {f"node-{i}": FakeNode(f"node-{i}") for i in range(workers + 1)}
    job = raw_job(workers, checkpoint={"interval": {"steps": 5}, **checkpoint})
    return FakeCluster(job=job, nodes=nodes, total_steps=total_steps)


async def advance(
    cluster: FakeCluster, operator: SimulatedOperator, seconds: int
) -> TrainingJobStatus:
    for _ in range(seconds):
        await operator.run_pass()
        cluster.tick()
    return TrainingJob.from_dict(cluster.job).status


async def test_a_job_runs_to_its_end_and_keeps_its_last_checkpoints() -> None:
    cluster = build(total_steps=60, object=OBJECT, retention={"keepLast": 2})
    operator = SimulatedOperator(cluster)
    status = await advance(cluster, operator, 150)
    assert status.is_true("Complete")
    assert status.phase == "Succeeded"
    assert status.last_persisted is not None
    assert status.last_persisted.step == 60
    assert status.restarts == 0
    assert {p.view.phase for p in cluster.pods.values()} == {PodPhase.SUCCEEDED}
    assert {c.spec.step for c in cluster.checkpoints.values()} >= {60}
    assert len(cluster.checkpoints) <= 3
    assert {i.step for i in cluster.store.checkpoints} == {
        c.spec.step for c in cluster.checkpoints.values()
    }


async def test_a_lost_pod_comes_back_from_a_peer() -> None:
    cluster = build()
    operator = SimulatedOperator(cluster)
    before = await advance(cluster, operator, 40)
    assert before.is_true("Running")
    cluster.lose_pod("job-l2msg4-1-r0")
    after = await advance(cluster, operator, 15)
    assert after.is_true("Running")
    assert after.members == (0, 1, 0)
    assert after.restore_point is not None
    assert after.last_recovery is not None
    assert after.last_recovery.reason == "PodLost"
    assert "schedule" in after.last_recovery.phase_seconds
    assert after.last_recovery.lost_steps is not None
    assert counting(after) == 0
    assert sorted(cluster.pods) == ["job-l2msg4-0-r0", "job-l2msg4-1-r1", "job-l2msg4-2-r0"]
    assert broken_rules(cluster, copies=1) == []


async def test_a_dead_rank_restarts_in_place() -> None:
    cluster = build()
    operator = SimulatedOperator(cluster)
    await advance(cluster, operator, 40)
    uids = {p.view.uid for p in cluster.pods.values()}
    assert cluster.gang.run is not None
    cluster.gang.run.dead = (DeadRank(Rank(2), Worker(2), -9),)
    after = await advance(cluster, operator, 8)
    assert after.is_true("Running")
    assert after.restart_round == 1
    assert after.members == (0, 0, 0)
    assert {p.view.uid for p in cluster.pods.values()} == uids
    assert counting(after) == 1


async def test_nothing_is_written_while_nothing_happens() -> None:
    cluster = build()
    operator = SimulatedOperator(cluster)
    await advance(cluster, operator, 30)
    written = len(cluster.statuses)
    await advance(cluster, operator, 30)
    assert len(cluster.statuses) - written <= 4
