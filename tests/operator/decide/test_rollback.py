"""An order to go back to a step: what refuses it, what it waits for, and what the round begins with."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from tests.support.operator.builders import (
    checkpoint,
    condition,
    job,
    manifest_digest,
    now,
    pod,
    sidecar,
    status,
    store,
)
from tests.support.operator.progress import progress_of

from holdfast_core.api import (
    Checkpoint,
    CheckpointPhase,
    JobCondition,
    LineageEntry,
    PersistedStep,
    RestorePointStatus,
    TrainingJobStatus,
    changed,
)
from holdfast_core.api.training_job import RollbackSpec
from holdfast_core.ids import CheckpointId, RestartRound, Step, Worker
from holdfast_core.messages.schema import CoordinatorState
from holdfast_core.retention import RetentionReason
from holdfast_core.store_retention import needed_in_store
from holdfast_operator.decide.decide import decide
from holdfast_operator.model.actions import BeginRound, ChooseRestorePoint
from holdfast_operator.model.job import JobMemory, Observed
from holdfast_operator.model.reasons import Reason

BASE = status(
    2,
    (0, 0),
    step=Step(57),
    last_committed_step=Step(55),
    last_persisted=PersistedStep(
        step=Step(55), round=RestartRound(2), manifest=manifest_digest(55, 2)
    ),
    lineage=(
        LineageEntry(round=RestartRound(0)),
        LineageEntry(
            round=RestartRound(2),
            base=CheckpointId(Step(30), RestartRound(0)),
            base_manifest=manifest_digest(30, 0),
        ),
    ),
    restore_point=RestorePointStatus(step=Step(30), round=RestartRound(0)),
    coordinator=Worker(0),
    conditions=(condition(JobCondition.RUNNING, True, Reason.TRAINING),),
)
STORED = tuple(checkpoint(step, round_) for step, round_ in ((20, 0), (30, 0), (40, 2), (55, 2)))


def bad(of: Checkpoint) -> Checkpoint:
    """Return the Checkpoint after a drill has found damage."""
    mark = condition("Quarantined", True, "Damaged")
    conditions = (*of.status.conditions, mark)
    return changed(of, status=changed(of.status, conditions=conditions))


def observed(
    step: int | None = 40,
    round_: int = 2,
    *,
    state: TrainingJobStatus = BASE,
    checkpoints: tuple[Checkpoint, ...] = STORED,
    **changes: Any,
) -> Observed:
    """Return a gang that trains in round 2, with an order to go back."""
    pods = (pod(0), pod(1))
    order = RollbackSpec(round=RestartRound(round_), step=None if step is None else Step(step))
    return Observed(
        job=job(2, state, rollback=order, store="main", **changes),
        pods=pods,
        sidecars=tuple(sidecar(p, 2) for p in pods),
        store=store(),
        checkpoints=checkpoints,
        coordinator=CoordinatorState(5, RestartRound(2), running=True, progress=progress_of(57)),
        memory=JobMemory(round=RestartRound(2), round_seen_at=900.0, levels_written_at=999.0),
    )


def note_of(found: Observed) -> tuple[str | None, str]:
    """Return reason and message of condition RolledBack after a pass that begins no round."""
    decision = decide(found, now())
    assert not isinstance(decision.status, BeginRound)
    if decision.status is None:
        return None, ""
    shown = decision.status.status.condition(JobCondition.ROLLED_BACK)
    return (None, "") if shown is None else (shown.reason, shown.message)


def reason_of(found: Observed) -> str | None:
    return note_of(found)[0]


def test_the_next_round_begins_with_all_pods_and_counts_no_restart() -> None:
    decision = decide(observed(), now())
    assert isinstance(decision.status, BeginRound)
    after = decision.status.status
    assert (after.restart_round, after.members, after.restarts) == (3, (0, 0), 0)
    assert after.restore_point is None
    record = after.last_recovery
    assert record is not None and record.reason == Reason.ROLLED_BACK
    shown = after.condition(JobCondition.ROLLED_BACK)
    assert shown is not None and (shown.is_true, shown.reason) == (False, Reason.ROLLING_BACK)


@pytest.mark.fault("A job is rolled back to a step that does not exist or cannot be restored")
@pytest.mark.parametrize(
    ("found", "reason", "text"),
    [
        pytest.param(
            observed(41),
            Reason.CHECKPOINT_NOT_FOUND,
            "no checkpoint of step 41 is known.*kubectl holdfast list job",
            id="no checkpoint",
        ),
        pytest.param(
            observed(checkpoints=(*STORED[:2], checkpoint(40, 0), STORED[3])),
            Reason.CHECKPOINT_NOT_RESTORABLE,
            "off the lineage.*--to-new-job",
            id="off the lineage",
        ),
        pytest.param(
            observed(state=changed(BASE, quarantined=(CheckpointId(Step(40), RestartRound(2)),))),
            Reason.CHECKPOINT_NOT_RESTORABLE,
            "",
            id="quarantined",
        ),
        pytest.param(
            observed(checkpoints=(*STORED[:2], bad(checkpoint(40, 2)), STORED[3])),
            Reason.CHECKPOINT_NOT_RESTORABLE,
            "step 40 of round 2 is quarantined",
            id="quarantined by a drill",
        ),
        pytest.param(
            observed(state=changed(BASE, missing=(CheckpointId(Step(40), RestartRound(2)),))),
            Reason.CHECKPOINT_NOT_RESTORABLE,
            "",
            id="missing",
        ),
        pytest.param(
            observed(checkpoints=(*STORED[:2], checkpoint(40, 2, phase=CheckpointPhase.DELETING))),
            Reason.CHECKPOINT_NOT_RESTORABLE,
            "",
            id="being pruned",
        ),
        pytest.param(
            observed(checkpoints=(*STORED[:2], checkpoint(40, 2, deleting=True))),
            Reason.CHECKPOINT_NOT_RESTORABLE,
            "",
            id="deleted by a person",
        ),
        pytest.param(
            observed(checkpoints=(*STORED[:2], checkpoint(40, 2, phase=CheckpointPhase.FAILED))),
            Reason.CHECKPOINT_NOT_RESTORABLE,
            "",
            id="never saved",
        ),
        pytest.param(
            observed(round_=1),
            Reason.ROLLBACK_OUTDATED,
            "kubectl holdfast restore job@40 -n team-a",
            id="of an older round",
        ),
        pytest.param(observed(round_=7), Reason.ROLLBACK_OUTDATED, "", id="of a round to come"),
        pytest.param(observed(None), None, "", id="a start over of a job that trains"),
    ],
)
def test_an_order_that_cannot_be_carried_out_says_why_and_the_gang_trains_on(
    found: Observed, reason: Reason | None, text: str
) -> None:
    shown, message = note_of(found)
    assert shown == reason
    assert re.search(text, message)


def test_an_order_that_is_withdrawn_says_so() -> None:
    rolling = condition(JobCondition.ROLLED_BACK, False, Reason.CHECKPOINT_NOT_FOUND)
    found = observed(state=changed(BASE, conditions=(*BASE.conditions, rolling)))
    of = changed(found.job, spec=changed(found.job.spec, rollback=None))
    assert reason_of(replace(found, job=of)) == Reason.ROLLBACK_WITHDRAWN


@pytest.mark.fault("The object store is down while a job is rolled back")
def test_a_store_that_is_down_is_waited_for_unless_the_nodes_have_the_step() -> None:
    found = replace(observed(), store=store(available=False, message="no route to host"))
    unhealthy = condition(JobCondition.REMOTE_TIER_HEALTHY, False, Reason.STORE_UNAVAILABLE, "down")
    state = changed(BASE, conditions=(*BASE.conditions, unhealthy))
    waits = replace(found, job=observed(state=state).job)
    assert reason_of(waits) == Reason.WAITING_FOR_STORE
    of_nodes = replace(found, job=observed(30, state=state).job)
    assert isinstance(decide(of_nodes, now()).status, BeginRound)


def test_a_suspension_comes_first() -> None:
    assert reason_of(observed(suspend=True)) == Reason.ROLLING_BACK


def chosen(found: Observed, round_: int = 3, **of_job: Any) -> TrainingJobStatus:
    """Return the status of CAS 2 of a round, whose two survivors have answered."""
    state = changed(BASE, restart_round=RestartRound(round_), restore_point=None, **of_job)
    pods = found.pods
    found = replace(
        found,
        job=found.job.model_copy(update={"status": state}),
        sidecars=tuple(sidecar(p, round_) for p in pods),
        coordinator=None,
        memory=JobMemory(round=RestartRound(round_), round_seen_at=900.0),
    )
    write = decide(found, now()).status
    assert isinstance(write, ChooseRestorePoint)
    return write.status


def test_the_lineage_records_the_step_that_was_reached() -> None:
    after = chosen(observed())
    point = after.restore_point
    assert point is not None and (point.step, point.round) == (40, 2)
    assert after.lineage[-1] == LineageEntry(
        round=RestartRound(3),
        base=CheckpointId(Step(40), RestartRound(2)),
        base_manifest=manifest_digest(40, 2),
        rolled_back_from=Step(57),
    )
    shown = after.condition(JobCondition.ROLLED_BACK)
    assert shown is not None and shown.is_true
    assert (after.step, after.last_committed_step) == (40, 40)


@pytest.mark.parametrize(("before", "expected"), [(70, 70), (50, 57), (None, 57)])
def test_a_second_rollback_keeps_the_highest_step(before: int | None, expected: int) -> None:
    reached = None if before is None else Step(before)
    newest = changed(BASE.lineage[-1], rolled_back_from=reached)
    after = chosen(observed(), lineage=(BASE.lineage[0], newest))
    assert after.lineage[-1].rolled_back_from == expected


@pytest.mark.parametrize(("step", "round_"), [(20, 0), (30, 3), (40, 3)])
def test_a_rollback_finds_steps_that_were_trained_again(step: int, round_: int) -> None:
    """What the first rollback gave up is still there, above and at the same steps. It hides no checkpoint."""
    again = LineageEntry(
        round=RestartRound(3),
        base=CheckpointId(Step(20), RestartRound(0)),
        base_manifest=manifest_digest(20, 0),
        rolled_back_from=Step(57),
    )
    newest = PersistedStep(step=Step(50), round=RestartRound(3), manifest=manifest_digest(50, 3))
    trained = tuple(checkpoint(s, 3) for s in (30, 40, 50))
    after = chosen(
        observed(step, 3, checkpoints=(*STORED, *trained)),
        4,
        lineage=(BASE.lineage[0], again),
        last_persisted=newest,
    )
    point = after.restore_point
    assert point is not None and (point.step, point.round) == (step, round_)
    shown = after.condition(JobCondition.ROLLED_BACK)
    assert shown is not None and shown.is_true
    assert after.lineage[-1].rolled_back_from == 57


@pytest.mark.parametrize(("before", "expected"), [(70, 70), (56, 56), (55, None), (40, None)])
def test_a_restart_keeps_it_until_the_step_is_reached(before: int, expected: int | None) -> None:
    newest = changed(BASE.lineage[-1], rolled_back_from=Step(before))
    after = chosen(observed(round_=0), lineage=(BASE.lineage[0], newest))
    assert after.restore_point is not None and after.restore_point.step == 55
    assert after.lineage[-1].rolled_back_from == expected


def test_a_step_that_is_gone_when_it_is_chosen_voids_the_order() -> None:
    """Another one is restored, and the message says what to do."""
    after = chosen(observed(checkpoints=STORED[:2]))
    assert after.restore_point is not None and after.restore_point.step == 55
    shown = after.condition(JobCondition.ROLLED_BACK)
    assert shown is not None and shown.reason == Reason.ROLLBACK_OUTDATED
    assert after.lineage[-1].rolled_back_from is None


def test_retention_keeps_the_step_of_an_order_that_stands() -> None:
    gang = observed(20).job
    needed = needed_in_store(gang, STORED, ())[RetentionReason.RESTORE_POINT]
    assert CheckpointId(Step(20), RestartRound(0)) in needed
    outdated = observed(20, round_=0).job
    needed = needed_in_store(outdated, STORED, ())[RetentionReason.RESTORE_POINT]
    assert CheckpointId(Step(20), RestartRound(0)) not in needed
