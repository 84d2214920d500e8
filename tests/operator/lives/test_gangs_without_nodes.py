"""Gangs whose pods cannot all be scheduled give their nodes back, and try again (ADR 0011)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from tests.support.operator.builders import now
from tests.support.operator.life import Life, after_each_death, runs
from tests.support.operator.oracle import broken_rules

from holdfast_core.api import JobCondition, TrainingJobStatus
from holdfast_operator.model.actions import EventKind
from holdfast_operator.model.reasons import Reason

TIME_OUT = 60


def half_of_the_nodes(*, store: bool = False, total_steps: int = 100_000) -> Life:
    """Return a new job of four pods in a cluster that has room for two of them."""
    life = Life(store=store, every=5, total_steps=total_steps)
    life.change_spec(scheduleTimeoutSeconds=TIME_OUT)
    life.cluster.pods_per_node = 1
    life.cluster.full_nodes = set(list(life.cluster.nodes)[2:])
    return life


def unschedulable(life: Life) -> tuple[str, str, str]:
    return life.condition(JobCondition.UNSCHEDULABLE)


def gave_back(status: TrainingJobStatus) -> bool:
    return status.scheduling is not None and status.scheduling.retry_at is not None


@pytest.mark.fault("Not all pods of a gang can be scheduled")
def test_pods_that_cannot_all_be_scheduled_are_deleted_and_created_again() -> None:
    life = half_of_the_nodes()
    life.run(TIME_OUT - 5)
    assert len(life.cluster.pods) == 4
    life.run(15)
    assert life.cluster.pods == {}, "the gang holds no node"
    value, reason, message = unschedulable(life)
    assert (value, reason) == ("True", Reason.NOT_SCHEDULED)
    assert message.startswith("2 of 4 pods have no node (")
    assert "0/6 nodes are available" in message
    assert "Round 1 creates them again at 2026-01-01T" in message
    assert life.condition(JobCondition.RUNNING)[:2] == ("False", Reason.NOT_SCHEDULED)
    warnings = [e for e in life.operator.events if e.kind is EventKind.WARNING]
    assert [e.reason for e in warnings] == [Reason.NOT_SCHEDULED]

    life.cluster.full_nodes = set()
    life.run(90, until=runs)
    assert life.status.restart_round == 1
    assert unschedulable(life)[:2] == ("False", Reason.SCHEDULED)
    assert life.status.scheduling is None
    assert life.status.restarts == 0
    assert broken_rules(life.cluster, copies=1) == []


@pytest.mark.fault("A quota refuses the pods of a gang for longer than the time-out")
def test_pods_that_a_quota_refuses_count_as_well() -> None:
    life = half_of_the_nodes()
    life.cluster.pod_refusal = "exceeded quota: gpus"
    life.run(TIME_OUT + 5)
    value, reason, message = unschedulable(life)
    assert (value, reason) == ("True", Reason.NOT_SCHEDULED)
    assert message.startswith("4 of 4 pods have no node (")
    assert "exceeded quota: gpus" in message
    life.cluster.pod_refusal, life.cluster.full_nodes = "", set()
    life.run(90, until=runs)
    assert runs(life.status)


def test_zero_lets_pods_wait_without_a_limit() -> None:
    life = half_of_the_nodes()
    life.change_spec(scheduleTimeoutSeconds=0)
    life.run(5)
    life.cluster.seconds += 100_000
    life.run(5)
    assert len(life.cluster.pods) == 4
    assert life.status.condition(JobCondition.UNSCHEDULABLE) is None


def test_pods_that_have_nodes_and_do_not_start_are_kept() -> None:
    life = half_of_the_nodes()
    life.cluster.full_nodes, life.cluster.hold_starts = set(), True
    life.run(TIME_OUT + 20)
    assert len(life.cluster.pods) == 4
    assert life.nothing_was_deleted()


def test_pods_that_a_queue_holds_back_are_kept() -> None:
    life = half_of_the_nodes()
    life.cluster.gated = True
    life.run(TIME_OUT + 20)
    assert len(life.cluster.pods) == 4
    assert life.nothing_was_deleted()
    life.cluster.gated = False
    life.run(TIME_OUT - 10)
    assert life.nothing_was_deleted(), "the time counts from the removal of the gates"
    life.run(20)
    assert life.cluster.pods == {}


def test_each_back_off_is_longer_than_the_one_before() -> None:
    life = half_of_the_nodes()
    for tries, shortest in ((1, 30), (2, 60), (3, 120)):
        life.run(TIME_OUT + 10, until=gave_back)
        scheduling = life.status.scheduling
        assert scheduling.timeouts == tries
        left = scheduling.retry_at - now(life.cluster.seconds).utc
        assert timedelta(seconds=shortest - 2) <= left <= timedelta(seconds=2 * shortest)
        life.cluster.seconds += left.total_seconds()
        life.run(5)
        assert len(life.cluster.pods) == 4


def loses_a_pod_for_which_no_node_is_left(life: Life) -> None:
    life.cluster.full_nodes = set(life.cluster.nodes)
    life.cluster.lose_pod(life.pod(1))
    life.run(TIME_OUT + 10)


@pytest.mark.fault("A gang that alone has the newest step finds no node for a lost pod")
def test_a_gang_that_alone_has_the_newest_step_keeps_its_pods() -> None:
    life = half_of_the_nodes()
    life.cluster.full_nodes = set()
    life.run(40)
    newest = life.newest()
    loses_a_pod_for_which_no_node_is_left(life)
    value, reason, message = unschedulable(life)
    assert (value, reason) == ("True", Reason.NODES_KEPT)
    assert f"keep their nodes, because step {newest} is committed on the nodes only" in message
    assert life.nothing_was_deleted()
    life.cluster.full_nodes = set()
    life.run(60, until=runs)
    assert runs(life.status)
    assert life.status.restore_point.step == newest
    assert unschedulable(life)[:2] == ("False", Reason.SCHEDULED)
    assert broken_rules(life.cluster, copies=1) == []


@pytest.mark.fault("The deadline of a job passes while a gang waits for a node")
def test_a_gang_that_fails_while_it_waits_waits_for_no_node_any_more() -> None:
    life = half_of_the_nodes()
    life.cluster.full_nodes = set()
    life.run(40)
    loses_a_pod_for_which_no_node_is_left(life)
    assert unschedulable(life)[0] == "True"
    life.change_spec(activeDeadlineSeconds=1)
    life.run(5)
    assert life.status.is_true(JobCondition.FAILED)
    assert unschedulable(life)[:2] == ("False", Reason.DEADLINE_EXCEEDED)


def test_a_gang_whose_newest_step_is_in_the_store_gives_its_nodes_back() -> None:
    life = half_of_the_nodes(store=True)
    life.cluster.full_nodes = set()
    life.run(40)
    life.run(60, until=lambda s: s.last_persisted is not None and s.last_persisted.step == s.step)
    newest = life.newest()
    loses_a_pod_for_which_no_node_is_left(life)
    assert life.cluster.pods == {}
    assert unschedulable(life)[:2] == ("True", Reason.NOT_SCHEDULED)
    life.cluster.full_nodes = set()
    life.recovers_from(newest)


def test_a_job_that_waits_for_its_next_try_is_suspended_and_resumed() -> None:
    life = half_of_the_nodes()
    life.run(TIME_OUT + 10, until=gave_back)
    life.change_spec(suspend=True)
    life.run(5)
    assert life.status.is_true(JobCondition.SUSPENDED)
    assert life.status.scheduling is None
    assert not life.status.is_true(JobCondition.UNSCHEDULABLE)
    life.cluster.full_nodes = set()
    life.change_spec(suspend=False)
    life.run(15, until=runs)
    assert runs(life.status), "a resumed job does not wait for the back-off"


@pytest.mark.fault("The clock was wrong when the next try was stamped")
@pytest.mark.parametrize("clock", [timedelta(days=-400), timedelta(days=400)], ids=str)
def test_a_clock_that_was_wrong_does_not_delay_the_next_try(clock: timedelta) -> None:
    """The operator's node may get its time after the operator has written the stamp."""
    life = half_of_the_nodes()
    life.cluster.seconds += 500 * 86400
    life.run(5)
    life.run(TIME_OUT + 10, until=gave_back)
    life.cluster.seconds += clock.total_seconds()
    life.cluster.full_nodes = set()
    life.restart()
    life.run(100, until=runs)
    assert runs(life.status)


