"""Acceptance, completion, suspension, deadlines, clean-up."""

from __future__ import annotations

from dataclasses import replace
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
    template,
)
from tests.support.operator.decisions import begun, does, of_kind
from tests.support.operator.progress import progress_of

from holdfast_core.api import (
    Checkpoint,
    Condition,
    ConditionStatus,
    JobCondition,
    LineageEntry,
    PersistedStep,
    RestorePointStatus,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import Digest, RestartRound, Step, Worker
from holdfast_core.messages.schema import CoordinatorState, RestorePoint
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.facts.spec import template_problem, uses_launcher
from holdfast_operator.decide.writes import STARTING_SECONDS
from holdfast_operator.model.actions import BeginRound, CommitPersisted, Decision, WriteStatus
from holdfast_operator.model.job import ForeignSource, JobMemory, Observed, PodPhase
from holdfast_operator.model.reasons import Reason


def true(kind: JobCondition) -> Condition:
    return condition(kind, True, "Because", "", START)


def writes(decision: Decision) -> list[TrainingJobStatus]:
    return [a.status for a in decision.actions if isinstance(a, WriteStatus)]


# --------------------------------------------------------------------------- acceptance


def other(**changes: Any) -> Checkpoint:
    return checkpoint(1200, 2, name="src", job="other", job_uid="other-uid", **changes)


@pytest.mark.parametrize(
    ("spec", "observed", "reason", "value"),
    [
        pytest.param({"store": "main"}, {}, Reason.STORE_NOT_FOUND, False, id="no store"),
        pytest.param(
            {"store": "main"},
            {"store": store(available=False, message="403 from the server")},
            Reason.STORE_UNAVAILABLE,
            False,
            id="store refuses",
        ),
        pytest.param(
            {"store": "main"},
            {"store": store(available=None)},
            Reason.STORE_NOT_PROBED,
            None,
            id="store not probed",
        ),
        pytest.param(
            {"restore_from": "src", "store": "main"},
            {"store": store()},
            Reason.CHECKPOINT_NOT_FOUND,
            False,
            id="no checkpoint",
        ),
        pytest.param(
            {"restore_from": "src", "store": "main"},
            {"store": store(), "checkpoints": (other(phase="InProgress"),)},
            Reason.CHECKPOINT_NOT_RESTORABLE,
            False,
            id="checkpoint not committed",
        ),
        pytest.param(
            {"restore_from": "src", "store": "main"},
            {"store": store(), "foreign": ForeignSource("team-b", granted=False)},
            Reason.GRANT_MISSING,
            False,
            id="no grant of another namespace",
        ),
        pytest.param(
            {"restore_from": "src", "store": "main"},
            {"store": store(), "foreign": ForeignSource("team-b", granted=True)},
            Reason.CHECKPOINT_NOT_FOUND,
            False,
            id="no checkpoint in another namespace",
        ),
        pytest.param(
            {"restore_from": "src", "store": "main"},
            {
                "store": store(),
                "foreign": ForeignSource("team-b", True, other(), ("minio:9000/else",)),
            },
            Reason.CHECKPOINT_NOT_RESTORABLE,
            False,
            id="another bucket than that of the other namespace",
        ),
        pytest.param(
            {"restore_from": "src"},
            {"checkpoints": (other(),)},
            Reason.CHECKPOINT_NOT_RESTORABLE,
            False,
            id="no store to read it from",
        ),
    ],
)
def test_problems_keep_the_first_round_from_beginning(
    spec: dict[str, Any], observed: dict[str, Any], reason: Reason, value: bool | None
) -> None:
    decision = decide(Observed(job=job(2, **spec), **observed), now())
    (written,) = writes(decision)
    accepted = written.condition(JobCondition.ACCEPTED)
    assert (accepted.status, accepted.reason) == (ConditionStatus.of(value), reason)
    assert written.phase == "Pending"
    assert not any(isinstance(a, BeginRound) or does(a, "create Pod") for a in decision.actions)
    again = decide(Observed(job=job(2, written, **spec), **observed), now(1001.0))
    assert writes(again) != [] or again.actions == ()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_checkpoint_of_any_number_of_ranks_is_accepted(ranks: int) -> None:
    source = other(world_size=ranks)
    given = job(2, restore_from="src", store="main")
    decision = decide(Observed(job=given, store=store(), checkpoints=(source,)), now())
    (begun,) = (action for action in decision.actions if isinstance(action, BeginRound))
    accepted = begun.status.condition(JobCondition.ACCEPTED)
    assert accepted is not None and accepted.is_true


def test_the_message_of_the_server_is_in_the_condition() -> None:
    observed = Observed(
        job=job(2, store="main"), store=store(available=False, message="403 SignatureDoesNotMatch")
    )
    (written,) = writes(decide(observed, now()))
    assert "403 SignatureDoesNotMatch" in written.condition(JobCondition.ACCEPTED).message


def with_trainer(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "trainer", "image": "i", **fields}]}}


