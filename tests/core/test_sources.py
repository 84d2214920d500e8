"""spec.restoreFrom stands for one checkpoint, or says what it found instead."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from tests.support.operator.builders import (
    START,
    checkpoint,
    condition,
    job,
    manifest_digest,
    status,
)

from holdfast_core.api import (
    Checkpoint,
    CheckpointCondition,
    CheckpointPhase,
    LineageEntry,
    NameRef,
    TrainingJob,
    changed,
)
from holdfast_core.api.training_job import BestOfSpec, CheckpointRef, RestoreFromSpec
from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Step
from holdfast_core.retention import BestMode
from holdfast_core.sources import NoSource, describe, find_source
from holdfast_core.store_retention import cloned_of

OTHER = JobUid("other-uid")
FORMER = JobUid("former-uid")


def saved(step: int, round_: int, uid: JobUid = OTHER, **changes: Any) -> Checkpoint:
    """Return a Checkpoint of job other, committed as many minutes after START as its step says."""
    given: dict[str, Any] = {
        "job": "other",
        "job_uid": uid,
        "name": f"other-s{step}-r{round_}-{uid}",
        "committed_at": START + timedelta(minutes=step),
        "metrics": {"loss": 10.0 / (1 + step)},
    }
    return checkpoint(step, round_, **given | changes)


ROLLED_BACK = (
    LineageEntry(round=RestartRound(0)),
    LineageEntry(round=RestartRound(1), base=CheckpointId(Step(20), RestartRound(0))),
)
SOURCE = job(2, status(1, (0, 0), lineage=ROLLED_BACK))
SOURCE = changed(SOURCE, metadata=changed(SOURCE.metadata, name="other", uid=OTHER))
SAVED = (saved(10, 0), saved(20, 0), saved(30, 0), saved(40, 0), saved(25, 1))
"""Steps 30 and 40 of round 0 are off the lineage."""


def clone(*, lineage: tuple[LineageEntry, ...] = (), **spec: Any) -> TrainingJob:
    if "checkpoint_ref" not in spec:
        spec = {"job_ref": NameRef(name="other"), **spec}
    given = job(2, status(0, (0, 0), lineage=lineage), store="main")
    return changed(given, spec=changed(given.spec, restore_from=RestoreFromSpec(**spec)))


def chosen(
    gang: TrainingJob,
    checkpoints: tuple[Checkpoint, ...] = SAVED,
    source: TrainingJob | None = SOURCE,
) -> tuple[int | None, int | None]:
    found = find_source(gang, checkpoints, source)
    assert isinstance(found, Checkpoint), found
    return found.spec.step, found.status.round


def refusal(
    gang: TrainingJob,
    checkpoints: tuple[Checkpoint, ...] = SAVED,
    source: TrainingJob | None = SOURCE,
) -> NoSource:
    found = find_source(gang, checkpoints, source)
    assert isinstance(found, NoSource), found
    return found


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param({"latest": True}, (25, 1), id="the newest of the lineage"),
        pytest.param({"step": 20}, (20, 0), id="a step"),
        pytest.param({"step": 40}, (40, 0), id="a step that was given up"),
        pytest.param({"before": START + timedelta(minutes=25)}, (20, 0), id="before its commit"),
        pytest.param({"before": START + timedelta(minutes=26)}, (25, 1), id="after its commit"),
        pytest.param(
            {"best": BestOfSpec(metric="loss", mode=BestMode.MIN)}, (25, 1), id="lowest loss"
        ),
        pytest.param(
            {"best": BestOfSpec(metric="loss", mode=BestMode.MAX)}, (10, 0), id="highest loss"
        ),
    ],
)
def test_a_rule_selects_one_checkpoint_of_the_lineage(
    spec: dict[str, Any], expected: tuple[int, int]
) -> None:
    assert chosen(clone(**spec)) == expected
    assert chosen(clone(**spec), tuple(reversed(SAVED))) == expected


def test_of_equal_values_the_older_one_is_the_best() -> None:
    same = tuple(changed(c, status=changed(c.status, metrics={"loss": 1.0})) for c in SAVED)
    spec = {"best": BestOfSpec(metric="loss", mode=BestMode.MIN)}
    assert chosen(clone(**spec), same) == (10, 0)


def test_a_job_that_is_gone_has_left_its_checkpoints() -> None:
    """Its lineage is not known, and a round is newer than those before."""
    assert chosen(clone(latest=True), source=None) == (25, 1)


def test_checkpoints_of_two_jobs_of_one_name_are_not_mixed() -> None:
    former = (saved(500, 9, FORMER, committed_at=START), saved(600, 9, FORMER, committed_at=START))
    assert chosen(clone(latest=True), (*former, *SAVED)) == (25, 1)
    assert chosen(clone(latest=True), (*former, *SAVED), None) == (25, 1)
    assert refusal(clone(step=500), (*former, *SAVED)).is_known is False


def test_a_job_may_start_from_a_former_job_of_its_own_name() -> None:
    gang = clone(job_ref=NameRef(name="job"), latest=True)
    former = checkpoint(30, 0, name="old", job_uid=FORMER)
    assert chosen(gang, (checkpoint(50, 0), former), None) == (30, 0)


@pytest.mark.fault(
    "A job's `spec.restoreFrom` asks for a checkpoint that does not exist or cannot be restored"
)
@pytest.mark.parametrize(
    ("bad", "text"),
    [
        pytest.param(saved(50, 1, deleting=True), "step 50: it is being deleted", id="deleted"),
        pytest.param(
            saved(50, 1, phase=CheckpointPhase.DELETING), "it is being deleted", id="pruned"
        ),
        pytest.param(
            saved(50, 1, phase=CheckpointPhase.FAILED), "its phase is Failed", id="never saved"
        ),
        pytest.param(saved(50, 1, persisted=False), "not in an object store", id="on nodes"),
        pytest.param(
            saved(
                50,
                1,
                conditions=(
                    condition(CheckpointCondition.PERSISTED, True, "R"),
                    condition(CheckpointCondition.QUARANTINED, True, "R"),
                ),
            ),
            "it is quarantined: failurePolicy.releasedSteps",
            id="quarantined",
        ),
    ],
)
def test_what_cannot_be_restored_is_named_and_not_selected(bad: Checkpoint, text: str) -> None:
    found = refusal(clone(step=50), (*SAVED, bad))
    assert found.is_known and text in found.message
    assert "kubectl holdfast list other" in found.message
    assert chosen(clone(latest=True), (*SAVED, bad)) == (25, 1)


@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        ({"step": 7}, "step 7 of job other"),
        ({"before": START}, "the newest step before 2026-01-01T00:00:00Z of job other"),
        (
            {"best": BestOfSpec(metric="accuracy", mode=BestMode.MAX)},
            "the step with the best accuracy (max) of job other",
        ),
    ],
)
def test_nothing_that_matches_says_what_was_asked(spec: dict[str, Any], asked: str) -> None:
    found = refusal(clone(**spec))
    assert asked in found.message
    assert describe(RestoreFromSpec(job_ref=NameRef(name="other"), **spec)) == asked


def test_a_job_without_checkpoints_says_so() -> None:
    assert "job other has no Checkpoint" in refusal(clone(latest=True), ()).message
    gone = refusal(clone(latest=True), (), None)
    assert "is not there and has left no Checkpoint" in gone.message
    assert not gone.is_known


BEGAN = (
    LineageEntry(round=RestartRound(0)),
    LineageEntry(
        round=RestartRound(0),
        base=CheckpointId(Step(10), RestartRound(0)),
        base_manifest=manifest_digest(10, 0),
    ),
)


@pytest.mark.parametrize(
    "lineage",
    [
        pytest.param(BEGAN[1:], id="its first round"),
        pytest.param(BEGAN, id="after it started over"),
        pytest.param(
            (
                *BEGAN,
                LineageEntry(round=RestartRound(3), base=CheckpointId(Step(60), RestartRound(0))),
            ),
            id="after it trained",
        ),
    ],
)
def test_a_job_that_has_begun_keeps_its_source(lineage: tuple[LineageEntry, ...]) -> None:
    assert chosen(clone(latest=True, lineage=lineage)) == (10, 0)
    gone = refusal(clone(latest=True, lineage=lineage), SAVED[1:])
    assert "status.lineage" in gone.message


def test_retention_keeps_what_a_job_would_choose_now() -> None:
    def names(gang: TrainingJob) -> frozenset[str]:
        return cloned_of([gang], OTHER, lambda g: find_source(g, SAVED, SOURCE))

    assert names(clone(step=20)) == {saved(20, 0).name}
    assert names(clone(latest=True, lineage=BEGAN)) == {saved(10, 0).name}
    assert names(clone(step=7)) == frozenset()
    doomed = (saved(10, 0, deleting=True), *SAVED[1:])
    began = clone(latest=True, lineage=BEGAN)
    found = cloned_of([began], OTHER, lambda g: find_source(g, doomed, SOURCE))
    assert found == {saved(10, 0).name}, (
        "a person has deleted the object, and the job may need the data"
    )
    assert names(clone(checkpoint_ref=CheckpointRef(name="x"))) == {"x"}
