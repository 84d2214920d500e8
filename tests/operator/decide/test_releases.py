"""A deleted Checkpoint is always released: by the pass of its job, or by a pod that deletes its data.

lives/test_deletions.py shows the pods.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from tests.support.operator.builders import (
    START,
    checkpoint,
    condition,
    job,
    manifest_digest,
    metadata,
    now,
    pod,
    sidecar,
    status,
    store,
)
from tests.support.operator.decisions import of_kind

from holdfast_core.api import (
    Checkpoint,
    CheckpointAdoption,
    Condition,
    JobCondition,
    PersistedStep,
    RestorePointStatus,
    changed,
)
from holdfast_core.ids import RestartRound, Step, Worker
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.ends import RELEASE_SECONDS
from holdfast_operator.model.actions import EmitEvent
from holdfast_operator.model.job import Observed
from holdfast_operator.model.reasons import Reason


def deleted(**changes: Any) -> Checkpoint:
    """Return a Checkpoint with deletionPolicy DeleteData that a user has deleted."""
    given = {"deleting": True, "has_finalizer": True, "deletion_policy": "DeleteData", **changes}
    return checkpoint(10, 0, job_namespace="team-a", **given)


DELETED = deleted()
NOWHERE = deleted(store=None)
"""The object does not say which store has its data."""
PERSISTED = PersistedStep(step=Step(10), round=RestartRound(0), manifest=manifest_digest(10, 0))


def true(kind: JobCondition) -> Condition:
    return condition(kind, True, "Because", "", START)


def observed(**changes: Any) -> Observed:
    pods = (pod(0), pod(1))
    state = status(
        1,
        (0, 0),
        restore_point=RestorePointStatus(step=Step(10), round=RestartRound(0)),
        coordinator=Worker(0),
        last_persisted=PERSISTED,
        last_committed_step=Step(10),
        conditions=changes.pop("conditions", ()),
        completion_time=changes.pop("completion_time", None),
    )
    base = Observed(
        job=job(2, state, store="main", **changes.pop("spec", {})),
        pods=pods,
        sidecars=tuple(sidecar(p, 1) for p in pods),
        checkpoints=(DELETED,),
        store=store(),
    )
    return replace(base, **changes)


def released(given: Observed, seconds: float = 1000.0) -> tuple[list[str], list[str]]:
    """Return the names of the released objects, and the messages of Events that data was kept."""
    actions = decide(given, now(seconds)).actions
    names = [a.name for a in of_kind(actions, "delete Checkpoint")]
    messages = [
        a.message for a in actions if isinstance(a, EmitEvent) and a.reason == Reason.DATA_KEPT
    ]
    return names, messages


WITHOUT_A_GANG: dict[str, dict[str, Any]] = {
    "over": {"conditions": (true(JobCondition.COMPLETE),), "completion_time": START},
    "failed": {"conditions": (true(JobCondition.FAILED),), "completion_time": START},
    "suspended": {
        "conditions": (true(JobCondition.SUSPENDED),),
        "spec": {"suspend": True},
        "pods": (),
        "sidecars": (),
    },
}


@pytest.mark.parametrize("state", WITHOUT_A_GANG)
def test_without_a_gang_the_data_is_left_to_a_pod(state: str) -> None:
    given = observed(**WITHOUT_A_GANG[state])
    assert released(given) == ([], [])
    names, messages = released(replace(given, checkpoints=(NOWHERE,)))
    assert names == [NOWHERE.name]
    assert len(messages) == 1
    assert "does not say which job saved it in which CheckpointStore" in messages[0]
    assert "step 10 of round 0" in messages[0]
    assert "team-a/" in messages[0]


def test_a_job_that_is_being_deleted_lets_go_of_what_has_no_data() -> None:
    given = observed()
    given = replace(given, job=metadata(given.job, deletion_timestamp=START))
    assert released(given)[0] == []
    assert released(replace(given, checkpoints=(NOWHERE,)))[0] == [NOWHERE.name]


@pytest.mark.fault("A Checkpoint is deleted while its store is away")
def test_a_job_that_runs_may_order_the_delete_for_a_while() -> None:
    given = observed()
    first = decide(given, now(1000.0))
    assert not of_kind(first.actions, "delete Checkpoint")
    again = replace(given, memory=first.memory)
    assert released(again, 999.0 + RELEASE_SECONDS)[0] == []
    names, messages = released(again, 1000.0 + RELEASE_SECONDS)
    assert names == [DELETED.name]
    assert "no sidecar could delete it" in messages[0]


def test_the_wait_outlives_a_round() -> None:
    """If a new round restarted the wait, the wait would never end for a gang that fails every minute."""
    given = observed()
    first = decide(given, now(1000.0))
    later = changed(given.job.status, restart_round=RestartRound(2), restore_point=None)
    second = replace(given, job=changed(given.job, status=later), memory=first.memory)
    assert released(second, 1000.0 + RELEASE_SECONDS)[0] == [DELETED.name]


@pytest.mark.fault("A Checkpoint of a former job of the same name is deleted")
def test_a_former_job_of_the_same_name_holds_nothing_back() -> None:
    former = deleted(job_uid="former-uid", pin=True)
    assert released(observed(checkpoints=(former,)))[0] == [former.name]
    with_data = deleted(job_uid="former-uid")
    assert released(observed(checkpoints=(with_data,)))[0] == []


@pytest.mark.fault(
    "A CheckpointAdoption and a TrainingJob share a name, and one is deleted or refused while the "
    "other's Checkpoint is deleted"
)
@pytest.mark.parametrize("deleted_at", [START, None], ids=["being deleted", "refused"])
def test_checkpoints_of_a_gang_of_the_other_kind_are_left_to_it(
    deleted_at: datetime | None,
) -> None:
    """A CheckpointAdoption of the name of a TrainingJob is refused, and can still be created and deleted."""
    other = CheckpointAdoption.from_dict(
        {
            "metadata": {"name": "job", "namespace": "team-a", "uid": "other-uid"},
            "spec": {"workers": 2, "checkpoint": {"interval": {"steps": 10}}},
        }
    )
    theirs = deleted(job_uid="other-uid", pin=True)
    given = observed(checkpoints=(theirs,))
    given = replace(given, job=metadata(given.job, deletion_timestamp=deleted_at))
    assert released(given)[0] == [theirs.name]
    assert released(replace(given, same_name=other))[0] == []


@pytest.mark.parametrize(
    "changes",
    [{"pin": True}, {"deletion_policy": "Retain"}, {"persisted": False}],
    ids=lambda changes: next(iter(changes)),
)
def test_no_event_is_sent_when_the_data_was_to_be_kept(changes: dict[str, Any]) -> None:
    given = observed(conditions=(true(JobCondition.COMPLETE),), completion_time=START)
    names, messages = released(replace(given, checkpoints=(deleted(**changes),)))
    assert names == [DELETED.name]
    assert messages == []


def test_objects_that_were_not_deleted_stay() -> None:
    given = observed(conditions=(true(JobCondition.COMPLETE),), completion_time=START)
    names, _ = released(replace(given, checkpoints=(deleted(deleting=False),)))
    assert names == []
