"""Objects of the API are parsed into views, and a status is unchanged after it is written and read."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.operator.builders import START, UID, condition, job, raw_job
from tests.support.operator.fake_cluster import FakeCluster

from holdfast_core.api import (
    GoodputStatus,
    JobPhase,
    LineageEntry,
    PersistedStep,
    RecoveryStatus,
    RestartRecord,
    RestorePointStatus,
    TrainingJob,
    TrainingJobStatus,
    merge_patch,
)
from holdfast_core.ids import CheckpointId, Digest, JobUid, RestartRound, Step, Worker
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.model import labels
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.job import PodPhase, Taint
from holdfast_operator.model.ownership import WorkerIdentity
from holdfast_operator.model.render import render_pod
from holdfast_operator.model.template import part_digests
from holdfast_operator.watch.records import (
    node_view,
    pod_view,
)

FULL = TrainingJobStatus(
    restart_round=RestartRound(3),
    members=(RestartRound(0), RestartRound(3)),
    coordinator=Worker(0),
    restore_point=RestorePointStatus(
        step=Step(0),
        round=RestartRound(2),
        job_uid=JobUid("other"),
        job_namespace="ns",
    ),
    lineage=(
        LineageEntry(round=RestartRound(0)),
        LineageEntry(round=RestartRound(3), base=CheckpointId(Step(0), RestartRound(2))),
    ),
    last_persisted=PersistedStep(step=Step(0), round=RestartRound(0), manifest=Digest("b3:b")),
    step=Step(0),
    last_committed_step=Step(0),
    last_replicated_step=Step(0),
    restarts=2,
    recent_restarts=(RestartRecord(round=RestartRound(3), at=START),),
    recoveries=(
        RecoveryStatus(
            round=RestartRound(3), reason="RankFailed", phase_seconds={"detect": 0.5}, lost_steps=0
        ),
    ),
    goodput=GoodputStatus(
        ratio=0.5,
        training_seconds=10.0,
        checkpoint_seconds=1.0,
        recovery_seconds=5.0,
        lost_work_seconds=2.0,
    ),
    ready_workers="1/2",
    start_time=START,
    completion_time=START,
    conditions=(condition("Accepted", None, "StoreNotProbed", "the message", START, 1),),
    phase=JobPhase.RESTARTING,
    observed_generation=4,
)


async def write(cluster: FakeCluster, status: TrainingJobStatus) -> None:
    meta = cluster.job["metadata"]
    patch, version = merge_patch(status), meta["resourceVersion"]
    kube = Cluster(cluster.api)
    await kube.patch_status(TrainingJob.KIND, meta["namespace"], meta["name"], version, patch)


@pytest.mark.parametrize("given", [FULL, TrainingJobStatus()], ids=["full", "empty"])
async def test_a_written_status_is_read_back_as_it_was(given: TrainingJobStatus) -> None:
    cluster = FakeCluster(job=raw_job(), nodes={})
    await write(cluster, FULL)
    await write(cluster, given)
    stored = cluster.job["status"]
    assert TrainingJobStatus.from_dict(stored) == given
    assert set(stored) <= set(given.to_dict())


async def test_a_restore_point_from_the_beginning_is_not_an_unset_one() -> None:
    cluster = FakeCluster(job=raw_job(), nodes={})
    chosen = TrainingJobStatus(restart_round=RestartRound(0), restore_point=RestorePointStatus())
    await write(cluster, chosen)
    assert TrainingJob.from_dict(cluster.job).status.restore_point == RestorePointStatus()


IDENTITY = WorkerIdentity("job", UID, Worker(1), RestartRound(3))


def raw_pod(status: dict[str, Any], **meta: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "job-l2msg4-1-r3",
            "uid": "u",
            **meta,
        },
        "spec": {"nodeName": "node-1"},
        "status": {"phase": "Running", **status},
    }


def trainer(**fields: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "trainer", **fields}]}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(raw_pod({"podIP": "10.0.0.1"}), {"ip": "10.0.0.1"}, id="address"),
        pytest.param(
            raw_pod({}, deletionTimestamp="2026-01-01T00:00:00Z"), {"terminating": True}, id="going"
        ),
        pytest.param(
            raw_pod({"phase": "Failed", "reason": "Evicted", "message": "disk"}),
            {"phase": PodPhase.FAILED, "reason": "Evicted", "message": "disk"},
            id="evicted",
        ),
        pytest.param(
            raw_pod(
                {
                    "conditions": [
                        {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByX"}
                    ]
                }
            ),
            {
                "disrupted": True,
                "reason": "PreemptionByX",
                "conditions": frozenset({("DisruptionTarget", "True")}),
            },
            id="disruption",
        ),
        pytest.param(
            raw_pod(
                trainer(
                    restartCount=2,
                    state={"running": {}},
                    lastState={"terminated": {"reason": "OOMKilled", "exitCode": 137}},
                )
            ),
            {"reason": "OOMKilled", "trainer_restarts": 2, "trainer_exit_code": None},
            id="restarted after OOM",
        ),
        pytest.param(
            raw_pod(trainer(state={"terminated": {"reason": "Error", "exitCode": 3}})),
            {"reason": "Error", "trainer_exit_code": 3},
            id="ended",
        ),
        pytest.param(
            raw_pod(
                trainer(state={"waiting": {"reason": "ImagePullBackOff", "message": "no such"}})
            ),
            {"waiting_reason": "ImagePullBackOff", "waiting_message": "no such"},
            id="image",
        ),
        pytest.param(
            raw_pod(trainer(state={"waiting": {"reason": "PodInitializing"}})),
            {"waiting_reason": None},
            id="only starting",
        ),
        pytest.param(
            raw_pod(
                {
                    "initContainerStatuses": [
                        {"name": "holdfast-sidecar", "started": True, "restartCount": 1}
                    ]
                }
            ),
            {"sidecar_started": True, "sidecar_restarts": 1},
            id="sidecar",
        ),
        pytest.param(
            raw_pod(
                {
                    "phase": "Pending",
                    "conditions": [
                        {
                            "type": "PodScheduled",
                            "status": "False",
                            "reason": "Unschedulable",
                            "message": "0/3 nodes",
                        }
                    ],
                }
            ),
            {"phase": PodPhase.PENDING, "reason": "Unschedulable", "message": "0/3 nodes"},
            id="unschedulable",
        ),
    ],
)
def test_pods(raw: dict[str, Any], expected: dict[str, Any]) -> None:
    view = pod_view(raw, IDENTITY)
    assert (view.worker, view.birth_round, view.node) == (1, 3, "node-1")
    assert {name: getattr(view, name) for name in expected} == expected


def test_nodes() -> None:
    raw = {
        "metadata": {"name": "n", "labels": {"zone": "a"}},
        "spec": {
            "taints": [
                {"key": "node.kubernetes.io/unreachable", "effect": "NoSchedule", "timeAdded": "x"},
                {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"},
                {"key": "node.kubernetes.io/memory-pressure", "effect": "NoSchedule"},
                {"key": "gpu", "value": "yes", "effect": "NoSchedule"},
                {"key": "better-not", "effect": "PreferNoSchedule"},
            ]
        },
        "status": {"conditions": [{"type": "KernelDeadlock", "status": "True", "reason": "x"}]},
    }
    view = node_view(raw)
    assert view.conditions == {("KernelDeadlock", "True")}
    assert (view.name, view.lost, view.labels) == ("n", False, {"zone": "a"})
    assert view.taints == {Taint("node.kubernetes.io/unreachable", "NoSchedule")}
    assert view.other_taints == {
        Taint("node.kubernetes.io/unreachable", "NoExecute"),
        Taint("node.kubernetes.io/memory-pressure", "NoSchedule"),
        Taint("gpu", "NoSchedule"),
    }
    assert node_view({"metadata": {"name": "n"}, "spec": {}}).taints == frozenset()


def test_a_pod_shows_its_memory_limit_and_the_nodes_that_it_excludes() -> None:
    limits = {"name": "trainer", "resources": {"limits": {"memory": "64Gi"}}}
    other = {"name": "logs", "resources": {"limits": {"memory": "1Gi"}}}
    marks = {labels.AVOIDED_NODES: "a,b", labels.FAILED_NODES: "c"}
    raw = raw_pod({}, annotations=marks)
    raw["spec"]["containers"] = [other, limits]
    view = pod_view(raw, IDENTITY)
    assert view.memory_limit == "64Gi"
    assert (view.avoided_nodes, view.failed_nodes) == ({"a", "b"}, {"c"})
    assert pod_view(raw_pod({}), IDENTITY).memory_limit is None


def test_a_pod_shows_the_spec_from_which_it_was_created_and_the_secret_that_it_mounts() -> None:
    known = job(2)
    raw = render_pod(
        known,
        Worker(0),
        RestartRound(0),
        None,
        SidecarSettings("i"),
        certificates="other-certs-0-r0",
    )
    view = pod_view({**raw, "status": {}}, IDENTITY)
    assert dict(view.rendered_from) == part_digests(known)
    assert view.certificates == "other-certs-0-r0"
    assert pod_view(raw_pod({}), IDENTITY).rendered_from == frozenset()


@pytest.mark.parametrize(
    ("container", "ran"),
    [
        pytest.param(None, False, id="no status yet"),
        pytest.param({"state": {"waiting": {"reason": "ImagePullBackOff"}}}, False, id="no image"),
        pytest.param({"state": {"running": {"startedAt": "x"}}}, True, id="it runs"),
        pytest.param({"state": {"terminated": {"reason": "Error"}}}, True, id="it ended"),
        pytest.param(
            {
                "restartCount": 3,
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {"terminated": {"reason": "StartError"}},
            },
            False,
            id="its command cannot be started",
        ),
        pytest.param({"restartCount": 1, "state": {"waiting": {}}}, True, id="it was restarted"),
    ],
)
def test_whether_the_trainer_of_a_pod_ever_ran(container: dict[str, Any] | None, ran: bool) -> None:
    statuses = [] if container is None else [{"name": "trainer", **container}]
    assert pod_view(raw_pod({"containerStatuses": statuses}), IDENTITY).trainer_ran == ran