@pytest.mark.parametrize(
    ("given", "ok"),
    [
        pytest.param(template(), True, id="as documented"),
        pytest.param(with_trainer(), True, id="the image's entry point"),
        pytest.param(with_trainer(args=["x"]), True, id="arguments of the entry point"),
        pytest.param(with_trainer(command=["python", "train.py"]), False, id="no launcher"),
        pytest.param(
            with_trainer(command=["python", "-m", "holdfast.run", "--", "x"]), True, id="module"
        ),
        pytest.param(with_trainer(command=["holdfast"], args=["run", "x"]), True, id="split"),
        pytest.param(
            with_trainer(command=["sh", "-c", "exec holdfast run -- x"]), True, id="shell"
        ),
        pytest.param({"spec": {"containers": [{"name": "main"}]}}, False, id="no trainer"),
        pytest.param(
            {"spec": {"containers": [{"name": "trainer"}, {"name": "trainer"}]}}, False, id="two"
        ),
        pytest.param(
            {
                "spec": {
                    "containers": [{"name": "trainer"}],
                    "initContainers": [{"name": "holdfast-sidecar"}],
                }
            },
            False,
            id="our name",
        ),
        pytest.param(
            {
                "spec": {
                    "containers": [{"name": "trainer"}],
                    "volumes": [{"name": "holdfast-node"}],
                }
            },
            False,
            id="our volume",
        ),
        pytest.param({}, False, id="empty"),
    ],
)
def test_templates(given: dict[str, Any], ok: bool) -> None:
    problem = template_problem(given)
    assert (problem is None) is ok
    if problem is not None:
        assert problem.reason == Reason.INVALID_TEMPLATE


def test_holdfast_without_run_is_no_launcher() -> None:
    assert not uses_launcher(["holdfast", "status"])
    assert uses_launcher(["/usr/bin/holdfast", "run"])


# --------------------------------------------------------------------------- the end


def finishing(**changes: Any) -> Observed:
    pods = (pod(0), pod(1))
    state = status(
        0,
        (0, 0),
        restore_point=RestorePointStatus(),
        coordinator=Worker(0),
        conditions=(true(JobCondition.RUNNING),),
        step=Step(99),
        last_committed_step=Step(90),
    )
    base = Observed(
        job=job(2, changes.pop("status", state), **changes.pop("spec", {})),
        pods=pods,
        sidecars=tuple(sidecar(p, 0, version=1) for p in pods),
        coordinator=CoordinatorState(
            version=9,
            round=RestartRound(0),
            finished=True,
            running=True,
            progress=progress_of(100),
        ),
    )
    return replace(base, **changes)


def test_a_job_completes_when_all_ranks_have_returned_0() -> None:
    decision = decide(finishing(), now())
    (written,) = writes(decision)
    assert written.is_true(JobCondition.COMPLETE)
    assert written.phase == "Succeeded"
    assert written.completion_time == now().utc
    assert written.step == 100
    assert decision.acted_version is None, "launchers leave only when the end is in the status"


def test_the_end_in_the_status_releases_the_launchers() -> None:
    (written,) = writes(decide(finishing(), now()))
    decision = decide(finishing(status=written), now())
    assert decision.acted_version == 9
    assert not of_kind(decision.actions, "delete Pod")


