"""spec.workers of a job changes: the gang saves, stops, and continues with the new number (ADR 0011)."""

from __future__ import annotations

import pytest
from tests.support.operator.decisions import counting
from tests.support.operator.life import Life, after_each_death, trains_with
from tests.support.operator.oracle import broken_rules
from tests.support.operator.phases import PHASES, Phase, heal, restart_unschedulable

from holdfast_core.api import JobCondition
from holdfast_core.ids import CheckpointId
from holdfast_operator.model.reasons import Reason


def resizing(life: Life) -> tuple[str, str, str]:
    return life.condition(JobCondition.RESIZING)


def becomes(life: Life, workers: int, newest: CheckpointId | None = None) -> None:
    """Assert that the gang trains with this number of workers, from the newest commit or a later one."""
    life.run(120, until=trains_with(workers))
    life.run(3)
    status = life.status
    assert len(status.members) == workers, status.conditions
    assert status.is_true(JobCondition.RUNNING)
    assert sorted(p.view.worker for p in life.cluster.pods.values()) == list(range(workers))
    point = status.restore_point
    assert point is not None
    if newest is not None:
        assert point.step >= newest.step
    assert budget(life) == workers - 1
    assert str(status.ready_workers).endswith(f"/{workers}")
    assert broken_rules(life.cluster, life.copies) == []


def budget(life: Life) -> int:
    [found] = life.cluster.api.all("poddisruptionbudgets")
    return int(found["spec"]["minAvailable"])


def trained(*, every: int = 1000) -> Life:
    return Life(store=True, every=every).trained()


@pytest.mark.parametrize("workers", [2, 3, 5, 6])
def test_the_gang_saves_stops_and_continues_with_another_number(workers: int) -> None:
    life = trained()
    step, restarts = life.newest(), life.status.restarts
    life.change_spec(workers=workers)
    life.run(2)
    value, reason, message = resizing(life)
    assert (value, reason) == ("True", Reason.STOPPING)
    assert f"the gang of 4 workers is to have {workers}" in message
    becomes(life, workers)
    point = life.status.restore_point
    assert point.step > step
    assert resizing(life)[:2] == ("False", Reason.RESIZED)
    assert life.status.restarts == restarts
    assert life.status.is_true(JobCondition.SUSPENDED) is False
    assert life.status.last_recovery.reason == Reason.RESIZED
    assert life.status.last_recovery.lost_steps == 0
    assert life.status.resize.from_workers is None
    life.cluster.lose_pod(life.pod(1))  # copies on the nodes are those of the new gang
    life.recovers_from(life.newest())
    assert len(life.status.members) == workers


@pytest.mark.parametrize("phase", PHASES, ids=lambda p: p.__name__)
def test_a_job_is_resized_in_this_phase_twice(phase: Phase) -> None:
    life = Life(store=True)
    phase(life)
    newest = life.cluster.newest_commit() if life.cluster.choices else None
    life.change_spec(workers=3)
    if phase is restart_unschedulable:
        life.run(10)
        assert life.nothing_was_deleted(), "the pods that are left have the newest step"
        assert resizing(life)[:2] == ("True", Reason.NOT_PERSISTED)
    heal(life)
    becomes(life, 3, newest)
    life.run(7)
    newest = life.cluster.newest_commit()
    life.change_spec(workers=5)
    becomes(life, 5, newest)


@pytest.mark.fault("The operator dies after each write of a resize, in each phase")
@pytest.mark.parametrize("phase", PHASES, ids=lambda p: p.__name__)
def test_an_operator_that_dies_while_it_resizes_is_replaced(phase: Phase) -> None:
    begun = Life(store=True)
    phase(begun)
    newest = begun.cluster.newest_commit() if begun.cluster.choices else None
    heal(begun)
    begun.change_spec(workers=3)
    for life in after_each_death(begun, seconds=40):
        becomes(life, 3, newest)


