"""Jobs that are created again, forged pods, unreadable objects and operators with stale watches, on the
in-memory cluster with the operator's own edges."""

from __future__ import annotations

import asyncio
import copy
from random import Random
from typing import Any

import pytest
from tests.support.operator.builders import NAMESPACE, UID, raw_job
from tests.support.operator.fake_cluster import FakeCluster, FakeNode
from tests.support.operator.oracle import broken_rules
from tests.support.operator.simulated_operator import OPERATOR_NAMESPACE, SimulatedOperator, Trouble

from holdfast_core.api import TrainingJob, TrainingJobStatus
from holdfast_core.names import pod_name
from holdfast_operator.sidecars.certificates import ca_secret_name

OBJECT = {"storeRef": {"name": "main"}, "every": {"steps": 10}}
UNKNOWN = "Hibernating"


def build(total_steps: int = 100_000, **checkpoint: Any) -> FakeCluster:
    nodes = {f"node-{i}": FakeNode(f"node-{i}") for i in range(4)}
    job = raw_job(3, checkpoint={"interval": {"steps": 5}, **checkpoint})
    return FakeCluster(job=job, nodes=nodes, total_steps=total_steps)


async def advance(
    cluster: FakeCluster, operator: SimulatedOperator, seconds: int
) -> TrainingJobStatus:
    for _ in range(seconds):
        await operator.run_pass()
        cluster.tick()
    return TrainingJob.from_dict(cluster.job).status


def changes_of_job(cluster: FakeCluster) -> list[tuple[str, str]]:
    """Return the writes other than Events and the job's status."""
    return [
        (method, path)
        for method, path in cluster.api.requests
        if not path.endswith(("/events", "/trainingjobs/job/status"))
    ]


# --------------------------------------------------------------------------- created again


@pytest.mark.fault("A job is created again under its name while objects of the old one exist")
@pytest.mark.parametrize("restarts", [False, True], ids=["operator lives", "operator restarts"])
@pytest.mark.parametrize("after", [33, 150], ids=["in the middle", "complete"])
async def test_a_job_created_again_completes_while_the_old_one_is_still_going(
    after: int, restarts: bool
) -> None:
    cluster = build(total_steps=60, object=OBJECT)
    operator = SimulatedOperator(cluster)
    await advance(cluster, operator, after)
    left = {c.name: copy.deepcopy(c) for c in cluster.checkpoints.values()}
    assert left, "the old job has recorded commits of the same steps and rounds"
    old_pods = set(cluster.pods)
    cluster.create_job_again()
    if restarts:
        operator = SimulatedOperator(cluster)
    await advance(cluster, operator, 2)
    assert old_pods <= set(cluster.pods), "the old pods are not gone yet"
    status = await advance(cluster, operator, 150)
    assert status.is_true("Complete")
    assert status.last_persisted.step == 60
    assert status.restarts == 0
    assert {n: cluster.checkpoints.get(n) for n in left} == left
    own = {c.spec.step for c in cluster.checkpoints.values() if c.status.job_uid == cluster.uid}
    assert 60 in own
    await operator.sweep()
    assert cluster.api.names("secrets", OPERATOR_NAMESPACE) == {ca_secret_name(cluster.uid)}


@pytest.mark.fault("A job is created again while pods of the old one never end on a dead node")
async def test_a_job_created_again_starts_although_old_pods_never_end() -> None:
    """Their node is dead, so no kubelet confirms that they are deleted."""
    cluster = build()
    operator = SimulatedOperator(cluster)
    await advance(cluster, operator, 30)
    dead = cluster.pods[pod_name("job", UID, 0, 0)].view.node or ""
    cluster.nodes[dead].dead = True
    cluster.create_job_again()
    status = await advance(cluster, operator, 60)
    assert status.is_true("Running")
    assert pod_name("job", UID, 0, 0) in cluster.pods


