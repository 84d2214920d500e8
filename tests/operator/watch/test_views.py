"""Parsing at the boundary: what the API sends becomes views, and a status survives the round trip."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from tests.support.operator.builders import START, UID, raw_job
from tests.support.operator.fake_cluster import FakeCluster

from holdfast_core.api import TrainingJobStatus
from holdfast_core.ids import Digest, JobUid, RestartRound, Step, Worker
from holdfast_operator.model import labels
from holdfast_operator.model.job import (
    Condition,
    GoodputView,
    JobStatusView,
    LineageEntry,
    PersistedView,
    PodPhase,
    RecoveryView,
    RestartRecord,
    RestorePointView,
    Sources,
    Taint,
)
from holdfast_operator.model.ownership import WorkerIdentity
from holdfast_operator.watch.views import (
    checkpoint_view,
    job_view,
    node_view,
    pod_view,
    status_to_dict,
    status_view,
)

FULL = JobStatusView(
    restart_round=RestartRound(3),
    members=(RestartRound(0), RestartRound(3)),
    coordinator=Worker(0),
    restore_point=RestorePointView(
        Step(0), RestartRound(2), Digest("b3:a"), Sources(1, 0, 1, 0), JobUid("other"), "ns"
    ),
    lineage=(LineageEntry(RestartRound(0)), LineageEntry(RestartRound(3), Step(0))),
    last_persisted=PersistedView(Step(0), RestartRound(0), Digest("b3:b")),
    step=Step(0),
    last_committed_step=Step(0),
    last_replicated_step=Step(0),
    last_memory_step=Step(0),
    steps_dropped=0,
    restarts=2,
    restarts_count_towards_max=1,
    recent_restarts=(RestartRecord(RestartRound(3), START, "RankFailed"),),
    last_recovery=RecoveryView(RestartRound(3), "RankFailed", detect_seconds=0.5, lost_steps=0),
    goodput=GoodputView(0.5, 10.0, 1.0, 5.0, 2.0),
    workers_ready=1,
    workers_total=2,
    start_time=START,
    completion_time=START,
    conditions=(Condition("Accepted", None, "StoreNotProbed", "words", START, 1),),
    phase="Restarting",
    observed_generation=4,
)


@pytest.mark.parametrize("given", [FULL, JobStatusView()], ids=["full", "empty"])
def test_status_round_trip(given: JobStatusView) -> None:
    cluster = FakeCluster(job=raw_job(), nodes={})
    cluster.patch_job_status("1", status_to_dict(FULL))
    cluster.patch_job_status(cluster.job["metadata"]["resourceVersion"], status_to_dict(given))
    stored = cluster.job["status"]
    assert status_view(TrainingJobStatus.from_dict(stored)) == given
    unknown = set(stored) - set(TrainingJobStatus.from_dict(stored).to_dict())
    assert unknown == set()


def test_a_restore_point_from_the_beginning_is_not_an_unset_one() -> None:
    cluster = FakeCluster(job=raw_job(), nodes={})
    chosen = JobStatusView(restart_round=RestartRound(0), restore_point=RestorePointView())
    cluster.patch_job_status("1", status_to_dict(chosen))
    assert job_view(cluster.job).status.restore_point == RestorePointView()


def test_spec_with_its_defaults() -> None:
    spec = job_view(raw_job(2)).spec
    assert (spec.workers, spec.peer_copies, spec.store, spec.slots) == (2, 1, None, 2)
    assert spec.node_size_limit_bytes == 20 << 30
    assert spec.restart_window == timedelta(hours=24)
    assert (spec.topology_key, spec.peer_encryption) == ("kubernetes.io/hostname", "TLS")
    assert spec.object_compression == "None"


def test_spec_in_full() -> None:
    raw = raw_job(
        4,
        checkpoint={
            "interval": {"steps": 50},
            "memory": {"slots": 3, "sizeLimit": "8Gi"},
            "node": {"volume": {"emptyDir": {"sizeLimit": "1Gi"}}},
            "peer": {"copies": 2, "topologyKey": "zone", "encryption": "None"},
            "object": {
                "storeRef": {"name": "main"},
                "every": {"steps": 500},
                "compression": "Zstd",
            },
            "retention": {"keepLast": 5},
        },
    )
    raw["spec"] |= {
        "restoreFrom": {"checkpointRef": {"name": "other-s1-r0"}},
        "failurePolicy": {
            "maxRestarts": 3,
            "window": "90m",
            "rules": [{"onExitCodes": [3], "action": "FailJob"}],
        },
        "suspend": True,
        "activeDeadlineSeconds": 100,
        "ttlSecondsAfterFinished": 0,
        "somethingNewer": 1,
    }
    spec = job_view(raw).spec
    assert (spec.interval_steps, spec.slots, spec.peer_copies) == (50, 3, 2)
    assert (spec.topology_key, spec.store, spec.object_every_steps) == ("zone", "main", 500)
    assert (spec.peer_encryption, spec.object_compression) == ("None", "Zstd")
    assert (spec.shared_memory_bytes, spec.node_size_limit_bytes) == (8 << 30, 1 << 30)
    assert (spec.keep_last, spec.restore_from, spec.suspend) == (5, "other-s1-r0", True)
    assert (spec.max_restarts, spec.restart_window) == (3, timedelta(minutes=90))
    assert spec.rules[0].on_exit_codes == (3,)
    assert spec.active_deadline == timedelta(seconds=100)
    assert spec.ttl_after_finished == timedelta(0)


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
            {"disrupted": True, "reason": "PreemptionByX"},
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
            ]
        },
    }
    view = node_view(raw)
    assert (view.name, view.lost, view.labels) == ("n", False, {"zone": "a"})
    assert view.taints == {Taint("node.kubernetes.io/unreachable", "NoSchedule")}
    assert node_view({"metadata": {"name": "n"}, "spec": {}}).taints == frozenset()


def test_checkpoints() -> None:
    raw = {
        "metadata": {
            "name": "job-l2msg4-s40-r2",
            "uid": "u",
            "resourceVersion": "5",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "finalizers": [labels.DATA_FINALIZER],
        },
        "spec": {"jobRef": {"name": "job"}, "step": 40, "deletionPolicy": "DeleteData"},
        "status": {
            "phase": "Committed",
            "round": 2,
            "manifest": "b3:x",
            "jobUid": "uid",
            "conditions": [
                {
                    "type": "Persisted",
                    "status": "True",
                    "reason": "Persisted",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }
            ],
        },
    }
    view = checkpoint_view(raw)
    assert str(view.id) == "s40-r2"
    assert view.persisted
    assert view.has_finalizer
    assert view.deletion_policy == "DeleteData"
    request = checkpoint_view({"metadata": {"name": "r"}, "spec": {"jobRef": {"name": "job"}}})
    assert request.id is None
