"""An elastic gang continues with fewer workers when nodes are missing, and grows again (ADR 0011)."""

from __future__ import annotations

import pytest
from tests.support.operator.decisions import counting
from tests.support.operator.life import Life, after_each_death, trains_with
from tests.support.operator.oracle import broken_rules

from holdfast_core.api import JobCondition
from holdfast_operator.model.actions import EventKind
from holdfast_operator.model.reasons import Reason

SHRINK_AFTER = 30
GROW_AFTER = 60


def elastic(*, smallest: int = 2, every: int = 5, total_steps: int = 100_000) -> Life:
    """Return a new elastic job of four workers in a cluster in which each node takes one pod."""
    life = Life(store=True, every=every, total_steps=total_steps)
    life.change_spec(
        elastic={
            "min": smallest,
            "shrinkAfterSeconds": SHRINK_AFTER,
            "growAfterSeconds": GROW_AFTER,
        }
    )
    life.cluster.pods_per_node = 1
    return life


def trained(**options: int) -> Life:
    life = elastic(**options)
    life.run(40)
    assert life.status.is_true(JobCondition.RUNNING)
    return life


def lose_workers_and_their_nodes(life: Life, *workers: int) -> None:
    """Lose the pods of these workers. Other jobs take their nodes and all free ones."""
    members = range(len(life.status.members))
    views = [life.operator.worker_pod(w) for w in members if w not in workers]
    kept = {v.node for v in views if v is not None}
    life.cluster.full_nodes = set(life.cluster.nodes) - kept
    for name in [life.pod(w) for w in workers]:
        life.cluster.lose_pod(name)


def persists(life: Life) -> None:
    """Run until the newest committed step is in the store."""
    life.run(
        60, until=lambda s: s.last_persisted is not None and s.last_persisted.step >= life.newest()
    )


def missing(life: Life) -> tuple[str, str, str]:
    return life.condition(JobCondition.WORKERS_MISSING)


def becomes(life: Life, workers: int, seconds: int = 200) -> None:
    """Assert that the gang trains with this number of workers, without the loss of a committed step."""
    life.run(seconds, until=trains_with(workers))
    life.run(3)
    status = life.status
    assert len(status.members) == workers, status.conditions
    assert status.is_true(JobCondition.RUNNING)
    assert broken_rules(life.cluster, life.copies) == []


def shrunk(**options: int) -> Life:
    """Return a job that continues with three of four workers."""
    life = trained(**options)
    persists(life)
    lose_workers_and_their_nodes(life, 1)
    becomes(life, 3)
    return life


def summary(life: Life) -> str:
    return str(life.cluster.job["status"]["readyWorkers"])


# --------------------------------------------------------------------------- fewer workers


@pytest.mark.fault("A lost worker finds no node, and the gang is elastic")
def test_a_gang_that_lost_a_worker_and_its_node_continues_without_it() -> None:
    life = trained()
    persists(life)
    step = life.newest()
    lose_workers_and_their_nodes(life, 1)
    life.run(SHRINK_AFTER - 5)
    assert len(life.status.members) == 4, "the scheduler has some time to find a node"
    becomes(life, 3)
    status = life.status
    assert status.restore_point.step == step
    value, reason, message = missing(life)
    assert (value, reason) == ("True", Reason.SHRUNK)
    assert "the gang continues with 3 of 4 workers" in message
    assert summary(life) == "3/4"
    assert counting(status) == 0
    assert status.last_recovery.reason == Reason.SHRUNK
    assert (status.elastic.workers, status.elastic.of_workers) == (3, 4)
    [warning] = [e for e in life.operator.events if e.reason == Reason.SHRUNK]
    assert warning.kind is EventKind.WARNING
    assert "1 of 4 pods have no node" in warning.message
    assert "0/6 nodes are available" in warning.message


@pytest.mark.fault("More nodes are lost than an elastic gang can do without")
def test_a_gang_can_shrink_again_down_to_min_but_not_below() -> None:
    life = shrunk()
    persists(life)
    lose_workers_and_their_nodes(life, 0)
    becomes(life, 2)
    persists(life)
    lose_workers_and_their_nodes(life, 1)
    life.run(SHRINK_AFTER + 20)
    assert len(life.status.members) == 2
    value, reason, message = missing(life)
    assert (value, reason) == ("True", Reason.CANNOT_SHRINK)
    assert "there are nodes for 1 workers, and elastic.min is 2" in message
    life.cluster.full_nodes = set()
    life.run(60, until=trains_with(2))
    assert life.status.is_true(JobCondition.RUNNING)


