"""Which documents the models accept, refuse, ignore and write."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError
from tests.support.api_objects import (
    ABSENT,
    azure_store_object,
    checkpoint_object,
    google_store_object,
    job_object,
    merged,
    store_object,
)

from holdfast_core.api import (
    Checkpoint,
    CheckpointStatus,
    CheckpointStore,
    Condition,
    ConditionStatus,
    DeletionPolicy,
    JobCondition,
    JobPhase,
    PersistedStep,
    RestorePointStatus,
    TrainingJob,
    TrainingJobStatus,
    strict,
)
from holdfast_core.errors import ConfigError
from holdfast_core.ids import CheckpointId, Digest, RestartRound, Step

BAD_JOBS: dict[str, tuple[dict[str, Any], str]] = {
    "no workers": ({"workers": 0}, "spec.workers: "),
    "workers missing": ({"workers": ABSENT}, "spec.workers: Field required"),
    "no processes": ({"procsPerWorker": 0}, "spec.procsPerWorker: "),
    "interval of zero": ({"checkpoint": {"interval": {"steps": 0}}}, "checkpoint.interval.steps: "),
    "misspelt": ({"checkpoint": {"intervall": {}}}, "spec.checkpoint.intervall: Extra inputs"),
    "nine slots": ({"checkpoint": {"memory": {"slots": 9}}}, "checkpoint.memory.slots: "),
    "four copies": ({"checkpoint": {"peer": {"copies": 4}}}, "checkpoint.peer.copies: "),
    "another compression": (
        {
            "checkpoint": {
                "object": {"storeRef": {"name": "s"}, "every": {"steps": 1}, "compression": "LZ4"}
            }
        },
        "object.compression: ",
    ),
    "half encryption": ({"checkpoint": {"peer": {"encryption": "Some"}}}, "peer.encryption: "),
    "keep one": ({"checkpoint": {"retention": {"keepLast": 1}}}, "retention.keepLast: "),
    "unknown action": (
        {"failurePolicy": {"rules": [{"onExitCodes": [3], "action": "Retry"}]}},
        "spec.failurePolicy.rules.0.action: ",
    ),
    "template is no object": ({"template": "pod"}, "spec.template: "),
}


@pytest.mark.parametrize("case", BAD_JOBS)
def test_bad_jobs_are_refused_by_name_and_value(case: str) -> None:
    changes, expected = BAD_JOBS[case]
    with pytest.raises(ConfigError) as refused:
        strict(TrainingJob, job_object(**changes))
    assert expected in str(refused.value)
    assert "kubectl explain trainingjob" in str(refused.value)


@pytest.mark.parametrize(
    ("model", "data"),
    [
        pytest.param(TrainingJob, job_object(), id="job"),
        pytest.param(Checkpoint, checkpoint_object(), id="checkpoint"),
        pytest.param(CheckpointStore, store_object(), id="store"),
        pytest.param(CheckpointStore, azure_store_object(), id="azure store"),
        pytest.param(CheckpointStore, google_store_object(), id="google store"),
    ],
)
def test_round_trip(model: Any, data: dict[str, Any]) -> None:
    parsed = strict(model, data)
    written = parsed.to_dict()
    assert merged(written, data) == written, "no value is lost or changed"
    assert strict(model, written) == parsed


def test_the_operator_ignores_what_it_does_not_know() -> None:
    data = job_object(checkpoint={"interval": {"steps": 5, "jitter": 1}}, futureField={"a": 1})
    job = TrainingJob.from_dict({**data, "status": {"phase": "Running", "future": []}})
    assert job.spec.checkpoint.interval.steps == 5
    assert job.status.phase is JobPhase.RUNNING


def test_template_is_kept_whole() -> None:
    template = {
        "metadata": {"annotations": {"a": "b"}},
        "spec": {"containers": [{"name": "trainer", "x": [1, {"y": None}]}], "hostNetwork": True},
    }
    assert TrainingJob.from_dict(job_object(template=template)).spec.template["spec"]["hostNetwork"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"workers": 1}, 0, id="one worker has no peer"),
        pytest.param({"workers": 2}, 1, id="one copy by default"),
        pytest.param({"workers": 4, "checkpoint": {"peer": {}}}, 1, id="default of peer"),
        pytest.param({"workers": 4, "checkpoint": {"peer": {"copies": 0}}}, 0, id="none"),
        pytest.param({"workers": 4, "checkpoint": {"peer": {"copies": 3}}}, 3, id="three"),
    ],
)
def test_peer_copies(changes: dict[str, Any], expected: int) -> None:
    assert TrainingJob.from_dict(job_object(**changes)).spec.peer.copies == expected


def test_world_size() -> None:
    assert TrainingJob.from_dict(job_object(workers=4, procsPerWorker=8)).spec.world_size == 32


@pytest.mark.parametrize(
    ("restore_point", "written"),
    [
        pytest.param(None, None, id="not chosen"),
        pytest.param(RestorePointStatus(), {}, id="from the beginning"),
        pytest.param(
            RestorePointStatus(
                step=Step(100),
                round=RestartRound(2),
            ),
            {"step": 100, "round": 2},
            id="a step",
        ),
    ],
)
def test_restore_point_absent_empty_and_chosen_differ(
    restore_point: RestorePointStatus | None, written: dict[str, Any] | None
) -> None:
    status = TrainingJobStatus(restore_point=restore_point)
    assert status.to_dict().get("restorePoint") == written
    assert TrainingJobStatus.from_dict(status.to_dict()) == status


def test_a_checkpoint_in_the_status_is_one_text() -> None:
    found = (CheckpointId(Step(40), RestartRound(2)), CheckpointId(Step(0), RestartRound(0)))
    status = TrainingJobStatus(quarantined=found, missing=found[:1])
    written = status.to_dict()
    assert (written["quarantined"], written["missing"]) == (["s40-r2", "s0-r0"], ["s40-r2"])
    assert TrainingJobStatus.from_dict(written) == status


@pytest.mark.parametrize(
    "text", ["40", "s-1-r0", "s1-r0 ", "s1-r0\n", "s01-r0", 40, None, {"step": 40}]
)
def test_another_text_names_no_checkpoint(text: object) -> None:
    with pytest.raises(ValidationError, match="named by its step and round, as s40-r2"):
        TrainingJobStatus.from_dict({"quarantined": [text]})


def test_part_size_is_spelt_with_its_unit() -> None:
    assert CheckpointStore.from_dict(store_object(partSizeMiB=64)).spec.s3.part_size_mib == 64
    assert CheckpointStore.from_dict(store_object()).to_dict()["spec"]["s3"]["partSizeMiB"] == 32


def test_a_store_is_in_one_place() -> None:
    for spec in ({}, {**store_object()["spec"], **azure_store_object()["spec"]}):
        with pytest.raises(ValidationError, match="none or several of s3, azure and google"):
            CheckpointStore.from_dict({**store_object(), "spec": spec})
    assert CheckpointStore.from_dict(azure_store_object()).spec.s3 is None


def test_defaults_of_a_request_to_save() -> None:
    spec = Checkpoint.from_dict(checkpoint_object()).spec
    assert (spec.step, spec.pin, spec.deletion_policy) == (None, False, DeletionPolicy.RETAIN)


def test_condition_is_found_by_its_type() -> None:
    running = Condition(
        type=JobCondition.RUNNING,
        status=ConditionStatus.TRUE,
        reason="RanksTrain",
        last_transition_time=datetime(2026, 1, 1, tzinfo=UTC),
    )
    status = TrainingJobStatus(conditions=(running,))
    assert status.condition(JobCondition.RUNNING) == running
    assert status.condition(JobCondition.FAILED) is None


def test_models_do_not_change_under_their_readers() -> None:
    status = CheckpointStatus(bytes=1)
    with pytest.raises(ValidationError):
        status.bytes = 2


def test_zero_steps_and_rounds_are_values_not_absence() -> None:
    status = TrainingJobStatus(
        step=Step(0),
        restart_round=RestartRound(0),
        last_persisted=PersistedStep(step=Step(0), round=RestartRound(0), manifest=Digest("b3:")),
    )
    written = status.to_dict()
    assert (written["step"], written["restartRound"]) == (0, 0)
    assert written["lastPersisted"] == {"step": 0, "round": 0, "manifest": "b3:"}