@pytest.mark.fault("The operator dies after each write while a gang gives its nodes back")
def test_an_operator_that_dies_while_it_gives_nodes_back_is_replaced() -> None:
    begun = half_of_the_nodes()
    begun.run(TIME_OUT - 3)
    for life in after_each_death(begun, seconds=75):
        life.run(3 * TIME_OUT, until=gave_back)
        life.run(4)
        assert life.cluster.pods == {}
        life.cluster.full_nodes = set()
        life.run(130, until=runs)
        assert runs(life.status)
        assert broken_rules(life.cluster, copies=1) == []


def together(lives: tuple[Life, Life], seconds: int, until: Callable[[], bool]) -> None:
    """Run two jobs on the same four nodes, of which each has room for one pod."""
    shared = list(lives[0].cluster.nodes)[:4]
    for _ in range(seconds):
        for life, other in (lives, lives[::-1]):
            taken = {p.view.node for p in other.cluster.pods.values() if not p.view.ended}
            spare = set(life.cluster.nodes) - set(shared)
            life.cluster.full_nodes = spare | {n for n in taken if n is not None}
            life.run(1)
        if until():
            return


@pytest.mark.fault("Two gangs hold half of the nodes each")
def test_two_gangs_that_hold_half_of_the_nodes_each_both_finish() -> None:
    lives = (half_of_the_nodes(total_steps=60), half_of_the_nodes(total_steps=60))
    first, second = lives
    second.cluster.create_job_again()  # a job with another uid
    nodes = list(first.cluster.nodes)
    second.cluster.full_nodes = set(nodes) - set(nodes[2:4])
    for life in lives:
        life.run(4)
    held = [sorted(p.view.node or "" for p in x.cluster.pods.values()) for x in lives]
    assert held == [["", "", nodes[0], nodes[1]], ["", "", nodes[2], nodes[3]]]

    def complete(*jobs: Life) -> list[Life]:
        return [x for x in jobs if x.status.is_true(JobCondition.COMPLETE)]

    together(lives, 900, until=lambda: len(complete(*lives)) == 2)
    assert complete(*lives) == [*lives]
