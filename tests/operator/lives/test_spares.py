"""Spare pods take the place of lost workers, whatever fails meanwhile (ADR 0015)."""

from __future__ import annotations

import copy

import pytest
from tests.support.operator.life import WORKERS, Life, after_each_death
from tests.support.operator.oracle import broken_rules

from holdfast_core.api import JobCondition
from holdfast_core.ids import is_spare
from holdfast_operator.model.reasons import Reason


def trained(spares: int = 1, *, store: bool = False, copies: int = 1) -> Life:
    """Return a job that trains, all of whose spares are ready."""
    life = Life(spares=spares, store=store, copies=copies).trained()
    assert ready(life) == spares
    return life


def ready(life: Life) -> int:
    return 0 if life.status.spares is None else life.status.spares.ready


def promoted(life: Life) -> dict[int, str]:
    """Return the names of the pods that were spares, by worker."""
    spares = life.status.spares
    return {} if spares is None else {r.worker: r.pod for r in spares.promoted}


def spare_pods(life: Life) -> list[str]:
    return [n for n, s in sorted(life.cluster.sidecars.items()) if is_spare(s.worker)]


def goes_on(life: Life, spares: int) -> None:
    """Assert that the whole gang trains, with that many ready spares and no other pod."""
    life.run(120)
    assert life.status.is_true(JobCondition.RUNNING)
    raw = life.cluster.job["status"]
    expected = {*life.cluster.member_names(raw), *life.cluster.spare_names(raw)}
    assert set(life.cluster.pods) == expected
    assert len(expected) == WORKERS + spares
    assert ready(life) == spares
    assert broken_rules(life.cluster, life.copies) == []


def test_spares_are_created_when_the_gang_trains_and_hold_nothing() -> None:
    life = Life(spares=2)
    life.run(30, until=lambda s: s.is_true(JobCondition.RUNNING))
    assert spare_pods(life) == []
    life.run(10)
    assert len(spare_pods(life)) == 2
    assert ready(life) == 2
    life.run(20)
    for name in spare_pods(life):
        assert life.cluster.sidecars[name].shards == {}
        assert not life.cluster.pods[name].view.ready, "a budget of evictions counts ready pods"
    assert life.status.ready_workers == f"{WORKERS}/{WORKERS}"
    [budget] = life.cluster.api.all("poddisruptionbudgets")
    assert budget["spec"]["minAvailable"] == WORKERS - 1


@pytest.mark.fault("A worker is lost while a spare pod is ready")
def test_a_spare_takes_the_place_of_a_lost_worker() -> None:
    life = trained()
    [spare] = spare_pods(life)
    newest = life.newest()
    life.cluster.lose_pod(life.pod(1))
    life.run(30, until=lambda s: s.restart_round == 1)
    assert promoted(life) == {1: spare}
    created = set(life.cluster.pods)
    life.run(30, until=lambda s: s.is_true(JobCondition.RUNNING))
    new = set(life.cluster.pods) - created
    assert new == set(life.cluster.spare_names(life.cluster.job["status"])), "the next spare"
    assert life.cluster.sidecars[spare].worker == 1
    [text] = [e.message for e in life.operator.events if e.reason == Reason.SPARE_PROMOTED]
    assert text == f"spare pod {spare} is worker 1 from round 1 on"
    assert life.status.restore_point.step >= newest
    goes_on(life, 1)
    assert spare_pods(life) != [spare]
    assert life.status.restarts == 1


@pytest.mark.fault("A promoted spare is lost, in its round or later")
def test_a_promoted_spare_is_fenced_and_replaced_as_any_worker() -> None:
    life = trained()
    life.cluster.lose_pod(life.pod(1))
    goes_on(life, 1)
    first = promoted(life)[1]
    life.rank_dies()
    goes_on(life, 1)
    assert promoted(life) == {1: first}, "the pod stays in a round without a lost pod"
    life.cluster.lose_pod(first)
    goes_on(life, 1)
    assert promoted(life)[1] != first
    life.cluster.lose_pod(life.pod(2))
    goes_on(life, 1)
    assert sorted(promoted(life)) == [1, 2]


@pytest.mark.fault("A spare is lost, evicted, or on a node that dies")
def test_a_lost_spare_is_created_again_and_costs_no_round() -> None:
    life = trained()
    [spare] = spare_pods(life)
    node = life.cluster.nodes[life.cluster.pods[spare].view.node or ""]
    life.cluster.lose_pod(spare)
    goes_on(life, 1)
    life.cluster.fail_pod(spare, "Evicted")
    goes_on(life, 1)
    node = life.cluster.nodes[life.cluster.pods[spare].view.node or ""]
    used = {p.view.node for n, p in life.cluster.pods.items() if n != spare}
    assert node.name not in used, "otherwise a worker is lost with it"
    node.dead = True
    goes_on(life, 1)
    assert life.cluster.pods[spare].view.node != node.name
    assert life.status.restart_round == 0


