"""While sidecars do not answer, no copy is deleted, no step is given up, and the job reports the silence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.operator.life import WORKERS, Life, begun, chosen
from tests.support.operator.oracle import broken_rules

from holdfast_core.api import JobCondition, TrainingJobStatus
from holdfast_operator.model.reasons import Reason

LONG = 700
"""Seconds of silence, longer than any limit of the operator."""
SILENCE = JobCondition.SIDECARS_UNREACHABLE


def training() -> Life:
    return Life().trained()


@pytest.mark.fault("All sidecars fall silent while training runs")
def test_training_goes_on_through_total_silence() -> None:
    life = training()
    round_, trained = life.status.restart_round, life.newest()
    life.silence()
    life.run(LONG)
    assert life.status.restart_round == round_, "no round begins because of silence alone"
    assert life.nothing_was_deleted()
    assert life.newest() > trained + 400
    assert life.condition(SILENCE)[:2] == ("True", Reason.NO_SIDECAR_ANSWERS)
    assert life.status.is_true("Running")
    life.end_silence()
    life.run(10)
    assert life.condition(SILENCE)[:2] == ("False", Reason.SIDECARS_ANSWER)
    assert life.status.last_committed_step > trained + 400


@pytest.mark.fault("The operator restarts during a silence that began in a round")
@pytest.mark.parametrize("reached", [begun, chosen], ids=["before the seal", "before ROUND"])
@pytest.mark.parametrize("restarts", [False, True], ids=["same operator", "operator restarts"])
def test_silence_that_begins_in_a_round_loses_nothing(
    reached: Callable[[TrainingJobStatus], bool], restarts: bool
) -> None:
    life = training()
    life.run_until_committed()
    life.rank_dies()
    life.run(30, until=reached)
    life.silence()
    newest = life.newest()
    life.run(LONG // 2)
    if restarts:
        life.restart()
    life.run(LONG // 2)
    assert life.status.restart_round == 1
    assert life.nothing_was_deleted()
    assert life.condition(SILENCE)[:2] == ("True", Reason.NO_SIDECAR_ANSWERS)
    life.end_silence()
    life.run(60)
    assert life.status.is_true("Running")
    assert life.status.restore_point.step == newest
    assert broken_rules(life.cluster, copies=1) == []


@pytest.mark.fault("The sidecars that hold the only copies of a step fall silent")
@pytest.mark.parametrize(
    "workers",
    [(1, 2, 3), (0, 1, 2), (1, 2), (2, 3)],
    ids=["all but worker 0", "all but worker 3", "a shard and its only copy", "two others"],
)
def test_a_subset_that_holds_the_only_copies_is_waited_for(workers: tuple[int, ...]) -> None:
    life = training()
    life.rank_dies()
    life.run(30, until=begun)
    life.silence(*workers)
    newest = life.newest()
    life.run(LONG)
    assert life.nothing_was_deleted()
    assert life.status.restore_point is None
    assert life.condition(SILENCE)[:2] == ("True", Reason.SOME_SIDECARS_SILENT)
    life.end_silence()
    life.recovers_from(newest)


@pytest.mark.fault("Sidecars answer one after another after a long silence")
def test_the_answers_of_all_sidecars_count_although_they_come_one_after_another() -> None:
    """The first answer after a long silence must not end the wait for the others."""
    life = training()
    life.rank_dies()
    life.run(30, until=begun)
    life.silence()
    newest = life.newest()
    life.run(LONG)
    life.cluster.all_silent = False
    for answering in range(1, WORKERS):
        life.silence(*range(answering, WORKERS))
        life.run(20)
    life.end_silence()
    life.run(60)
    assert life.nothing_was_deleted()
    assert life.status.restore_point.step == newest


@pytest.mark.fault("A write to the disk hangs")
@pytest.mark.fault("One pod is silent, and its shards are readable elsewhere")
def test_one_silent_pod_whose_shards_are_readable_elsewhere_is_replaced() -> None:
    life = training()
    life.rank_dies()
    life.run(30, until=begun)
    life.silence(2)
    newest = life.newest()
    life.run(150, until=lambda s: s.restart_round == 2)
    assert life.status.members == (0, 0, 2, 0)
    life.end_silence()
    life.recovers_from(newest)


@pytest.mark.fault("A node is lost while all other sidecars are silent")
def test_a_lost_node_with_the_rest_silent() -> None:
    """The dead node's worker is replaced. The operator waits for the copies of the silent sidecars."""
    life = training()
    newest = life.newest()
    node = life.cluster.pods[life.pod(1)].view.node
    life.silence()
    life.cluster.nodes[node or ""].dead = True
    life.run(LONG)
    assert {d.name for d in life.cluster.deletions} <= {life.pod(1)}
    life.end_silence()
    life.run(120)
    assert life.status.is_true("Running")
    assert life.status.restore_point.step >= newest
    assert broken_rules(life.cluster, copies=1) == []


@pytest.mark.fault("A pod is gone while all other sidecars are silent")
def test_a_pod_that_is_really_gone_with_the_rest_silent() -> None:
    life = training()
    life.silence()
    life.run(LONG)
    newest = life.newest()
    life.cluster.lose_pod(life.pod(1))
    life.run(LONG)
    assert life.nothing_was_deleted()
    assert life.status.restore_point is None
    life.end_silence()
    life.recovers_from(newest)