def test_a_gang_below_min_gives_its_nodes_back_as_others_do() -> None:
    life = elastic(smallest=3)
    life.change_spec(scheduleTimeoutSeconds=60)
    life.cluster.full_nodes = set(list(life.cluster.nodes)[2:])
    life.run(70)
    assert life.cluster.pods == {}
    assert life.status.scheduling is not None
    life.cluster.full_nodes = set(list(life.cluster.nodes)[3:])
    becomes(life, 3)


@pytest.mark.fault("An elastic gang that alone has the newest step finds no node for a lost pod")
def test_a_gang_that_alone_has_the_newest_step_does_not_shrink() -> None:
    life = trained(every=1000)
    newest = life.newest()
    lose_workers_and_their_nodes(life, 1)
    life.run(SHRINK_AFTER + 30)
    assert len(life.status.members) == 4
    value, reason, message = missing(life)
    assert (value, reason) == ("True", Reason.CANNOT_SHRINK)
    assert f"step {newest} is committed on the nodes only" in message
    assert life.nothing_was_deleted()
    life.cluster.full_nodes = set()
    becomes(life, 4)
    assert missing(life)[:2] == ("False", Reason.ALL_WORKERS)
    assert life.cluster.choices[-1].status["restorePoint"]["step"] >= newest


@pytest.mark.fault("The CheckpointStore is missing when an elastic gang has to shrink")
def test_a_gang_does_not_shrink_while_its_store_is_away() -> None:
    life = trained()
    persists(life)
    lose_workers_and_their_nodes(life, 1)
    life.run(10)
    [store] = life.cluster.api.all("checkpointstores")
    life.cluster.api.remove("checkpointstores", "team-a", store["metadata"]["name"])
    life.run(SHRINK_AFTER + 20)
    assert len(life.status.members) == 4
    assert missing(life)[:2] == ("True", Reason.CANNOT_SHRINK)
    life.cluster.api.put("checkpointstores", store)
    becomes(life, 3)


def test_old_pods_that_end_slowly_do_not_make_the_gang_shrink_again() -> None:
    life = trained()
    persists(life)
    life.cluster.delete_seconds = 3 * SHRINK_AFTER
    lose_workers_and_their_nodes(life, 1)
    life.run(200, until=lambda s: len(s.members) < 4)
    for node in sorted(life.cluster.full_nodes)[:2]:
        life.cluster.full_nodes.remove(node)  # the third worker waits for a node of an old pod
    becomes(life, 3)
    sizes = {len(s["members"]) for s in life.cluster.statuses}
    assert sizes == {4, 3}


@pytest.mark.fault("The operator dies after each write while an elastic gang shrinks")
def test_an_operator_that_dies_at_any_write_while_it_shrinks_a_gang_is_replaced() -> None:
    begun = trained()
    persists(begun)
    step = begun.newest()
    lose_workers_and_their_nodes(begun, 1)
    for life in after_each_death(begun, seconds=SHRINK_AFTER + 12):
        becomes(life, 3)
        assert life.newest() >= step


# --------------------------------------------------------------------------- refused numbers


@pytest.mark.fault("The ranks of an elastic gang refuse the smaller number")
def test_a_number_that_the_script_refuses_is_not_tried_again_until_the_spec_changes() -> None:
    life = trained(smallest=3)
    persists(life)
    step = life.newest()
    life.cluster.gang.cannot_reshard_to.add(3)
    lose_workers_and_their_nodes(life, 1)
    life.run(120, until=lambda s: s.resize is not None and s.resize.refused_workers == 3)
    life.run(SHRINK_AFTER + 20)
    round_ = life.status.restart_round
    assert len(life.status.members) == 4
    value, reason, message = missing(life)
    assert (value, reason) == ("True", Reason.CANNOT_SHRINK)
    assert "it failed with 3 workers before its first step" in message
    assert life.condition(JobCondition.RESIZING)[:2] == ("False", Reason.RESIZE_FAILED)
    life.run(3 * SHRINK_AFTER)
    assert life.status.restart_round == round_, "3 is not tried again"
    life.cluster.full_nodes = set()
    becomes(life, 4)
    assert life.cluster.choices[-1].status["restorePoint"]["step"] >= step
    assert counting(life.status) == 0


