"""An unreadable object does not count as deleted, and an object of a higher round does not count as
obsolete."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.operator.builders import (
    START,
    UID,
    condition,
    job,
    manifest_digest,
    now,
    pod,
    sidecar,
    status,
    store,
)
from tests.support.operator.decisions import does, of_kind

from holdfast_core.api import (
    JobCondition,
    PersistedStep,
    RestorePointStatus,
    TrainingJob,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.names import checkpoint_name
from holdfast_operator.decide.decide import decide
from holdfast_operator.model.actions import BeginRound, CommitPersisted, EmitEvent, WriteStatus
from holdfast_operator.model.job import Observed, PodPhase, Unreadable

COMMIT = CheckpointId(Step(40), RestartRound(0))


def hidden(kind: str, name: str) -> Unreadable:
    return Unreadable(kind, "team-a", name, f"uid-{name}", "status.phase: unknown")


def over(kind: JobCondition) -> TrainingJob:
    ended = status(0, (0, 0), completion_time=START, conditions=(condition(kind, True, "R"),))
    return job(2, ended, ttl_seconds_after_finished=0)


@pytest.mark.fault("A pod cannot be read in any phase of its job")
@pytest.mark.parametrize(
    "of",
    [
        pytest.param(job(2), id="before the first round"),
        pytest.param(job(2, status(0)), id="a member seems to be gone"),
        pytest.param(over(JobCondition.FAILED), id="failed"),
        pytest.param(over(JobCondition.COMPLETE), id="complete"),
        pytest.param(
            job(
                2,
                status(0, conditions=(condition(JobCondition.SUSPENDED, True, "R"),)),
                suspend=True,
            ),
            id="suspended",
        ),
    ],
)
def test_nothing_is_done_while_a_pod_cannot_be_read(of: TrainingJob) -> None:
    name = pod(1).name
    seen = Observed(job=of, pods=(pod(0), pod(0, 7)), unreadable=(hidden("Pod", name),))
    decision = decide(seen, now(10_000_000.0))
    assert {type(a) for a in decision.actions} == {WriteStatus, EmitEvent}
    (write,) = [a for a in decision.actions if isinstance(a, WriteStatus)]
    reported = write.status.condition(JobCondition.READABLE)
    assert (reported.status, reported.reason) == ("False", "CannotRead")
    assert name in reported.message
    assert "status.phase: unknown" in reported.message
    assert changed(write.status, conditions=()) == changed(of.status, conditions=())
    again = replace(seen, job=changed(of, status=write.status))
    assert decide(again, now(10_000_010.0)).actions == (), "it is reported once"


def test_the_job_goes_on_when_everything_can_be_read() -> None:
    of = job(2, status(0, conditions=(condition(JobCondition.READABLE, False, "R"),)))
    first = decide(Observed(job=of), now())
    (write,) = first.actions
    assert isinstance(write, WriteStatus)
    assert write.status.is_true(JobCondition.READABLE)
    assert first.requeue_after_seconds == 0
    second = decide(Observed(job=changed(of, status=write.status)), now())
    assert bool(of_kind(second.actions, "create Pod"))


def running(last: PersistedStep | None, **changes: Any) -> TrainingJob:
    begun = status(
        0,
        (0, 0),
        restore_point=RestorePointStatus(),
        coordinator=0,
        last_persisted=last,
        conditions=(condition(JobCondition.RUNNING, True, "R"),),
    )
    return job(2, begun, store="main", object_every_steps=10, **changes)


def test_a_record_that_cannot_be_read_is_neither_missing_nor_written() -> None:
    of = running(
        PersistedStep(step=COMMIT.step, round=COMMIT.round, manifest=manifest_digest(40, 0))
    )
    pods = (pod(0), pod(1))
    sidecars = tuple(sidecar(p, 0) for p in pods)
    name = checkpoint_name("job", UID, COMMIT)
    seen = Observed(job=of, pods=pods, sidecars=sidecars, store=store())
    missing = decide(seen, now()).actions
    assert [a.name for a in of_kind(missing, "create Checkpoint")] == [name]
    there = decide(replace(seen, unreadable=(hidden("Checkpoint", name),)), now()).actions
    assert not any(isinstance(a, CommitPersisted) or does(a, "create Checkpoint") for a in there)


@pytest.mark.fault("A store or a source Checkpoint cannot be read when a job starts")
@pytest.mark.parametrize(
    ("kind", "spec", "reason"),
    [
        ("CheckpointStore", {"store": "main"}, "CannotRead"),
        ("Checkpoint", {"store": "main", "restore_from": "main"}, "CheckpointNotRestorable"),
    ],
)
def test_no_first_round_on_what_cannot_be_read(
    kind: str, spec: dict[str, Any], reason: str
) -> None:
    known = store() if kind == "Checkpoint" else None
    seen = Observed(job=job(2, None, **spec), store=known, unreadable=(hidden(kind, "main"),))
    decision = decide(seen, now())
    assert not any(isinstance(a, BeginRound) for a in decision.actions)
    (write,) = [a for a in decision.actions if isinstance(a, WriteStatus)]
    reported = write.status.condition(JobCondition.ACCEPTED)
    assert reported.reason == reason
    assert "status.phase: unknown" in reported.message


@pytest.mark.fault("A pod of a round above the status exists, in any phase")
@pytest.mark.parametrize(
    "of",
    [
        pytest.param(status(1, (0, 1), restore_point=RestorePointStatus()), id="running"),
        pytest.param(status(1, (0, 1)), id="starting"),
        pytest.param(over(JobCondition.FAILED).status, id="failed"),
        pytest.param(over(JobCondition.COMPLETE).status, id="complete"),
        pytest.param(status(1, (0, 1), conditions=(condition(JobCondition.SUSPENDED, True, "R"),))),
        pytest.param(TrainingJobStatus(), id="no round yet"),
    ],
)
@pytest.mark.parametrize("suspend", [False, True])
@pytest.mark.parametrize("phase", [PodPhase.RUNNING, PodPhase.FAILED])
def test_a_pod_of_a_higher_round_is_never_deleted(
    of: TrainingJobStatus, suspend: bool, phase: PodPhase
) -> None:
    newer = pod(1, 3, phase=phase)
    seen = Observed(job=job(2, of, suspend=suspend), pods=(pod(0), pod(1, 1), newer))
    deleted = [a.name for a in of_kind(decide(seen, now(10_000.0)).actions, "delete Pod")]
    assert newer.name not in deleted


def test_a_round_above_it_begins_and_keeps_it_where_the_status_is_behind() -> None:
    """The write is refused if it is the operator that is behind: it is at the known resourceVersion."""
    newer = pod(1, 3)
    seen = Observed(job=job(2, status(1, (0, 1))), pods=(pod(0), pod(1, 1), newer))
    (begin, _) = decide(seen, now()).actions
    assert isinstance(begin, BeginRound)
    assert begin.status.restart_round == 4
    assert begin.status.members == (0, 3)


@pytest.mark.fault("A pod claims an absurd birth round")
def test_a_round_that_no_status_can_have_missed_is_not_believed() -> None:
    """The pod is not deleted either. A name must not use up the numbers of rounds."""
    odd = pod(1, 900_000_000)
    seen = Observed(job=job(2, status(1, (0, 1))), pods=(pod(0), pod(1, 1), odd))
    actions = decide(seen, now()).actions
    assert not any(isinstance(a, BeginRound) or does(a, "delete Pod") for a in actions)


@pytest.mark.fault("A sidecar claims an absurd sealed round")
def test_a_sidecar_does_not_use_up_the_numbers_of_rounds() -> None:
    """The sidecar claims to be sealed for the highest possible round."""
    pods = (pod(0), pod(1, 1))
    lies = sidecar(pods[1], 999_999)
    seen = Observed(job=job(2, status(1, (0, 1))), pods=pods, sidecars=(sidecar(pods[0], 1), lies))
    actions = decide(seen, now()).actions
    assert not any(isinstance(a, BeginRound) or does(a, "delete Pod") for a in actions)