@pytest.mark.fault("A job's `spec.restoreFrom` names a Checkpoint of the job before")
async def test_an_old_checkpoint_can_be_restored_by_name() -> None:
    cluster = build(object=OBJECT)
    operator = SimulatedOperator(cluster)
    await advance(cluster, operator, 40)
    (newest, *_) = sorted(cluster.checkpoints.values(), key=lambda c: -(c.spec.step or 0))
    cluster.job["spec"]["restoreFrom"] = {"checkpointRef": {"name": newest.name}}
    cluster.create_job_again()
    await advance(cluster, operator, 5)
    point = cluster.choices[0].status["restorePoint"]
    assert (point["step"], point["jobUid"]) == (newest.spec.step, UID)


# --------------------------------------------------------------------------- forged pods


@pytest.mark.fault("A user creates forged pods during a recovery, over a restart of the operator")
@pytest.mark.parametrize("restarts", [False, True], ids=["operator lives", "operator restarts"])
async def test_forged_pods_neither_stop_a_recovery_nor_cost_a_pod(restarts: bool) -> None:
    cluster = build()
    operator = SimulatedOperator(cluster)
    await advance(cluster, operator, 40)
    uids = {name: pod.view.uid for name, pod in cluster.pods.items()}
    for worker in range(3):
        for birth in (0, 1, 7):
            cluster.forge_pod("mallory", worker, birth, owned=True)
            cluster.forge_pod(NAMESPACE, worker, birth, name=f"forged-{worker}-{birth}")
            name = f"job-{worker}-r{birth}"
            cluster.forge_pod(NAMESPACE, worker, birth, owned=True, name=name)
    forged = cluster.forged_pods()
    if restarts:
        operator = SimulatedOperator(cluster)
    calm = await advance(cluster, operator, 10)
    assert calm.restart_round == 0
    assert {name: pod.view.uid for name, pod in cluster.pods.items()} == uids
    cluster.lose_pod(pod_name("job", UID, 1, 0))
    after = await advance(cluster, operator, 20)
    assert after.is_true("Running")
    assert after.members == (0, 1, 0)
    assert cluster.forged_pods() == forged
    assert broken_rules(cluster, copies=1) == []


# --------------------------------------------------------------------------- unreadable objects


@pytest.mark.fault("A TrainingJob holds a value of a newer release")
async def test_an_unreadable_job_keeps_everything_and_goes_on() -> None:
    cluster = build(object=OBJECT)
    operator = SimulatedOperator(cluster)
    await advance(cluster, operator, 40)
    secrets = cluster.api.names("secrets")
    cluster.job["status"]["phase"] = UNKNOWN
    cluster.touch_job()
    cluster.lose_pod(pod_name("job", UID, 1, 0))
    cluster.api.requests.clear()
    for current in (operator, SimulatedOperator(cluster)):
        for _ in range(20):
            await current.run_pass()
            cluster.tick()
        await current.sweep()
    assert changes_of_job(cluster) == []
    assert cluster.api.names("secrets") == secrets
    assert [e.reason for e in operator.events][-1] == "CannotRead"
    (readable,) = [c for c in cluster.job["status"]["conditions"] if c["type"] == "Readable"]
    assert readable["status"] == "False"
    assert readable["message"].startswith("status.phase: ")
    assert cluster.job["status"]["phase"] == UNKNOWN
    del cluster.job["status"]["phase"]
    cluster.touch_job()
    after = await advance(cluster, operator, 25)
    assert after.is_true("Running")
    assert after.is_true("Readable")
    assert after.members == (0, 1, 0)
    assert cluster.api.names("secrets", OPERATOR_NAMESPACE) == {ca_secret_name(UID)}
    assert broken_rules(cluster, copies=1) == []


@pytest.mark.fault("A TrainingJob is corrected, and gets the same unreadable value again")
async def test_a_job_that_is_unreadable_twice_for_one_reason_says_so_twice() -> None:
    cluster = build(object=OBJECT)
    operator = SimulatedOperator(cluster)
    await advance(cluster, operator, 40)
    found = []
    for _ in range(2):
        phase, cluster.job["status"]["phase"] = cluster.job["status"]["phase"], UNKNOWN
        cluster.touch_job()
        await operator.run_pass()
        known = {c["type"]: c["status"] for c in cluster.job["status"]["conditions"]}
        found.append(known["Readable"])
        cluster.job["status"]["phase"] = phase
        cluster.touch_job()
        after = await advance(cluster, operator, 5)
        assert after.is_true("Readable")
    assert found == ["False", "False"]