# --------------------------------------------------------------------------- growth


def placeholders(life: Life) -> set[str]:
    return {n for n, p in life.cluster.pods.items() if p.view.placeholder}


def looking_for_a_node(**options: int) -> Life:
    """Return a job of three of four workers whose placeholder waits for a node."""
    life = shrunk(**options)
    life.run(GROW_AFTER + 10, until=lambda _: bool(placeholders(life)))
    life.run(3)
    assert len(placeholders(life)) == 1
    return life


def grows_to(life: Life, workers: int) -> None:
    becomes(life, workers)
    assert placeholders(life) == set()
    nodes = [p.view.node for p in life.cluster.pods.values()]
    assert len(set(nodes)) == len(nodes) == workers


def test_a_shrunken_gang_grows_when_there_is_room() -> None:
    life = shrunk()
    life.run(GROW_AFTER - 20)
    assert placeholders(life) == set(), "the gang first trains for growAfterSeconds"
    life.run(30)
    [name] = placeholders(life)
    assert name.endswith("-placeholder-3")
    life.run(60)
    assert len(life.status.members) == 3, "there is no room yet"
    assert life.status.is_true(JobCondition.RUNNING)
    assert placeholders(life) == {name}
    assert "There is no node for 1 placeholders: 0/6 nodes are available" in missing(life)[2]
    assert summary(life) == "3/4"
    step, restarts = life.newest(), life.status.restarts

    life.cluster.full_nodes = set()
    life.run(5)
    assert missing(life)[:2] == ("True", Reason.GROWING)
    grows_to(life, 4)
    status = life.status
    assert status.restore_point.step > step, "the gang has saved before it stopped"
    assert status.restarts == restarts
    assert (status.last_recovery.reason, status.last_recovery.lost_steps) == (Reason.GROWN, 0)
    assert missing(life)[:2] == ("False", Reason.ALL_WORKERS)
    assert status.elastic is None
    assert summary(life) == "4/4"


def test_a_quota_that_refuses_placeholders_is_in_the_condition() -> None:
    life = shrunk()
    life.cluster.pod_refusal = "exceeded quota: gpus"
    life.run(GROW_AFTER + 10)
    assert placeholders(life) == set()
    assert life.status.is_true(JobCondition.RUNNING)
    status, reason, text = missing(life)
    assert (status, reason) == ("True", Reason.SHRUNK)
    assert "exceeded quota: gpus" in text
    assert "tries again after elastic.growAfterSeconds" in text

    life.cluster.pod_refusal = ""
    life.run(GROW_AFTER + 10, until=lambda _: bool(placeholders(life)))
    life.run(3)
    assert "exceeded quota" not in missing(life)[2]
    life.cluster.full_nodes = set()
    grows_to(life, 4)


def test_a_gang_grows_by_the_workers_for_which_there_are_nodes() -> None:
    life = shrunk()
    persists(life)
    lose_workers_and_their_nodes(life, 0)
    becomes(life, 2)
    life.run(GROW_AFTER + 10, until=lambda _: len(placeholders(life)) == 2)
    life.cluster.full_nodes.pop()
    becomes(life, 3)
    assert missing(life)[:2] == ("True", Reason.SHRUNK)
    assert summary(life) == "3/4"
    life.cluster.full_nodes = set()
    grows_to(life, 4)


@pytest.mark.fault("The ranks of an elastic gang refuse the larger number")
def test_a_number_above_the_present_one_that_the_script_refuses_is_not_tried_again() -> None:
    life = looking_for_a_node()
    life.cluster.gang.cannot_reshard_to.add(4)
    life.cluster.full_nodes = set()
    life.run(120, until=lambda s: s.resize is not None and s.resize.refused_workers == 4)
    becomes(life, 3)
    round_ = life.status.restart_round
    life.run(GROW_AFTER + 60)
    assert life.status.restart_round == round_
    assert placeholders(life) == set()
    assert "It failed with 4, and grows after spec.workers has changed" in missing(life)[2]
    life.cluster.gang.cannot_reshard_to.clear()
    life.change_spec(workers=5)
    becomes(life, 5)


