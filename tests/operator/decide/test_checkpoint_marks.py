"""What a pass writes about the Checkpoints of its job: only what has changed."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.support.operator.builders import START, checkpoint, condition, now, request, store
from tests.support.operator.decisions import of_kind, status_of
from tests.support.operator.persisting import persisted, point, world

from holdfast_core.api import (
    Checkpoint,
    CheckpointCondition,
    CheckpointPhase,
    CheckpointStatus,
    JobCondition,
    StoreDrills,
    changed,
)
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_operator.decide.checkpoints import WRITES_PER_PASS, unsaved
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.drills import drill_result, drilled_status
from holdfast_operator.model.command_pods import CommandReport
from holdfast_operator.model.job import Observed, StoreView
from holdfast_operator.model.reasons import Reason

KNOWN = (checkpoint(40, 2), checkpoint(50, 2), checkpoint(60, 2))


def training(checkpoints: tuple[Checkpoint, ...] = KNOWN, **changes: Any) -> Observed:
    """Return a job that has persisted step 60, and whose nodes have reported it."""
    given = {"committed": persisted(60), "reported": point(60), "keep_last": 5, **changes}
    return world(checkpoints=checkpoints, **given)


def written(observed: Observed, seconds: float = 1000.0) -> dict[str, CheckpointStatus]:
    actions = decide(observed, now(seconds)).actions
    return {a.name: status_of(a) for a in of_kind(actions, "change Checkpoint")}


def with_status(observed: Observed, **fields: Any) -> Observed:
    status = changed(observed.job.status, **fields)
    return replace(observed, job=changed(observed.job, status=status))


def restorable(status: CheckpointStatus) -> tuple[str, str]:
    found = status.condition(CheckpointCondition.RESTORABLE)
    return found.status, found.reason


def test_nothing_is_written_while_nothing_changes() -> None:
    assert written(training()) == {}


def test_what_the_store_may_lack_is_unknown_until_it_is_back() -> None:
    down = store()
    observed = replace(training(), store=replace(down, available=False, message="no answer"))
    found = written(observed)
    assert {restorable(s) for s in found.values()} == {("Unknown", "StoreUnavailable")}
    assert len(found) == 3
    seen = tuple(changed(c, status=found[c.name]) for c in KNOWN)
    assert written(replace(observed, checkpoints=seen)) == {}
    back = written(training(seen))
    assert {restorable(s) for s in back.values()} == {("True", "Persisted")}


@pytest.mark.parametrize(("seconds", "unknown"), [(59.0, False), (60.0, True)])
def test_uploads_that_fail_for_a_moment_write_nothing(seconds: float, unknown: bool) -> None:
    """Each of thousands of objects would be written twice."""
    failing = condition(JobCondition.REMOTE_TIER_HEALTHY, False, "Unavailable", "", START)
    observed = with_status(training(), conditions=(failing,))
    at = now()
    begun = at.utc - timedelta(seconds=seconds)
    failing = changed(failing, last_transition_time=begun)
    found = written(with_status(observed, conditions=(failing,)))
    assert bool(found) is unknown


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param(None, ("False", "StoreNotFound"), id="no store"),
        pytest.param("not probed", None, id="not probed"),
    ],
)
def test_other_states_of_the_store(given: str | None, expected: tuple[str, str] | None) -> None:
    view: StoreView | None = None if given is None else replace(store(), available=None)
    found = written(replace(training(), store=view))
    assert {restorable(s) for s in found.values()} == (set() if expected is None else {expected})


def test_a_quarantined_checkpoint_is_not_restorable_until_it_is_released() -> None:
    bad = CheckpointId(Step(50), RestartRound(2))
    found = written(with_status(training(), quarantined=(bad,)))
    assert set(found) == {KNOWN[1].name}
    status = found[KNOWN[1].name]
    assert restorable(status) == ("False", "Quarantined")
    assert status.is_true(CheckpointCondition.QUARANTINED)
    seen = (KNOWN[0], changed(KNOWN[1], status=status), KNOWN[2])
    back = written(training(seen))[KNOWN[1].name]
    assert restorable(back) == ("True", "Persisted")
    assert not back.is_true(CheckpointCondition.QUARANTINED)


def test_what_the_store_lacks_is_not_restorable() -> None:
    observed = training(coordinator={"newest_is_stored": False})
    found = written(observed)
    assert {n: restorable(s) for n, s in found.items()} == {
        KNOWN[2].name: ("False", Reason.CHECKPOINT_MISSING)
    }


def lacking_newest(*, over: bool, **changes: Any) -> Observed:
    """Return a job whose newest checkpoint the store has lacked, and whose sidecars say nothing now."""
    missing = condition(JobCondition.CHECKPOINT_MISSING, True, Reason.CHECKPOINT_MISSING, "", START)
    found = written(training(coordinator={"newest_is_stored": False}))
    seen = (*KNOWN[:2], changed(KNOWN[2], status=found[KNOWN[2].name]))
    if over:
        end = condition(JobCondition.COMPLETE, True, Reason.COMPLETED, "", START)
        changes |= {"completion_time": START, "conditions": (missing, end)}
    observed = with_status(training(seen), **{"conditions": (missing,), **changes})
    return replace(observed, coordinator=None)


@pytest.mark.fault("The store lacks a checkpoint, and no sidecar is left that could find it again")
@pytest.mark.parametrize("over", [False, True], ids=["a new operator", "the end of the job"])
def test_what_the_store_lacked_is_not_restorable_until_it_is_found(over: bool) -> None:
    """retention.whenDeleted KeepLast would keep it, and delete the older ones, which are there."""
    observed = lacking_newest(over=over)
    assert written(observed) == {}
    if not over:
        found = written(training(observed.checkpoints))
        assert found == {}, "the coordinator has not compared yet"
        back = written(training(observed.checkpoints, coordinator={"newest_is_stored": True}))
        assert {n: restorable(s) for n, s in back.items()} == {
            KNOWN[2].name: ("True", Reason.PERSISTED)
        }


def test_after_the_end_a_drill_ends_the_condition_that_it_is_missing() -> None:
    observed = lacking_newest(over=True, missing=(KNOWN[2].id,))
    assert decide(observed, now()).status is None
    lacked = observed.checkpoints[2]
    report = CommandReport({"badCount": 0, "readBytes": 1, "seconds": 1.0})
    drilled = drilled_status(lacked, drill_result(report), StoreDrills(), None, now().utc)
    assert restorable(drilled) == ("True", Reason.INTACT)
    observed = replace(observed, checkpoints=(*KNOWN[:2], changed(lacked, status=drilled)))
    decision = decide(observed, now())
    status = decision.status.status
    assert status.missing == ()
    assert not status.is_true(JobCondition.CHECKPOINT_MISSING)
    assert of_kind(decision.actions, "change Checkpoint") == []


def test_a_pin_and_the_policy_of_the_job_follow_the_spec() -> None:
    pinned = changed(KNOWN[0], spec=changed(KNOWN[0].spec, pin=True))
    observed = training((pinned, *KNOWN[1:]), retention={"when_deleted": "KeepLast"})
    found = written(observed)
    assert next(iter(found)) == KNOWN[2].name, "the newest has the policy first"
    assert {status.when_deleted for status in found.values()} == {"KeepLast"}
    assert len(found) == 3
    assert found[KNOWN[0].name].is_true(CheckpointCondition.PINNED)


def test_a_deleted_object_says_so() -> None:
    going = checkpoint(40, 2, deleting=True, has_finalizer=True, deletion_policy="DeleteData")
    found = written(training((going, *KNOWN[1:])))
    assert found[going.name].phase is CheckpointPhase.DELETING
    assert restorable(found[going.name])[0] == "False"


@pytest.mark.fault("A store with thousands of checkpoints of a job is down")
def test_many_changes_take_several_passes() -> None:
    many = tuple(checkpoint(n, 2) for n in range(3, 103))
    observed = replace(training(many, keep_last=200), store=replace(store(), available=False))
    passes = 0
    while found := written(observed):
        assert len(found) <= WRITES_PER_PASS
        passes += 1
        seen = tuple(
            changed(c, status=found[c.name]) if c.name in found else c for c in observed.checkpoints
        )
        observed = replace(observed, checkpoints=seen)
    assert passes == 4


# --------------------------------------------------------------------------- without a store


def on_nodes(**changes: Any) -> Observed:
    held = checkpoint(40, 2, persisted=False)
    status = held.status.with_condition(CheckpointCondition.RESTORABLE, None, "Before", "", START)
    given = {"store": None, "object_every_steps": None, **changes}
    return world(checkpoints=(changed(held, status=status),), **given)


def only(found: dict[str, CheckpointStatus]) -> tuple[str, str]:
    (status,) = found.values()
    return restorable(status)


def test_the_nodes_have_what_the_coordinator_reports() -> None:
    observed = on_nodes(coordinator={"committed": (Step(40),)})
    assert only(written(observed)) == ("True", "Committed")


def test_nothing_is_said_of_what_may_be_pruned_on_the_nodes() -> None:
    assert written(on_nodes(coordinator={"committed": (Step(70),)})) == {}


def test_without_pods_there_is_no_copy() -> None:
    over = condition(JobCondition.COMPLETE, True, "Completed", "", START)
    observed = with_status(on_nodes(), conditions=(over,), completion_time=START)
    assert only(written(replace(observed, pods=(), sidecars=()))) == ("False", "PodsGone")


def test_an_older_round_is_known_from_the_inventories_of_this_one() -> None:
    old = checkpoint(20, 1, persisted=False)
    observed = replace(on_nodes(), checkpoints=(old,))
    assert only(written(observed)) == ("False", "ShardsLost")
    silent = replace(observed, sidecars=())
    silenced = condition(JobCondition.SIDECARS_UNREACHABLE, True, "NoSidecarAnswers", "", START)
    found = written(with_status(silent, conditions=(silenced,)))
    assert {restorable(s) for s in found.values()} <= {("Unknown", "WaitingForHolders")}


# --------------------------------------------------------------------------- requests


def test_a_request_that_waits_says_for_what() -> None:
    found = written(world(checkpoints=(request(),), coordinator={"running": False}))
    (status,) = found.values()
    assert status.phase is CheckpointPhase.REQUESTED
    committed = status.condition(CheckpointCondition.COMMITTED)
    assert committed is not None and "as soon as the job trains" in committed.message


@pytest.mark.fault("A person creates a Checkpoint of a step that was never committed")
def test_a_step_that_was_never_committed_fails_after_a_minute() -> None:
    stray = checkpoint(45, None, name="stray", phase=None, conditions=(), manifest=None)
    given = training((*KNOWN, stray))
    late = now()
    young = changed(stray, metadata=changed(stray.metadata, creation_timestamp=late.utc))
    assert written(replace(given, checkpoints=(*KNOWN, young))) == {}
    old = changed(
        stray,
        metadata=changed(stray.metadata, creation_timestamp=late.utc - timedelta(seconds=60)),
    )
    found = written(replace(given, checkpoints=(*KNOWN, old)))
    assert found["stray"].phase is CheckpointPhase.FAILED
    why = found["stray"].condition(CheckpointCondition.COMMITTED)
    assert why is not None and why.reason == Reason.STEP_NOT_COMMITTED


@pytest.mark.fault("A request to save names a job that does not exist")
def test_a_request_for_a_job_that_does_not_exist_fails_after_a_minute() -> None:
    at = now()
    asked = request()

    def of_age(seconds: float, **status: Any) -> Checkpoint:
        created = changed(asked.metadata, creation_timestamp=at.utc - timedelta(seconds=seconds))
        return changed(asked, metadata=created, status=CheckpointStatus(**status))

    assert unsaved(of_age(59.0), at) is None, "the job may be created a moment later"
    found = unsaved(of_age(60.0), at)
    assert found is not None
    reason, text = found
    assert reason is Reason.JOB_NOT_FOUND
    assert "job does not exist" in text and "TrainingJob" in text
    assert unsaved(of_age(90.0, phase="Failed"), at) is None


@pytest.mark.fault("A job ends or is deleted before a request to save is fulfilled")
def test_requests_of_a_job_that_is_over_fail_with_the_reason() -> None:
    over = condition(JobCondition.COMPLETE, True, "Completed", "", START)
    observed = with_status(
        world(checkpoints=(request(phase="InProgress"),)),
        conditions=(over,),
        completion_time=START,
    )
    (status,) = written(observed).values()
    assert status.phase is CheckpointPhase.FAILED
    why = status.condition(CheckpointCondition.COMMITTED)
    assert why is not None and why.is_false and why.reason == Reason.JOB_ENDED