@pytest.mark.fault("A pod of a job cannot be parsed")
async def test_a_job_with_an_unreadable_pod_is_left_as_it_is() -> None:
    cluster = build()
    operator = SimulatedOperator(cluster)
    await advance(cluster, operator, 40)
    cluster.pods[pod_name("job", UID, 2, 0)].unreadable = True
    cluster.lose_pod(pod_name("job", UID, 1, 0))
    cluster.api.requests.clear()
    held = await advance(cluster, operator, 30)
    assert changes_of_job(cluster) == []
    assert held.restart_round == 0
    readable = held.condition("Readable")
    assert readable.is_false
    assert pod_name("job", UID, 2, 0) in readable.message
    cluster.pods[pod_name("job", UID, 2, 0)].unreadable = False
    after = await advance(cluster, operator, 25)
    assert after.is_true("Running")
    assert after.is_true("Readable")
    assert after.members == (0, 1, 0)


@pytest.mark.fault("Checkpoints cannot be parsed")
async def test_unreadable_checkpoints_are_neither_written_nor_deleted() -> None:
    cluster = build(object=OBJECT, retention={"keepLast": 2})
    operator = SimulatedOperator(cluster)
    await advance(cluster, operator, 40)
    hidden = cluster.api.all("checkpoints", NAMESPACE)
    for raw in hidden:
        raw["status"]["phase"] = UNKNOWN
        cluster.api.touch(raw)
    before = {raw["metadata"]["name"]: copy.deepcopy(raw) for raw in hidden}
    status = await advance(cluster, operator, 60)
    assert status.last_persisted.step > 40, "later commits are recorded"
    now = {raw["metadata"]["name"]: raw for raw in cluster.api.all("checkpoints", NAMESPACE)}
    assert {name: now.get(name) for name in before} == before


@pytest.mark.fault("A store or a node cannot be parsed")
@pytest.mark.parametrize("plural", ["checkpointstores", "nodes"])
async def test_one_unreadable_object_of_another_kind_does_not_stop_a_running_job(
    plural: str,
) -> None:
    cluster = build(object=OBJECT)
    operator = SimulatedOperator(cluster)
    before = await advance(cluster, operator, 30)
    for raw in cluster.api.all(plural):
        raw["spec" if plural == "checkpointstores" else "status"] = {"s3": 1, "conditions": 1}
        cluster.api.touch(raw)
    after = await advance(cluster, operator, 30)
    assert after.is_true("Running")
    assert after.restart_round == 0
    assert (after.step or 0) > (before.step or 0)


# --------------------------------------------------------------------------- stale watches


@pytest.mark.fault("An operator whose watch of the job is stuck meets pods of a higher round")
async def test_an_operator_that_is_behind_deletes_no_pod_of_a_higher_round() -> None:
    cluster = build()
    behind = SimulatedOperator(cluster)
    await advance(cluster, behind, 40)
    operator = SimulatedOperator(cluster)
    cluster.lose_pod(pod_name("job", UID, 1, 0))
    ahead = await advance(cluster, operator, 20)
    assert ahead.members == (0, 1, 0)
    pods = set(cluster.pods)
    # Its watch of the job is stuck, but its watch of the pods is not.
    behind.stuck.add("trainingjobs")
    cluster.api.requests.clear()
    await advance(cluster, behind, 20)
    assert set(cluster.pods) == pods
    assert "DELETE" not in [method for method, _ in cluster.api.requests]
    assert TrainingJob.from_dict(cluster.job).status.restart_round == 1
    behind.stuck.clear()
    after = await advance(cluster, behind, 20)
    assert after.is_true("Running")
    assert set(cluster.pods) == pods


@pytest.mark.fault("An operator that still sees a suspension meets the pods of the resumed job")
async def test_an_operator_that_still_sees_a_suspension_deletes_no_pod_of_the_resumed_job() -> None:
    """The operator deletes the pods of a suspended job without a status write that could conflict."""
    cluster = build(object=OBJECT)
    behind = SimulatedOperator(cluster)
    await advance(cluster, behind, 40)
    cluster.change_spec(suspend=True)
    paused = await advance(cluster, behind, 40)
    assert paused.is_true("Suspended")
    behind.stuck.add("trainingjobs")
    cluster.change_spec(suspend=False)
    resumed = await advance(cluster, SimulatedOperator(cluster), 30)
    assert resumed.is_true("Running")
    uids = {p.view.uid for p in cluster.pods.values()}
    await advance(cluster, behind, 20)
    assert {p.view.uid for p in cluster.pods.values() if p.view.alive} == uids


