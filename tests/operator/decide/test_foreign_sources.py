"""A job that starts from a Checkpoint of another namespace: the grant, the place of the data, the wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml
from tests.support.operator.builders import (
    checkpoint,
    job,
    now,
    pod,
    sidecar,
    status,
    store,
    world_of,
)

from holdfast_core.api import (
    CheckpointGrant,
    JobCondition,
    RestorePointStatus,
    TrainingJobStatus,
    changed,
    is_granted,
    missing_grant,
)
from holdfast_core.api.training_job import CheckpointRef, RestoreFromSpec
from holdfast_core.ids import JobUid, RestartRound, Step
from holdfast_core.messages.schema import CoordinatorState
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.facts.spec import find_problem
from holdfast_operator.decide.restore_point import Chosen, Wait, choose
from holdfast_operator.model.actions import BeginRound
from holdfast_operator.model.job import ForeignSource, JobMemory, Observed, place_of
from holdfast_operator.model.reasons import Reason

SOURCE = checkpoint(1000, 2, name="src", job="other", job_uid="other-uid", job_namespace="research")
GRANTED = ForeignSource("research", True, SOURCE, (place_of(store().config),))
TAKEN_BACK = ForeignSource("research", granted=False)
PODS = (pod(0), pod(1))
READ = status(
    0,
    restore_point=RestorePointStatus(
        step=Step(1000),
        round=RestartRound(2),
        job_uid=JobUid("other-uid"),
        job_namespace="research",
    ),
)


def seen(state: TrainingJobStatus, foreign: ForeignSource, **changes: Any) -> Observed:
    return Observed(
        job=job(2, state, restore_from="src", store="main"),
        pods=PODS,
        sidecars=tuple(sidecar(p, 0) for p in PODS),
        store=store(),
        foreign=foreign,
        **changes,
    )


# --------------------------------------------------------------------------- grants


def grant(**spec: Any) -> CheckpointGrant:
    body = {"metadata": {"name": "g", "namespace": "research"}, "spec": spec}
    return CheckpointGrant.from_dict(body)


FROM = [{"namespace": "team-a"}]


@pytest.mark.parametrize(
    ("spec", "permits"),
    [
        pytest.param({"from": FROM}, True, id="all jobs, all Checkpoints"),
        pytest.param({"from": [{"namespace": "team-b"}]}, False, id="another namespace"),
        pytest.param({"from": [{"namespace": "team-b"}, *FROM]}, True, id="one of two namespaces"),
        pytest.param({"from": [{"namespace": "team-a", "jobs": ["job"]}]}, True, id="the job"),
        pytest.param({"from": [{"namespace": "team-a", "jobs": ["x"]}]}, False, id="another job"),
        pytest.param({"from": FROM, "to": [{"name": "src"}]}, True, id="the Checkpoint"),
        pytest.param({"from": FROM, "to": [{"name": "x"}]}, False, id="another Checkpoint"),
    ],
)
def test_what_a_grant_permits(spec: dict[str, Any], permits: bool) -> None:
    assert is_granted([grant(**spec)], "team-a", "job", "src") is permits


def test_a_grant_that_is_being_deleted_permits_nothing() -> None:
    body = grant(**{"from": FROM}).to_dict()
    metadata = {**body["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
    gone = CheckpointGrant.from_dict({**body, "metadata": metadata})
    assert not is_granted([gone], "team-a", "job", "src")
    assert is_granted([gone, grant(**{"from": FROM})], "team-a", "job", "src")


@pytest.mark.parametrize("name", ["research", "123", "0x1f", "null", "yes", "2026-01-01"])
def test_the_yaml_of_a_missing_grant_is_one_that_permits_it(name: str) -> None:
    """Any of the names may be one that YAML takes for a number, a date or nothing."""
    body = yaml.safe_load(missing_grant(name, name, name, name))
    assert body["metadata"] == {"name": f"{name}-{name}", "namespace": name}
    assert is_granted([CheckpointGrant.from_dict(body)], name, name, name)


# --------------------------------------------------------------------------- the job


@pytest.mark.fault("A job names a Checkpoint of a namespace that has not granted it")
def test_the_job_says_which_grant_is_missing() -> None:
    problem = find_problem(world_of(seen(status(), TAKEN_BACK)))
    assert problem is not None and problem.reason == Reason.GRANT_MISSING
    assert "kubectl apply -f -" in problem.message
    assert "kind: CheckpointGrant" in problem.message
    assert len(problem.message) < 1024


def test_a_granted_checkpoint_that_is_not_there_is_named_with_its_namespace() -> None:
    """One of the same name in the own namespace is another one."""
    own = checkpoint(1000, 2, name="src", job="other", job_uid="other-uid")
    observed = seen(status(), replace(GRANTED, checkpoint=None), checkpoints=(own,))
    ref = CheckpointRef(name="src", namespace="research")
    spec = changed(observed.job.spec, restore_from=RestoreFromSpec(checkpoint_ref=ref))
    named = replace(observed, job=observed.job.model_copy(update={"spec": spec}))
    problem = find_problem(world_of(named))
    assert problem is not None and problem.reason == Reason.CHECKPOINT_NOT_FOUND
    text = "not in namespace research, or the operator does not watch that namespace"
    assert text in problem.message


def test_the_place_of_the_data_must_be_that_of_the_own_store() -> None:
    assert find_problem(world_of(seen(status(), GRANTED))) is None
    elsewhere = replace(GRANTED, places=("minio:9000/of-research/p",))
    problem = find_problem(world_of(seen(status(), elsewhere)))
    assert problem is not None and problem.reason == Reason.CHECKPOINT_NOT_RESTORABLE
    assert "minio:9000/of-research/p" in problem.message
    unknown = replace(GRANTED, places=())
    assert find_problem(world_of(seen(status(), unknown))) is None


def test_the_restore_point_names_the_other_namespace() -> None:
    choice = choose(world_of(seen(status(0), GRANTED), JobMemory(round=RestartRound(0))))
    assert isinstance(choice, Chosen)
    assert (choice.point.job_namespace, choice.point.job_uid) == ("research", "other-uid")


def test_without_the_grant_the_choice_waits() -> None:
    choice = choose(world_of(seen(status(0), TAKEN_BACK), JobMemory(round=RestartRound(0))))
    assert isinstance(choice, Wait)
    assert choice.note.reason == Reason.GRANT_MISSING


RESTORING = CoordinatorState(version=1, round=RestartRound(0))


@pytest.mark.fault("A grant is taken back while a clone restores")
def test_a_clone_whose_grant_is_taken_back_stops_its_restore_and_waits() -> None:
    decision = decide(seen(READ, TAKEN_BACK, coordinator=RESTORING), now())
    begun = decision.status
    assert isinstance(begun, BeginRound)
    after = begun.status
    assert (after.restart_round, after.restore_point) == (1, None)
    assert after.members == (0, 0), "the pods stay"
    assert after.recent_restarts == (), "it does not count"
    restarting = after.condition(JobCondition.RESTARTING)
    assert restarting is not None and restarting.reason == Reason.GRANT_MISSING
    sealed = tuple(sidecar(p, 1) for p in PODS)
    waiting = replace(seen(after, TAKEN_BACK), sidecars=sealed)
    assert isinstance(choose(world_of(waiting)), Wait)
    assert isinstance(choose(world_of(replace(waiting, foreign=GRANTED))), Chosen)


def test_ranks_that_train_have_read_it_already() -> None:
    trains = CoordinatorState(version=1, round=RestartRound(0), running=True)
    decision = decide(seen(READ, TAKEN_BACK, coordinator=trains), now())
    assert not isinstance(decision.status, BeginRound)


def test_with_the_grant_nothing_stops_the_restore() -> None:
    decision = decide(seen(READ, GRANTED, coordinator=RESTORING), now())
    assert not isinstance(decision.status, BeginRound)