@pytest.mark.parametrize("event", ["suspended", "finished", "deleted"])
def test_spares_end_with_the_job(event: str) -> None:
    life = Life(
        spares=1, store=True, every=5, total_steps=60 if event == "finished" else 10_000
    ).trained()
    assert len(spare_pods(life)) == 1
    match event:
        case "suspended":
            life.change_spec(suspend=True)
        case "deleted":
            life.cluster.delete_job()
    life.run(80)
    assert spare_pods(life) == []
    if event == "suspended":
        life.change_spec(suspend=False)
        goes_on(life, 1)


def test_a_resize_has_new_spares() -> None:
    life = trained(store=True)
    [spare] = spare_pods(life)
    life.change_spec(workers=3)
    life.run(120)
    assert life.status.is_true(JobCondition.RUNNING)
    assert len(life.status.members) == 3
    assert len(spare_pods(life)) == 1
    assert spare_pods(life) != [spare]
    assert promoted(life) == {}


@pytest.mark.fault("The number of spares changes while the gang trains")
@pytest.mark.parametrize("wanted", [0, 1, 3])
def test_the_number_of_spares_changes_while_the_gang_trains(wanted: int) -> None:
    life = trained(2)
    life.cluster.lose_pod(life.pod(1))
    goes_on(life, 2)
    taken = promoted(life)
    life.change_spec(spares=wanted)
    goes_on(life, wanted)
    assert promoted(life) == taken
    assert life.status.restart_round == 1


@pytest.mark.fault("A worker has no node while spares hold some")
def test_spares_make_room_for_a_worker_without_a_node() -> None:
    """Each node has room for one pod. The spare is not ready when the worker is lost."""
    life = trained()
    cluster = life.cluster
    [spare] = spare_pods(life)
    cluster.pods_per_node = 1
    used = {p.view.node for p in cluster.pods.values()}
    assert len(used) == WORKERS + 1
    cluster.full_nodes = set(cluster.nodes) - used
    [worker] = [n for n in cluster.member_names(cluster.job["status"]) if n == life.pod(1)]
    cluster.sidecars[spare].launcher = False
    life.run(3)
    assert ready(life) == 0
    cluster.full_nodes.add(cluster.pods[worker].view.node or "")
    cluster.lose_pod(worker)
    life.run(60)
    assert life.status.is_true(JobCondition.RUNNING)
    assert promoted(life) == {}
    assert spare_pods(life) == [], "its node has a worker now"


def test_a_quota_that_refuses_spares_does_not_disturb_the_gang() -> None:
    life = Life(spares=2, store=True, every=5)
    life.run(30, until=lambda s: len(life.cluster.pods) == WORKERS)
    life.cluster.pod_refusal = "exceeded quota: gpus"
    step = life.status.step or 0
    life.run(60)
    assert life.status.is_true(JobCondition.RUNNING)
    assert life.status.step > step + 30
    assert life.status.last_persisted is not None
    assert life.condition(JobCondition.SPARES_READY)[:2] == ("False", Reason.SPARES_WAIT)
    life.cluster.pod_refusal = ""
    goes_on(life, 2)
    assert life.status.restart_round == 0


@pytest.mark.fault("The operator ends at any write while a spare takes the place of a worker")
def test_an_operator_that_dies_at_any_write_finds_the_promoted_spare() -> None:
    begun = trained(2)
    begun.cluster.lose_pod(begun.pod(1))
    for life in after_each_death(begun, seconds=30):
        goes_on(life, 2)
        assert list(promoted(life)) == [1]
        assert life.status.restart_round == 1


@pytest.mark.fault("The operator ends at any write while a spare takes the place of a worker")
def test_an_operator_that_dies_while_it_creates_spares_continues() -> None:
    for life in after_each_death(Life(spares=2), seconds=30):
        goes_on(life, 2)
        assert life.status.restart_round == 0


@pytest.mark.fault("A promoted spare is lost, in its round or later")
@pytest.mark.parametrize("after", range(0, 8))
def test_a_promoted_spare_that_is_lost_during_its_round_is_replaced(after: int) -> None:
    life = trained(2)
    life.cluster.lose_pod(life.pod(1))
    life.run(30, until=lambda s: s.restart_round == 1)
    first = promoted(life)[1]
    life.run(after)
    life.cluster.lose_pod(first)
    goes_on(life, 2)
    assert promoted(life)[1] != first


@pytest.mark.fault("An old backup of etcd does not know that a spare became a worker")
def test_a_status_that_was_restored_takes_the_spare_back_as_a_survivor() -> None:
    """etcd is restored from a backup of the time before the promotion."""
    life = trained()
    backup = copy.deepcopy(life.cluster.job["status"])
    life.cluster.lose_pod(life.pod(1))
    goes_on(life, 1)
    first, newest = promoted(life)[1], life.newest()
    life.cluster.job["status"] = backup
    life.cluster.touch_job()
    life.cluster.statuses.clear()
    life.restart()
    life.run(60)
    assert life.status.is_true(JobCondition.RUNNING)
    assert promoted(life)[1] == first
    assert life.cluster.sidecars[first].worker == 1
    point = life.status.restore_point
    assert life.status.restart_round == 2
    assert point.step >= newest, "a step of round 1, which the status had forgotten"