@pytest.mark.fault("An old backup of etcd does not know of newer pods")
async def test_pods_are_kept_when_an_old_backup_of_the_status_is_restored() -> None:
    """The pod of round 1 has copies that the restored status does not name."""
    cluster = build()
    operator = SimulatedOperator(cluster)
    await advance(cluster, operator, 40)
    old = copy.deepcopy(cluster.job["status"])
    cluster.lose_pod(pod_name("job", UID, 1, 0))
    await advance(cluster, operator, 20)
    cluster.job["status"] = old
    cluster.touch_job()
    uids = {p.view.uid for p in cluster.pods.values()}
    after = await advance(cluster, SimulatedOperator(cluster), 20)
    assert after.is_true("Running")
    assert after.restart_round == 2
    assert after.members == (0, 1, 0)
    assert {p.view.uid for p in cluster.pods.values()} == uids


@pytest.mark.fault("A job is deleted at any moment, while replies are lost and watches are old")
def test_no_authority_of_a_deleted_job_comes_back() -> None:
    """This holds for every unfinished pass: replies may be lost and watches may be stale."""

    async def scenario(seed: int) -> None:
        cluster = build()
        trouble = Trouble(Random(seed), stale_read=0.5, lost_reply=0.3)
        operators = [SimulatedOperator(cluster, trouble), SimulatedOperator(cluster, trouble)]
        for _ in range(seed % 9):
            for operator in operators:
                await operator.run_pass()
            cluster.tick()
        cluster.delete_job()
        for _ in range(20):
            for operator in operators:
                await operator.run_pass()
            cluster.tick()
        trouble.stale_read = trouble.lost_reply = 0.0
        for operator in operators:
            await operator.run_pass()
            await operator.sweep()
        assert cluster.api.names("secrets", OPERATOR_NAMESPACE) == set()

    for seed in range(40):
        asyncio.run(scenario(seed))


# --------------------------------------------------------------------------- deleted by hand


@pytest.mark.fault(
    "A round's certificate Secret is deleted while its pods start (also over a restart of the "
    "operator)"
)
@pytest.mark.parametrize("restarts", [False, True], ids=["operator lives", "operator restarts"])
async def test_a_certificate_secret_that_was_deleted_while_pods_start_comes_back(
    restarts: bool,
) -> None:
    cluster = build()
    operator = SimulatedOperator(cluster)
    cluster.hold_starts = True
    await advance(cluster, operator, 5)
    (secret,) = cluster.secrets
    cluster.api.remove("secrets", NAMESPACE, secret)
    if restarts:
        operator = SimulatedOperator(cluster)
    await advance(cluster, operator, 65)
    assert cluster.secrets == {secret}
    cluster.hold_starts = False
    status = await advance(cluster, operator, 20)
    assert status.is_true("Running")
    cluster.api.requests.clear()
    await advance(cluster, operator, 120)
    assert not [p for m, p in cluster.api.requests if m == "POST" and p.endswith("/secrets")]


@pytest.mark.fault("A foreign pod has the name of the next round's pod")
async def test_a_job_reports_that_it_waits_for_a_name_in_use() -> None:
    cluster = build()
    operator = SimulatedOperator(cluster)
    await advance(cluster, operator, 40)
    taken = pod_name("job", UID, 1, 1)
    cluster.forge_pod(NAMESPACE, 1, 1, name=taken)
    cluster.lose_pod(pod_name("job", UID, 1, 0))
    waiting = await advance(cluster, operator, 30)
    running = waiting.condition("Running")
    assert running.is_false
    assert taken in running.message
    assert "it has no controller" in running.message
    assert taken in cluster.api.names("pods", NAMESPACE), "it is left alone"
    cluster.api.remove("pods", NAMESPACE, taken)
    after = await advance(cluster, operator, 60)
    assert after.is_true("Running")
    assert after.restart_round == 1
