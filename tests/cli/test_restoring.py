"""`restore` says what a rollback gives up, forks, and refuses what cannot be restored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.operator.builders import checkpoint, condition, job, manifest_digest, status

from holdfast_cli.errors import CommandError
from holdfast_cli.gangs import obstacle_to_order
from holdfast_cli.restoring import describe_rollback, find_fork_point, forked, newest_on_nodes
from holdfast_core.api import JobCondition, LineageEntry, PersistedStep, TrainingJobStatus
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.rollback import find_unfit

STATUS = status(
    1,
    (0, 0),
    step=Step(57),
    last_committed_step=Step(56),
    last_persisted=PersistedStep(
        step=Step(55), round=RestartRound(1), manifest=manifest_digest(55, 1)
    ),
    lineage=(
        LineageEntry(round=RestartRound(0)),
        LineageEntry(round=RestartRound(1), base=CheckpointId(Step(30), RestartRound(0))),
    ),
)
STORED = (checkpoint(30, 0), checkpoint(40, 0), checkpoint(45, 1))


def test_the_question_says_where_the_job_is_and_what_is_trained_again() -> None:
    text = describe_rollback(job(2, STATUS), Step(45))
    assert "job has trained step 57. It goes back to step 45, which can be restored." in text
    assert "12 steps are trained again" in text
    assert "stay until the retention takes them" in text
    assert "suspended" not in text


def test_the_question_names_what_the_rollback_waits_for() -> None:
    assert "goes back when it resumes" in describe_rollback(job(2, STATUS, suspend=True), Step(45))
    down = condition(JobCondition.REMOTE_TIER_HEALTHY, False, "StoreUnavailable", "no route")
    state = STATUS.model_copy(update={"conditions": (down,)})
    assert "may wait: no route" in describe_rollback(job(2, state), Step(45))


@pytest.mark.parametrize("step", [30, 45, 55, 56])
def test_steps_of_the_lineage_are_taken(step: int) -> None:
    gang = job(2, STATUS)
    assert find_unfit(gang, STORED, Step(step), newest_on_nodes(gang)) is None


@pytest.mark.fault("A job is rolled back to a step that does not exist or cannot be restored")
@pytest.mark.parametrize(
    ("step", "text"),
    [
        (50, "no checkpoint of step 50 is known: `kubectl holdfast list job -n team-a`"),
        (40, "is off the lineage"),
    ],
)
def test_others_are_refused_with_the_next_command(step: int, text: str) -> None:
    found = find_unfit(job(2, STATUS), STORED, Step(step))
    assert found is not None and text in found.message
    assert "kubectl holdfast" in found.message


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"metadata": {"name": "gpt", "deletionTimestamp": "now"}}, "is being deleted"),
        (
            {"status": {"conditions": [{"type": "Complete", "status": "True"}]}},
            "is over (Complete): create a new job",
        ),
        ({"status": {}}, "has not begun yet"),
    ],
)
def test_a_job_that_cannot_go_back_says_why(changes: dict[str, Any], text: str) -> None:
    begun = {"lineage": [{"round": 0}]}
    gang = {"kind": "TrainingJob", "metadata": {"name": "gpt"}, "spec": {}, "status": begun}
    assert obstacle_to_order(gang) is None
    found = obstacle_to_order(gang | changes)
    assert found is not None and text in found


def test_a_job_without_a_step_can_go_back_too() -> None:
    waits = TrainingJobStatus(restart_round=RestartRound(0), lineage=STATUS.lineage)
    assert "no step yet" in describe_rollback(job(2, waits), Step(30))


# --------------------------------------------------------------------------- forks


@pytest.mark.parametrize(
    ("step", "expected"),
    [(None, 45), (30, 30), pytest.param(40, 40, id="a step that the job gave up")],
)
def test_a_fork_starts_from_the_newest_step_or_the_one_that_is_named(
    step: int | None, expected: int
) -> None:
    wanted = None if step is None else Step(step)
    assert find_fork_point(job(2, STATUS, store="main"), STORED, wanted).spec.step == expected


@pytest.mark.fault("A fork is made of a step that does not exist, or of a job without a store")
def test_what_cannot_be_forked_is_refused_with_the_next_command() -> None:
    with pytest.raises(CommandError, match=r"step 41 of job job, .* `kubectl holdfast list job`"):
        find_fork_point(job(2, STATUS, store="main"), STORED, Step(41))
    with pytest.raises(CommandError, match="has no object store"):
        find_fork_point(job(2, STATUS), STORED, None)
    with pytest.raises(CommandError, match="job job has no Checkpoint"):
        find_fork_point(job(2, STATUS, store="main"), (), None)


@pytest.mark.fault("A fork is made of a job that a GitOps tool tracks by a label")
def test_a_fork_has_the_spec_of_its_source_without_its_orders() -> None:
    given = job(2, STATUS, store="main").to_dict()
    tracked = {"app.kubernetes.io/instance": "training", "argocd.example.com/app": "training"}
    queue = {"kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/priority-class": "low"}
    given["metadata"] |= {"labels": tracked | queue, "annotations": {"a": "b"}}
    given["spec"] |= {
        "suspend": True,
        "rollback": {"round": 1, "step": 30},
        "restoreFrom": {"checkpointRef": {"name": "an-older-one"}},
    }
    given["spec"]["failurePolicy"]["releasedSteps"] = [45]
    before = json.dumps(given)
    body = forked(given, "fork", STORED[2], 8)
    assert json.dumps(given) == before
    assert body["metadata"] == {
        "name": "fork",
        "namespace": "team-a",
        "labels": queue,
    }
    spec = body["spec"]
    assert spec["workers"] == 8
    assert spec["restoreFrom"] == {"checkpointRef": {"name": STORED[2].name}}
    assert not {"suspend", "rollback"} & spec.keys()
    assert "releasedSteps" not in spec["failurePolicy"]
    assert spec["template"] == given["spec"]["template"]
    assert spec["checkpoint"] == given["spec"]["checkpoint"]
    assert forked(given, "fork", STORED[2], None)["spec"]["workers"] == 2