def test_complete_only_after_the_last_commit_and_its_object() -> None:
    point = RestorePoint(Step(100), RestartRound(0), Digest(manifest_digest(100, 0)))
    observed = finishing(spec={"store": "main"}, store=store())
    assert observed.coordinator is not None
    observed = replace(observed, coordinator=replace(observed.coordinator, last_persisted=point))
    decision = decide(observed, now())
    (commit,) = [a for a in decision.actions if isinstance(a, CommitPersisted)]
    assert commit.status.last_persisted == PersistedStep(
        step=Step(100), round=RestartRound(0), manifest=manifest_digest(100, 0)
    )
    assert not commit.status.is_true(JobCondition.COMPLETE)
    after = replace(observed, job=changed(observed.job, status=commit.status))
    assert not any(w.is_true(JobCondition.COMPLETE) for w in writes(decide(after, now())))
    recorded = replace(after, checkpoints=(checkpoint(100, 0),))
    assert writes(decide(recorded, now()))[0].is_true(JobCondition.COMPLETE)


def test_a_job_completes_when_every_pod_has_succeeded() -> None:
    ended = tuple(pod(w, phase=PodPhase.SUCCEEDED) for w in (0, 1))
    observed = finishing(pods=ended, coordinator=None, sidecars=())
    assert writes(decide(observed, now()))[0].is_true(JobCondition.COMPLETE)


def test_nothing_is_created_again_after_the_end() -> None:
    over = status(0, (0, 0), conditions=(true(JobCondition.COMPLETE),), completion_time=START)
    assert decide(Observed(job=job(2, over)), now()).actions == ()


@pytest.mark.parametrize(
    ("kind", "seconds", "deleted"),
    [
        (JobCondition.FAILED, 1.0, ["job-l2msg4-0-r0"]),
        (JobCondition.COMPLETE, 1.0, []),
        (JobCondition.COMPLETE, 61.0, ["job-l2msg4-0-r0"]),
    ],
)
def test_pods_after_the_end(kind: JobCondition, seconds: float, deleted: list[str]) -> None:
    over = status(0, (0, 0), conditions=(true(kind),), completion_time=START)
    pods = (pod(0), pod(1, phase=PodPhase.SUCCEEDED))
    decision = decide(Observed(job=job(2, over), pods=pods), now(seconds))
    assert [a.name for a in of_kind(decision.actions, "delete Pod")] == deleted


def test_pods_of_a_failed_job_do_not_stay_because_the_coordinator_is_being_deleted() -> None:
    over = status(
        0,
        (0, 0),
        conditions=(true(JobCondition.FAILED),),
        completion_time=START,
        restore_point=RestorePointStatus(),
        coordinator=Worker(0),
        lineage=(LineageEntry(round=RestartRound(0)),),
    )
    pods = (pod(0, terminating=True), pod(1))
    observed = Observed(job=job(2, over), pods=pods, sidecars=(sidecar(pods[1], 0),))
    decision = decide(observed, now(1.0))
    assert [a.name for a in of_kind(decision.actions, "delete Pod")] == [pods[1].name]
    assert not any(w.is_true(JobCondition.PODS_KEPT) for w in writes(decision))


@pytest.mark.parametrize(("seconds", "gone"), [(59.0, False), (60.0, True)])
def test_ttl(seconds: float, gone: bool) -> None:
    over = status(0, (0, 0), conditions=(true(JobCondition.COMPLETE),), completion_time=START)
    observed = Observed(job=job(2, over, ttl_seconds_after_finished=60))
    actions = decide(observed, now(seconds)).actions
    assert bool(of_kind(actions, "delete TrainingJob")) is gone


def test_deadline() -> None:
    late = status(0, (0, 0), start_time=START)
    observed = Observed(job=job(2, late, active_deadline_seconds=100))
    (written,) = writes(decide(observed, now(100.0)))
    assert written.condition(JobCondition.FAILED).reason == Reason.DEADLINE_EXCEEDED


@pytest.mark.fault("The deadline of a job passes while a gang waits for a person to start it over")
def test_a_job_that_has_failed_waits_for_no_person() -> None:
    lost = status(0, (0, 0), start_time=START, conditions=(true(JobCondition.CHECKPOINTS_LOST),))
    observed = Observed(job=job(2, lost, active_deadline_seconds=100))
    (written,) = writes(decide(observed, now(100.0)))
    found = written.condition(JobCondition.CHECKPOINTS_LOST)
    assert (found.is_true, found.reason) == (False, Reason.DEADLINE_EXCEEDED)