@pytest.mark.fault(
    "The number of workers changes back while the gang stops, also across a restart of the operator"
)
@pytest.mark.parametrize("restarts", [False, True], ids=["operator lives", "operator restarts"])
@pytest.mark.parametrize("seconds", range(1, 12))
def test_the_old_number_comes_back_while_the_gang_stops(seconds: int, restarts: bool) -> None:
    """Ranks that stopped return 0, as ranks that have finished do."""
    life = trained(every=5)
    step = life.newest()
    life.change_spec(workers=3)
    life.run(seconds)
    life.change_spec(workers=4)
    if restarts:
        life.restart()
    becomes(life, 4)
    life.run(40)
    assert life.newest() > step + 10
    assert resizing(life)[:2] == ("False", Reason.RESIZED)
    assert counting(life.status) == 0
    assert broken_rules(life.cluster, life.copies) == []


@pytest.mark.fault("The number of workers changes again during a resize")
@pytest.mark.parametrize("seconds", range(0, 14, 2))
def test_the_number_changes_again_during_a_resize(seconds: int) -> None:
    life = trained(every=5)
    newest = life.cluster.newest_commit()
    life.change_spec(workers=3)
    life.run(seconds)
    life.change_spec(workers=6)
    becomes(life, 6, newest)
    assert resizing(life)[:2] == ("False", Reason.RESIZED)


@pytest.mark.fault("A pod is lost during a resize")
@pytest.mark.parametrize("seconds", [0, 2, 4, 6, 8, 10, 14, 18])
def test_a_pod_is_lost_during_a_resize(seconds: int) -> None:
    life = trained(every=5)
    newest = life.cluster.newest_commit()
    life.change_spec(workers=3)
    life.run(seconds)
    life.cluster.lose_pod(life.pod(0))
    life.run(2)
    becomes(life, 3, newest)


@pytest.mark.fault("A job is suspended during a resize")
@pytest.mark.parametrize("seconds", range(0, 12, 2))
def test_a_job_is_suspended_during_a_resize(seconds: int) -> None:
    life = trained(every=5)
    newest = life.cluster.newest_commit()
    life.change_spec(workers=3)
    life.run(seconds)
    life.change_spec(suspend=True)
    life.run(90, until=lambda s: s.is_true(JobCondition.SUSPENDED))
    life.run(5)
    assert life.cluster.pods == {}
    life.change_spec(suspend=False)
    becomes(life, 3, newest)


def test_a_suspended_job_resumes_with_another_number() -> None:
    life = trained()
    life.change_spec(suspend=True)
    life.run(60, until=lambda s: s.is_true(JobCondition.SUSPENDED))
    saved = life.status.last_persisted
    life.change_spec(workers=2)
    life.run(20)
    assert life.cluster.pods == {}
    life.change_spec(suspend=False)
    becomes(life, 2, saved.id)


# --------------------------------------------------------------------------- refused


@pytest.mark.fault("The number of workers of a job without a store changes")
def test_a_job_without_a_store_is_not_resized() -> None:
    life = Life().trained()
    before = {p.view.uid for p in life.cluster.pods.values()}
    life.change_spec(workers=3)
    life.run(20)
    value, reason, message = resizing(life)
    assert (value, reason) == ("False", Reason.NO_OBJECT_TIER)
    assert "is to have 3, but the job has no object store" in message
    assert {p.view.uid for p in life.cluster.pods.values()} == before
    assert budget(life) == 3
    step = life.newest()
    life.cluster.lose_pod(life.pod(1))
    life.recovers_from(step)
    assert len(life.status.members) == 4
    life.change_spec(workers=4)
    life.run(10)
    assert resizing(life)[1] == Reason.RESIZED


def test_one_worker_in_the_spec_does_not_end_the_copies_of_a_gang_that_keeps_four() -> None:
    life = Life()
    spec = life.cluster.job["spec"]
    life.change_spec(checkpoint={k: v for k, v in spec["checkpoint"].items() if k != "peer"})
    life.run(40)
    life.change_spec(workers=1)
    life.run(40)
    run = life.cluster.gang.run
    assert run is not None
    step = life.newest()
    assert life.status.last_replicated_step is not None
    life.cluster.lose_pod(life.pod(1))
    life.recovers_from(step)


def test_a_job_without_a_store_that_never_trained_is_resized() -> None:
    life = Life()
    life.cluster.hold_starts = True
    life.run(5)
    life.change_spec(workers=2)
    life.run(5)
    life.cluster.hold_starts = False
    becomes(life, 2)