@pytest.mark.fault("A job with placeholders is suspended, resized or loses a pod")
@pytest.mark.parametrize("found", [False, True], ids=["waits for a node", "has a node"])
@pytest.mark.parametrize("event", ["suspended", "without elastic", "resized", "loses a pod"])
def test_placeholders_are_deleted_when_the_gang_no_longer_needs_them(
    event: str, found: bool
) -> None:
    life = looking_for_a_node()
    if found:
        life.cluster.full_nodes = set()
        life.run(1)
    match event:
        case "suspended":
            life.change_spec(suspend=True)
            life.run(60, until=lambda s: s.is_true(JobCondition.SUSPENDED))
            life.run(5)
            assert life.cluster.pods == {}
            life.cluster.full_nodes = set()
            life.change_spec(suspend=False)
            grows_to(life, 4)
        case "without elastic":
            life.change_spec(elastic=None)
            life.run(20)
            assert placeholders(life) == set()
            life.cluster.full_nodes = set()
            grows_to(life, 4)
        case "resized":
            life.change_spec(workers=2)
            grows_to(life, 2)
        case "loses a pod":
            persists(life)
            life.cluster.lose_pod(life.pod(1))
            life.run(10)
            life.cluster.full_nodes = set()
            becomes(life, 4, seconds=GROW_AFTER + 120)


def test_placeholders_are_deleted_when_the_job_completes() -> None:
    life = looking_for_a_node(total_steps=260)
    life.run(400, until=lambda s: s.is_true(JobCondition.COMPLETE))
    assert life.status.is_true(JobCondition.COMPLETE)
    life.run(3)
    assert placeholders(life) == set()
    assert missing(life)[0] == "False"


@pytest.mark.fault("A kubelet rejects a placeholder")
def test_a_placeholder_that_a_kubelet_rejects_is_replaced_later() -> None:
    life = looking_for_a_node()
    [name] = placeholders(life)
    life.cluster.fail_pod(name, "OutOfcpu")
    life.run(5)
    assert placeholders(life) == set()
    life.run(GROW_AFTER)
    assert placeholders(life) == {name}
    life.cluster.full_nodes = set()
    grows_to(life, 4)


def test_an_operator_that_restarts_keeps_the_placeholder() -> None:
    life = looking_for_a_node()
    uids = {p.view.uid for p in life.cluster.pods.values() if p.view.placeholder}
    life.restart()
    life.run(5)
    assert {p.view.uid for p in life.cluster.pods.values() if p.view.placeholder} == uids
    life.cluster.full_nodes = set()
    grows_to(life, 4)


@pytest.mark.fault("Another job takes the nodes while an elastic gang grows")
@pytest.mark.parametrize("seconds", range(0, 20, 3))
def test_room_that_is_taken_again_while_the_gang_grows_costs_no_committed_step(
    seconds: int,
) -> None:
    life = looking_for_a_node()
    busy = life.cluster.full_nodes
    life.cluster.full_nodes = set()
    life.run(seconds)
    step = life.newest()
    life.cluster.full_nodes = busy
    for name in placeholders(life):
        life.cluster.lose_pod(name)
    life.run(150)
    assert life.status.is_true(JobCondition.RUNNING)
    assert life.newest() >= step
    life.cluster.full_nodes = set()
    life.run(SHRINK_AFTER + 2 * GROW_AFTER, until=trains_with(4))
    grows_to(life, 4)


@pytest.mark.fault("A lost pod interrupts a growth, twice")
@pytest.mark.parametrize("seconds", range(0, 16, 3))
def test_a_growth_that_a_lost_pod_interrupts_twice_is_tried_again(seconds: int) -> None:
    life = looking_for_a_node()
    step = life.newest()
    life.cluster.full_nodes = set()
    for _ in range(2):
        life.run(seconds)
        life.cluster.lose_pod(life.pod(0))
        life.run(3)
    becomes(life, 4, seconds=GROW_AFTER + 200)
    assert life.newest() >= step


@pytest.mark.fault("The operator dies after each write while an elastic gang grows")
def test_an_operator_that_dies_at_any_write_while_the_gang_grows_is_replaced() -> None:
    begun = looking_for_a_node()
    step = begun.newest()
    begun.cluster.full_nodes = set()
    for life in after_each_death(begun, seconds=20):
        grows_to(life, 4)
        assert life.newest() >= step
