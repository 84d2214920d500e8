"""A status is read, changed, and written as a merge patch."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from pydantic import ValidationError
from tests.support.api_objects import checkpoint_object, job_object

from holdfast_core.api import (
    Checkpoint,
    Condition,
    ConditionStatus,
    GoodputStatus,
    JobCondition,
    LineageEntry,
    PromotedSpare,
    RecoveryStatus,
    RestartRecord,
    RestorePointStatus,
    SparesStatus,
    TrainingJob,
    TrainingJobStatus,
    changed,
    merge_patch,
)
from holdfast_core.ids import CheckpointId, RestartRound, Step, Worker

START = datetime(2026, 1, 1, 12, 30, 15, 999_999, tzinfo=UTC)


def test_a_patch_names_every_field_so_that_absent_ones_are_removed() -> None:
    status = TrainingJobStatus(
        restart_round=RestartRound(3),
        restore_point=RestorePointStatus(),
        lineage=(LineageEntry(round=RestartRound(0)),),
        recent_restarts=(RestartRecord(round=RestartRound(3), at=START),),
        recoveries=(RecoveryStatus(round=RestartRound(3), reason="PodLost").with_phases(seal=0.5),),
        goodput=GoodputStatus(ratio=1 / 3, training_seconds=10.00049),
        ready_workers="1/2",
        spares=SparesStatus(
            ready=1,
            births=(RestartRound(0), RestartRound(3)),
            promoted=(PromotedSpare(worker=Worker(1), pod="gpt-s1-r0"),),
        ),
        start_time=START,
    ).with_condition(JobCondition.RUNNING, None, "Starting", "the message", START, 4)
    assert merge_patch(status) == {
        "phase": None,
        "restartRound": 3,
        "restarts": 0,
        "recentRestarts": [{"round": 3, "at": "2026-01-01T12:30:15Z", "ignored": False}],
        "quarantined": [],
        "missing": [],
        "hangs": None,
        "nodeFailures": [],
        "step": None,
        "lastCommittedStep": None,
        "lastReplicatedStep": None,
        "flushSeconds": None,
        "lastPersisted": None,
        "members": [],
        "coordinator": None,
        "restorePoint": {
            "step": None,
            "round": None,
            "jobUid": None,
            "jobNamespace": None,
        },
        "lineage": [{"round": 0}],
        "recoveries": [
            {
                "round": 3,
                "reason": "PodLost",
                "workers": [],
                "nodes": [],
                "phaseSeconds": {"seal": 0.5},
            }
        ],
        "goodput": {
            "ratio": 0.3333,
            "trainingSeconds": 10.0,
            "checkpointSeconds": 0.0,
            "recoverySeconds": 0.0,
            "lostWorkSeconds": 0.0,
        },
        "expectedMtbfSeconds": None,
        "trainedSeconds": None,
        "chosenAt": None,
        "scheduling": None,
        "resize": None,
        "stragglers": [],
        "elastic": None,
        "readyWorkers": "1/2",
        "spares": {
            "ready": 1,
            "births": [0, 3],
            "promoted": ["1=gpt-s1-r0"],
        },
        "startTime": "2026-01-01T12:30:15Z",
        "completionTime": None,
        "conditions": [
            {
                "type": "Running",
                "status": "Unknown",
                "reason": "Starting",
                "message": "the message",
                "lastTransitionTime": "2026-01-01T12:30:15Z",
                "observedGeneration": 4,
            }
        ],
        "observedGeneration": None,
    }


def test_changed_replaces_fields_and_refuses_unknown_names() -> None:
    before = TrainingJobStatus(step=Step(1))
    after = changed(before, step=Step(2))
    assert (before.step, after.step) == (1, 2)
    with pytest.raises(TypeError, match="TrainingJobStatus has no field sept"):
        changed(before, **{"sept": 2})


def test_changed_does_not_judge_what_a_sidecar_reported() -> None:
    """The API server refuses such a report, and the operator then writes the rest of the status."""
    assert changed(GoodputStatus(ratio=1.0), training_seconds=-1.0).training_seconds == -1.0
    status = TrainingJobStatus().with_condition(JobCondition.RUNNING, False, "x" * 200, "", START)
    assert status.conditions[0].reason == "x" * 200


@pytest.mark.parametrize(
    ("value", "moves"),
    [(True, False), (False, True), (None, True)],
    ids=["same", "other", "unknown"],
)
def test_the_transition_time_follows_the_value(value: bool | None, moves: bool) -> None:
    kept = Condition(
        type="Failed", status=ConditionStatus.FALSE, reason="R", last_transition_time=START
    )
    before = TrainingJobStatus(conditions=(kept,)).with_condition("Running", True, "R", "", START)
    later = START + timedelta(hours=1)
    after = before.with_condition("Running", value, "Other", "the message", later, 7)
    assert [c.type for c in after.conditions] == ["Failed", "Running"]
    assert after.conditions[0] == kept
    running = after.condition("Running")
    assert running.last_transition_time == (later if moves else START)
    assert (running.reason, running.message, running.observed_generation) == (
        "Other",
        "the message",
        7,
    )
    assert after.is_true("Running") is (value is True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("2026-01-01T12:30:15Z", datetime(2026, 1, 1, 12, 30, 15, tzinfo=UTC), id="Z"),
        pytest.param(
            "2026-01-01T14:30:15.5+02:00",
            datetime(2026, 1, 1, 12, 30, 15, 500_000, tzinfo=UTC),
            id="offset and fraction",
        ),
    ],
)
def test_time_stamps_are_aware(text: str, expected: datetime) -> None:
    status = TrainingJobStatus.from_dict({"startTime": text})
    assert status.start_time == expected
    assert status.start_time is not None and status.start_time.utcoffset() == timedelta(0)


@pytest.mark.parametrize("value", ["yesterday", "", 5, "2026-01-01T00:00:00Z" + " " * 40])
def test_a_value_that_is_no_time_stamp_is_refused_with_its_field(value: Any) -> None:
    with pytest.raises(ValidationError, match="startTime"):
        TrainingJobStatus.from_dict({"startTime": value})


def test_time_stamps_are_written_in_utc_with_whole_seconds() -> None:
    local = datetime(2026, 1, 1, 14, 0, 0, 5, tzinfo=timezone(timedelta(hours=2)))
    assert TrainingJobStatus(start_time=local).to_dict()["startTime"] == "2026-01-01T12:00:00Z"


def test_short_names_of_a_spec_with_its_defaults() -> None:
    spec = TrainingJob.from_dict(job_object(workers=2)).spec
    assert (spec.store, spec.source_checkpoint) == (None, None)
    assert (spec.peer.copies, spec.peer.topology_key, spec.peer.encryption) == (
        1,
        "kubernetes.io/hostname",
        "TLS",
    )
    assert spec.checkpoint.node.volume_bytes == 20 << 30
    assert spec.checkpoint.memory.size_limit_bytes is None
    assert spec.failure_policy.window_length == timedelta(hours=1)


def test_short_names_of_a_full_spec() -> None:
    raw = job_object(
        workers=4,
        checkpoint={
            "memory": {"sizeLimit": "8Gi"},
            "node": {"volume": {"emptyDir": {"sizeLimit": "1Gi"}}},
            "peer": {"copies": 2, "topologyKey": "zone", "encryption": "None"},
            "object": {"storeRef": {"name": "main"}, "every": {"steps": 500}},
        },
    )
    raw["spec"] |= {
        "restoreFrom": {"checkpointRef": {"name": "other-s1-r0"}},
        "failurePolicy": {"window": "90m"},
        "somethingNewer": 1,
    }
    spec = TrainingJob.from_dict(raw).spec
    assert (spec.store, spec.source_checkpoint) == ("main", "other-s1-r0")
    assert (spec.peer.copies, spec.peer.topology_key, spec.peer.encryption) == (2, "zone", "None")
    assert spec.checkpoint.node.volume_bytes == 1 << 30
    assert spec.checkpoint.memory.size_limit_bytes == 8 << 30
    assert spec.failure_policy.window_length == timedelta(minutes=90)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"failurePolicy": {"window": "a while"}}, "failurePolicy.window"),
        ({"checkpoint": {"memory": {"sizeLimit": "much"}}}, "checkpoint.memory.sizeLimit"),
        (
            {"checkpoint": {"node": {"volume": {"emptyDir": {"sizeLimit": "much"}}}}},
            "checkpoint.node.volume.emptyDir.sizeLimit",
        ),
    ],
)
def test_text_that_no_rule_can_use_is_refused_when_it_is_read(
    changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValidationError, match=f"(?s)spec.{field}.*cannot be read"):
        TrainingJob.from_dict(job_object(**changes))


def test_metadata_has_short_names() -> None:
    raw = job_object()
    raw["metadata"] = {
        "name": "gpt",
        "namespace": "team",
        "uid": "u",
        "resourceVersion": "5",
        "generation": 2,
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "deletionTimestamp": "2026-01-02T00:00:00Z",
    }
    job = TrainingJob.from_dict(raw)
    assert (job.namespace, job.name, job.uid) == ("team", "gpt", "u")
    assert (job.resource_version, job.generation, job.deleting) == ("5", 2, True)
    assert job.created_at == datetime(2026, 1, 1, tzinfo=UTC)


def test_a_request_to_save_has_no_id() -> None:
    assert Checkpoint.from_dict(checkpoint_object()).id is None
    done = checkpoint_object(step=40)
    done["status"] = {"round": 2}
    assert Checkpoint.from_dict(done).id == CheckpointId(Step(40), RestartRound(2))


@pytest.mark.parametrize(
    ("policy", "pin", "deletes"),
    [("DeleteData", False, True), ("DeleteData", True, False), ("Retain", False, False)],
)
def test_a_pinned_checkpoint_keeps_its_data(policy: str, pin: bool, deletes: bool) -> None:
    raw = checkpoint_object(step=40, deletionPolicy=policy, pin=pin)
    raw["metadata"]["finalizers"] = ["other.dev/x", Checkpoint.FINALIZER]
    raw["status"] = {
        "conditions": [
            {
                "type": "Persisted",
                "status": "True",
                "reason": "Persisted",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
        ]
    }
    checkpoint = Checkpoint.from_dict(raw)
    assert (checkpoint.deletes_data, checkpoint.persisted, checkpoint.has_finalizer) == (
        deletes,
        True,
        True,
    )


def test_a_status_keeps_the_newest_ten_recoveries_each_once() -> None:
    status = TrainingJobStatus()
    for round_ in range(1, 13):
        begun = RecoveryStatus(round=RestartRound(round_), reason="PodLost")
        status = status.with_recovery(begun)
        status = status.with_recovery(changed(begun, lost_steps=round_))
    assert [(r.round, r.lost_steps) for r in status.recoveries] == [(r, r) for r in range(3, 13)]
    assert status.last_recovery == status.recoveries[-1]