@pytest.mark.fault("The CheckpointStore is missing when the number of workers changes")
def test_a_gang_is_not_stopped_while_its_store_is_away() -> None:
    life = trained(every=5)
    [store] = life.cluster.api.all("checkpointstores")
    life.cluster.api.remove("checkpointstores", "team-a", store["metadata"]["name"])
    life.run(5)
    before = {p.view.uid for p in life.cluster.pods.values()}
    life.change_spec(workers=3)
    life.run(40)
    value, reason, _ = resizing(life)
    assert (value, reason) == ("True", Reason.STORE_NOT_FOUND)
    assert life.status.is_true(JobCondition.RUNNING)
    assert {p.view.uid for p in life.cluster.pods.values()} == before
    life.cluster.api.put("checkpointstores", store)
    becomes(life, 3)


@pytest.mark.fault("The object store goes away when the number of workers changes")
def test_a_gang_whose_last_step_did_not_reach_the_store_waits_for_it() -> None:
    life = trained(every=5)
    round_ = life.status.restart_round or 0
    life.cluster.store.away = True
    life.change_spec(workers=3)
    life.run(120)
    assert resizing(life)[:2] == ("True", Reason.STORE_UNAVAILABLE)
    assert life.status.is_true(JobCondition.RUNNING)
    assert life.status.restart_round == round_ + 1, "it stopped once, before the outage was known"
    life.cluster.store.away = False
    becomes(life, 3)


def goes_back(life: Life) -> None:
    life.run(120, until=lambda s: s.resize is not None and s.resize.refused_workers == 3)
    becomes(life, 4)
    value, reason, message = resizing(life)
    assert (value, reason) == ("False", Reason.RESIZE_FAILED)
    assert "failed with 3 workers before its first step, and continues with 4" in message
    assert "StateMismatchError: tensor w.0 is a plain tensor" in message


@pytest.mark.fault("The ranks cannot reshard the state for the new number of workers")
def test_a_state_that_cannot_be_resharded_costs_two_rounds_and_nothing_else() -> None:
    life = trained()
    life.change_spec(failurePolicy={"maxRestarts": 0, "quarantineAfter": 1})
    step, round_ = life.newest(), life.status.restart_round
    life.cluster.gang.cannot_reshard_to.add(3)
    life.change_spec(workers=3)
    goes_back(life)
    assert life.newest() >= step
    assert life.status.restart_round == (round_ or 0) + 2
    assert life.status.quarantined == ()
    assert counting(life.status) == 0
    life.run(60)
    assert life.status.restart_round == (round_ or 0) + 2, "3 is not tried again"
    life.cluster.lose_pod(life.pod(2))
    life.recovers_from(life.newest())
    assert resizing(life)[1] == Reason.RESIZE_FAILED
    life.change_spec(workers=4)
    life.run(10)
    assert resizing(life)[1] == Reason.RESIZED
    life.cluster.gang.cannot_reshard_to.clear()
    life.change_spec(workers=3)
    becomes(life, 3)


def test_another_number_is_tried_after_one_was_refused() -> None:
    life = trained()
    life.cluster.gang.cannot_reshard_to.add(3)
    life.change_spec(workers=3)
    goes_back(life)
    life.change_spec(workers=5)
    becomes(life, 5)


def test_a_refused_number_is_not_tried_after_a_suspension() -> None:
    life = trained()
    life.cluster.gang.cannot_reshard_to.add(3)
    life.change_spec(workers=3)
    goes_back(life)
    life.change_spec(suspend=True)
    life.run(60, until=lambda s: s.is_true(JobCondition.SUSPENDED))
    life.change_spec(suspend=False)
    becomes(life, 4)


@pytest.mark.fault("The operator dies after each write on the way back to the old number")
def test_an_operator_that_dies_on_the_way_back_is_replaced() -> None:
    begun = trained()
    begun.cluster.gang.cannot_reshard_to.add(3)
    begun.change_spec(workers=3)
    for life in after_each_death(begun, seconds=60):
        goes_back(life)


@pytest.mark.fault("A pod is lost at the first start with the new number")
def test_a_pod_that_is_lost_at_the_first_start_is_no_refusal() -> None:
    life = trained()
    life.change_spec(workers=3)
    life.run(60, until=lambda s: len(s.members) == 3 and s.restore_point is not None)
    life.cluster.lose_pod(life.pod(1))
    becomes(life, 3)
    assert life.status.resize.refused_workers is None