@pytest.mark.parametrize("refused", ["", "a quota refuses it"])
def test_a_job_fails_after_its_newest_commit_is_recorded_or_cannot_be(refused: str) -> None:
    """After the end the object is not created again, because a user may have deleted it."""
    last = PersistedStep(step=Step(40), round=RestartRound(0), manifest=manifest_digest(40, 0))
    late = status(0, (0, 0), start_time=START, last_persisted=last)
    memory = JobMemory(round=RestartRound(0), round_seen_at=0.0, record_refused=refused)
    observed = Observed(
        job=job(2, late, store="main", active_deadline_seconds=100), store=store(), memory=memory
    )
    decision = decide(observed, now(100.0))
    assert bool(of_kind(decision.actions, "create Checkpoint"))
    assert [w.is_true(JobCondition.FAILED) for w in writes(decision)] == ([True] if refused else [])
    # Until the watch shows the object, each pass asks for it again.
    assert refused or decision.requeue_after_seconds == STARTING_SECONDS
    recorded = replace(observed, checkpoints=(checkpoint(40, 0),))
    [failed] = writes(decide(recorded, now(100.0)))
    over = replace(observed, job=changed(observed.job, status=failed))
    creates = of_kind(decide(over, now(101.0)).actions, "create Checkpoint")
    assert bool(creates) == bool(refused)


def test_a_job_that_is_being_deleted_is_left_alone() -> None:
    observed = finishing()
    gone = replace(observed, job=metadata(observed.job, deletion_timestamp=START))
    assert decide(gone, now()).actions == ()


# --------------------------------------------------------------------------- suspension


def test_a_job_that_is_created_suspended_gets_no_pods() -> None:
    decision = decide(Observed(job=job(2, suspend=True)), now())
    (written,) = writes(decision)
    assert written.is_true(JobCondition.SUSPENDED)
    assert written.phase == "Suspended"
    assert decide(Observed(job=job(2, written, suspend=True)), now()).actions == ()
    (resumed,) = writes(decide(Observed(job=job(2, written)), now()))
    assert not resumed.is_true(JobCondition.SUSPENDED)
    third = decide(Observed(job=job(2, resumed)), now())
    assert any(isinstance(a, BeginRound) for a in third.actions)


def training(**spec: Any) -> Observed:
    observed = finishing(spec=spec)
    assert observed.coordinator is not None
    return replace(
        observed, coordinator=replace(observed.coordinator, finished=False), store=store()
    )


def test_suspending_asks_the_gang_to_save_first() -> None:
    decision = decide(training(suspend=True, store="main"), now())
    (ask,) = of_kind(decision.actions, "call /v1/stop")
    assert (ask.worker, ask.message.round) == (0, 0)
    assert not of_kind(decision.actions, "delete Pod")


def test_stopped_and_saved_is_suspended_not_complete() -> None:
    stored = PersistedStep(step=Step(90), round=RestartRound(0), manifest=manifest_digest(90, 0))
    observed = finishing(
        spec={"suspend": True, "store": "main"}, store=store(), checkpoints=(checkpoint(90, 0),)
    )
    recorded = changed(observed.job.status, last_persisted=stored)
    observed = replace(observed, job=changed(observed.job, status=recorded))
    (written,) = writes(decide(observed, now()))
    assert written.is_true(JobCondition.SUSPENDED)
    assert not written.is_true(JobCondition.COMPLETE)
    after = replace(observed, job=changed(observed.job, status=written))
    decision = decide(after, now())
    assert len(of_kind(decision.actions, "delete Pod")) == 2
    assert decision.acted_version == 9


def test_resuming_is_a_new_round_that_costs_no_restart() -> None:
    paused = status(3, (0, 2), conditions=(true(JobCondition.SUSPENDED),))
    new = begun(decide(Observed(job=job(2, paused)), now()))
    assert new.status.restart_round == 4
    assert new.status.members == (4, 4)
    assert new.status.restarts == 0
    assert not new.status.is_true(JobCondition.SUSPENDED)


def test_without_a_store_a_job_that_has_trained_is_not_suspended() -> None:
    decision = decide(training(suspend=True), now())
    assert not of_kind(decision.actions, "delete Pod", "call /v1/stop")
    (written,) = writes(decision)
    suspended = written.condition(JobCondition.SUSPENDED)
    assert (suspended.status, suspended.reason) == ("False", Reason.NO_OBJECT_TIER)