@pytest.mark.fault("The control plane is cut off from all nodes")
@pytest.mark.fault("The last copies of a step lie on lost nodes")
@pytest.mark.parametrize("store", [False, True], ids=["no store", "with a store"])
def test_every_node_looks_lost_when_the_control_plane_is_cut_off(store: bool) -> None:
    life = Life(store=store).trained()
    newest = life.newest()
    for node in life.cluster.nodes.values():
        node.cut_off = True
    life.run(250 if store else LONG)
    assert life.nothing_was_deleted()
    for node in life.cluster.nodes.values():
        node.cut_off = False
    life.run(120)
    assert life.status.is_true("Running")
    assert life.status.last_committed_step >= newest
    assert broken_rules(life.cluster, copies=1) == []


@pytest.mark.fault("The control plane is cut off in the middle of a round")
@pytest.mark.parametrize("reached", [begun, chosen], ids=["before the choice", "before ROUND"])
def test_the_control_plane_is_cut_off_in_the_middle_of_a_round(
    reached: Callable[[TrainingJobStatus], bool],
) -> None:
    """The nodes have newer steps than the store, so the operator waits for them."""
    life = Life(store=True, every=20)
    life.run(30, until=lambda s: s.last_persisted is not None)
    life.run(12)
    life.rank_dies()
    life.run(30, until=reached)
    newest = life.newest()
    assert life.status.last_persisted.step < newest
    for node in life.cluster.nodes.values():
        node.cut_off = True
    life.run(250)
    assert life.nothing_was_deleted()
    for node in life.cluster.nodes.values():
        node.cut_off = False
    life.run(60)
    assert life.status.is_true("Running")
    assert life.status.restore_point.step == newest
    assert broken_rules(life.cluster, copies=1) == []


@pytest.mark.fault("More nodes are lost than there are copies")
def test_two_lost_nodes_with_both_copies_of_a_shard_come_back() -> None:
    """More nodes are lost than there are copies. Their pods stay until one of them answers."""
    life = training()
    newest = life.newest()
    names = [life.cluster.pods[life.pod(w)].view.node or "" for w in (1, 2)]
    for name in names:
        life.cluster.nodes[name].cut_off = True
    life.run(LONG)
    for name in names:
        life.cluster.nodes[name].cut_off = False
    life.run(120)
    assert life.status.is_true("Running")
    assert life.status.restore_point.step == newest
    assert broken_rules(life.cluster, copies=1) == []


@pytest.mark.fault("A person gives up silent pods by deleting them")
def test_a_person_gives_up_silent_pods_by_deleting_them() -> None:
    life = Life(store=True).trained()
    life.rank_dies()
    life.run(30, until=begun)
    life.silence(1, 2)
    life.run(LONG)
    assert life.status.restore_point is None
    life.end_silence()  # the new pods can be reached
    for worker in (1, 2):
        life.cluster.delete_pod(life.pod(worker), life.operator.worker_pod(worker).uid, force=False)  # type: ignore[union-attr]
    life.run(60)
    assert life.status.restart_round == 1
    assert life.status.members == (0, 1, 1, 0)


def test_a_first_round_without_an_answer_of_a_sidecar_reports_it() -> None:
    life = Life()
    life.silence()
    life.run(LONG)
    assert life.nothing_was_deleted()
    assert life.condition(SILENCE)[:2] == ("True", Reason.NO_SIDECAR_ANSWERS)
    life.end_silence()
    life.run(30)
    assert life.status.is_true("Running")


@pytest.mark.fault("The nodes have commits that the status does not name")
def test_commits_that_the_status_does_not_contain_are_found_again() -> None:
    """The silence began before the first commit, so the status contains no step at all."""
    life = Life()
    life.run(30, until=lambda s: s.restore_point is not None)
    life.run(2)
    life.silence()
    life.run(500)
    assert life.status.last_committed_step is None
    newest = life.newest()
    life.cluster.lose_pod(life.pod(3))
    life.run(LONG)
    life.cluster.all_silent = False
    life.silence(0, 1)
    life.run(LONG)
    life.end_silence()
    life.run(120)
    assert life.status.restore_point.step is not None
    assert life.status.restore_point.step == newest
    assert broken_rules(life.cluster, copies=1) == []


def test_the_condition_names_what_was_tried_and_since_when() -> None:
    life = training()
    life.silence()
    life.run(60)
    found = life.status.condition(JobCondition.SIDECARS_UNREACHABLE)
    first = found.message
    assert "connection timed out" in first
    assert "TCP port 7070 in namespace team-a" in first
    assert found.last_transition_time.strftime("%Y-%m-%dT%H:%M:%S") in first
    events = [e for e in life.operator.events if e.reason == Reason.NO_SIDECAR_ANSWERS]
    assert len(events) == 1
    writes = len(life.cluster.statuses)
    life.run(600)
    assert life.status.condition(JobCondition.SIDECARS_UNREACHABLE).message == first
    assert len(life.cluster.statuses) - writes <= 61, "levels and goodput at most every 10 s"
