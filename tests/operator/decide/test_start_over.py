"""A gang that has lost every checkpoint starts over if that loses little, or if a person says so, once."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.support.operator.builders import (
    START,
    checkpoint,
    manifest_digest,
    now,
    pod,
    sidecar,
    status,
    store,
    world_of,
)
from tests.support.operator.builders import job as job_of

from holdfast_core.api import (
    FailurePolicySpec,
    GoodputStatus,
    LineageEntry,
    StartOverSpec,
    TrainingJobStatus,
    changed,
    on_lineage,
)
from holdfast_core.api.training_job import RollbackSpec
from holdfast_core.ids import CheckpointId, Digest, RestartRound, Step
from holdfast_core.messages.schema import Seal
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.facts.rollback import first_round, with_trained
from holdfast_operator.decide.gang import round_message
from holdfast_operator.decide.restore_point import AskStore, Choice, Chosen, Wait, choose
from holdfast_operator.model.actions import Call, ChooseRestorePoint
from holdfast_operator.model.job import JobMemory, Observed, Seen
from holdfast_operator.model.reasons import Reason

NEW = (pod(0, 3), pod(1, 3))
"""All pods are of round 3, so that no shard of an earlier round is left."""
LOST = status(
    3,
    (3, 3),
    step=Step(17),
    last_committed_step=Step(15),
    lineage=(LineageEntry(round=RestartRound(1)),),
    trained_seconds=600.0,
    goodput=GoodputStatus(ratio=1.0, training_seconds=500),
)
MEMORY = JobMemory(round=RestartRound(3), round_seen_at=900.0, seen={(Seen.ANSWERING, ""): 900.0})


NOTHING: dict[Digest, CheckpointId] = {}


def observed(
    state: TrainingJobStatus = LOST,
    *,
    at_most: str = "30m",
    confirmed: int | None = None,
    stored: dict[Digest, CheckpointId] | None = NOTHING,
    **changes: Any,
) -> Observed:
    """Return a gang of new pods, of which the first has listed the store."""
    policy = FailurePolicySpec(start_over=StartOverSpec(at_most=at_most))
    order = None if confirmed is None else RollbackSpec(round=RestartRound(confirmed))
    first, second = (sidecar(p, 3) for p in NEW)
    assert first.inventory is not None
    return Observed(
        job=job_of(2, state, failure_policy=policy, rollback=order, store="main", **changes),
        pods=NEW,
        sidecars=(replace(first, inventory=replace(first.inventory, stored=stored)), second),
        store=store(),
        memory=MEMORY,
    )


def choice_of(state: TrainingJobStatus = LOST, **changes: Any) -> Choice:
    return choose(world_of(observed(state, **changes), MEMORY, at=1000.0))


@pytest.mark.fault("All copies of the only checkpoint are lost with pods and volumes")
@pytest.mark.parametrize(
    ("at_most", "seconds", "starts"),
    [
        ("30m", 1800, True),
        ("30m", 1801, False),
        ("0s", 0, False),
        ("0s", 1, False),
        ("1h", 3600, True),
    ],
)
def test_the_gang_starts_over_if_it_loses_at_most_the_limit(
    at_most: str, seconds: int, starts: bool
) -> None:
    choice = choice_of(changed(LOST, trained_seconds=float(seconds)), at_most=at_most)
    if starts:
        assert isinstance(choice, Chosen)
        assert (choice.point.step, choice.reason) == (None, Reason.STARTED_OVER)
        assert "gives up 17 steps" in choice.message
        return
    assert isinstance(choice, Wait)
    assert choice.note.reason == Reason.CHECKPOINTS_LOST


def test_the_wait_names_the_loss_and_the_command() -> None:
    choice = choice_of(changed(LOST, trained_seconds=7200.0))
    assert isinstance(choice, Wait)
    text = choice.note.message
    assert "17 steps, at most 120 min of training" in text
    assert "kubectl holdfast restart job -n team-a --from-start" in text


def test_a_time_that_was_never_measured_is_not_short() -> None:
    """An older operator began the job."""
    assert isinstance(choice_of(changed(LOST, trained_seconds=None)), Wait)


@pytest.mark.fault("The object store is down while the gang looks there for its last checkpoint")
def test_a_store_that_does_not_answer_is_no_loss() -> None:
    for confirmed in (None, 1):
        assert isinstance(choice_of(stored=None, confirmed=confirmed), AskStore)


def test_a_checkpoint_that_the_store_has_is_restored() -> None:
    there = {manifest_digest(15, 1): CheckpointId(Step(15), RestartRound(1))}
    choice = choice_of(stored=there, confirmed=1)
    assert isinstance(choice, Chosen)
    assert choice.point.id == CheckpointId(Step(15), RestartRound(1))


@pytest.mark.parametrize(
    ("confirmed", "starts"), [(None, False), (0, False), (1, True), (2, False)]
)
def test_a_person_gives_up_what_one_round_has_trained(confirmed: int | None, starts: bool) -> None:
    choice = choice_of(at_most="0s", confirmed=confirmed)
    assert isinstance(choice, Chosen if starts else Wait)


@pytest.mark.fault("A start over is repeated, or a second operator carries it out")
def test_one_confirmation_starts_the_gang_over_once() -> None:
    """The checkpoints of the round that started over are lost, too, before anybody looks."""
    seen = observed(at_most="0s", confirmed=1)
    first = decide(seen, now(1000.0)).status
    assert isinstance(first, ChooseRestorePoint)
    assert decide(seen, now(1000.0)).status == first, (
        "the loser's write has the same resourceVersion"
    )
    again = changed(
        first.status,
        restart_round=RestartRound(3),
        restore_point=None,
        coordinator=None,
        last_committed_step=Step(5),
    )
    assert isinstance(choice_of(again, at_most="0s", confirmed=1), Wait)


def test_the_status_says_what_was_lost() -> None:
    write = decide(observed(), now(1000.0)).status
    assert isinstance(write, ChooseRestorePoint)
    after = write.status
    assert after.lineage == (LineageEntry(round=RestartRound(3)),)
    assert after.last_committed_step is None
    assert (after.trained_seconds, after.chosen_at) == (0, now(1000.0).utc)
    running = after.condition("Running")
    assert running is not None and running.reason == Reason.STARTED_OVER
    assert "gives up 17 steps, at most 10 min of training" in running.message
    assert after.goodput is not None and after.goodput.lost_work_seconds >= 500


def test_a_quarantined_checkpoint_is_given_up_by_a_person_only() -> None:
    apart = CheckpointId(Step(5), RestartRound(1))
    state = changed(LOST, quarantined=(apart,))
    waits = choice_of(state)
    assert isinstance(waits, Wait)
    assert "releasedSteps" in waits.note.message
    assert isinstance(choice_of(state, confirmed=1), Chosen)


SOURCE = checkpoint(1000, 2, name="other-s1000-r2", job="other", job_uid="other-uid")
FROM_SOURCE = changed(
    LOST,
    step=Step(1017),
    last_committed_step=Step(1015),
    lineage=(LineageEntry(round=RestartRound(1), base=CheckpointId(Step(1000), RestartRound(2))),),
)


def test_a_gang_with_a_source_starts_over_from_it() -> None:
    seen = replace(observed(FROM_SOURCE, restore_from="other-s1000-r2"), checkpoints=(SOURCE,))
    write = decide(seen, now(1000.0)).status
    assert isinstance(write, ChooseRestorePoint)
    after = write.status
    assert (after.restore_point.step, after.restore_point.job_uid) == (1000, "other-uid")
    running = after.condition("Running")
    assert running is not None and "gives up 17 steps" in running.message
    assert first_round(after.lineage) == 3
    assert not on_lineage(CheckpointId(Step(900), RestartRound(1)), after.lineage), (
        "below the source"
    )
    assert on_lineage(CheckpointId(Step(1005), RestartRound(3)), after.lineage)


def test_sidecars_learn_where_the_lineage_begins() -> None:
    started = changed(LOST, lineage=(LineageEntry(round=RestartRound(3)),))
    assert round_message(world_of(observed(started), MEMORY)).lineage_from == 3


def test_a_source_that_is_gone_is_waited_for_as_at_a_first_start() -> None:
    choice = choice_of(FROM_SOURCE, restore_from="other-s1000-r2")
    assert isinstance(choice, Wait)
    assert choice.note.reason == Reason.RESTORE_POINT_UNAVAILABLE


def test_the_store_is_listed_again_while_a_person_is_waited_for() -> None:
    """Somebody may restore its objects."""
    seen = observed(at_most="0s")

    def looks(at: float) -> int:
        calls = (a.message for a in decide(seen, now(at)).actions if isinstance(a, Call))
        return sum(isinstance(m, Seal) and m.look_in_store for m in calls)

    assert looks(930.0) == 0
    assert looks(961.0) > 0


@pytest.mark.fault("The operator is away for hours while the gang trains, and everything is lost")
def test_the_time_of_a_round_counts_although_no_operator_saw_it() -> None:
    state = changed(LOST, trained_seconds=100.0, chosen_at=START)
    world = world_of(observed(state), MEMORY, at=1000.0)
    after = with_trained(state, world)
    assert after.chosen_at is None
    passed = (world.now.utc - START) / timedelta(seconds=1)
    assert after.trained_seconds == 100 + passed
