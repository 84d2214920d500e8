"""Something else than the gang is away: ranks end before their first step, and nothing is given up for it."""

from __future__ import annotations

import pytest
from tests.support.operator.decisions import counting
from tests.support.operator.life import Life

from holdfast_core.ids import CheckpointId
from holdfast_operator.model.reasons import Reason


def trained_life(*, store: bool = True, every: int = 1000, copies: int = 1) -> Life:
    """Return a life with the default failure policy that has committed some steps."""
    life = Life(store=store, every=every, copies=copies)
    life.change_spec(failurePolicy={})
    life.run(60, until=lambda s: s.last_committed_step == 25)
    life.run_until_committed()
    return life


def data_goes_away(life: Life) -> CheckpointId:
    """Let the data set go away, and a rank die of it. Return the newest commit."""
    newest = life.cluster.newest_commit()
    assert newest is not None
    life.cluster.gang.data_is_away = True
    life.rank_dies()
    return newest


def conditions(life: Life) -> dict[str, str]:
    return {c.type: c.status for c in life.status.conditions}


@pytest.mark.fault(
    "A data set or a licence server is away for minutes, so that ranks end before their first step"
)
@pytest.mark.parametrize("minutes", [4, 10])
def test_an_outage_of_minutes_neither_fails_the_job_nor_costs_a_step(minutes: int) -> None:
    life = trained_life()
    newest = data_goes_away(life)
    life.run(60 * minutes)
    assert "Failed" not in conditions(life)
    life.cluster.gang.data_is_away = False
    life.run(900, until=lambda s: s.is_true("Running"))
    assert life.status.is_true("Running")
    assert life.status.quarantined == ()
    assert life.restored_steps()[-1] == newest.step


@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
@pytest.mark.parametrize("seconds", [1, 60, 200, 600])
def test_the_budget_ends_a_job_however_long_its_ranks_take_to_fail(
    seconds: int, trained: bool
) -> None:
    """The restarts are spread over hours then, and failurePolicy.window is an hour."""
    life = trained_life() if trained else Life()
    life.change_spec(failurePolicy={})
    life.cluster.gang.seconds_to_failure = seconds
    life.cluster.gang.data_is_away = True
    if trained:
        life.rank_dies()
    life.run(11 * (seconds + 660), until=lambda s: s.is_true("Failed"))
    assert life.status.condition("Failed").reason == "BackoffLimitExceeded"
    assert life.status.restarts == 10
    assert counting(life.status) == 10


@pytest.mark.fault(
    "A data set or a licence server is away for minutes, so that ranks end before their first step"
)
def test_a_checkpoint_is_released_if_the_older_one_fails_in_the_same_way() -> None:
    life = trained_life()
    newest = data_goes_away(life)
    life.run(1200, until=lambda s: bool(s.quarantined))
    assert life.status.quarantined == (newest,), "the first cause that is tried"
    life.run(1200, until=lambda s: not s.quarantined)
    life.run(900, until=lambda s: s.restore_point is not None)
    assert life.status.quarantined == ()
    tried = life.restored_steps()
    assert tried == [newest.step] * 3 + [newest.step - 5] * 3 + [newest.step]
    assert life.status.last_committed_step == newest.step


def fail(life: Life) -> CheckpointId:
    """Let a rank die, and run until the job has failed. Return the newest commit."""
    newest = life.cluster.newest_commit()
    assert newest is not None
    life.rank_dies()
    life.run(30, until=lambda s: s.is_true("Failed"))
    assert conditions(life)["Failed"] == "True"
    return newest


def failing_life(*, store: bool, copies: int = 1) -> Life:
    life = trained_life(store=store, copies=copies)
    life.change_spec(failurePolicy={"maxRestarts": 0}, ttlSecondsAfterFinished=60)
    return life


@pytest.mark.fault("A job fails while only its pods have its newest committed step")
def test_a_job_that_fails_persists_its_newest_step_before_its_pods_are_deleted() -> None:
    life = failing_life(store=True)
    newest = fail(life)
    life.run(120)
    assert newest in life.cluster.store.checkpoints
    assert life.status.last_persisted.id == newest
    assert newest.step in {c.spec.step for c in life.cluster.checkpoints.values()}
    assert not life.cluster.pods, "the pods are not needed any more"


def test_pods_of_a_failed_job_stay_while_the_store_is_away() -> None:
    life = failing_life(store=True)
    life.cluster.store.away = True
    newest = fail(life)
    life.run(3600)
    assert len(life.cluster.pods) == 4
    assert life.cluster.newest_commit() == newest
    condition = life.status.condition("PodsKept")
    assert condition.is_true
    assert f"step {newest.step} is committed on the nodes only" in condition.message
    life.cluster.store.away = False
    life.run(60)
    assert newest in life.cluster.store.checkpoints
    assert not life.cluster.pods
    assert conditions(life)["PodsKept"] == "False"


@pytest.mark.fault("A job fails while only its pods have its newest committed step")
@pytest.mark.parametrize("copies", [0, 1])
def test_pods_of_a_failed_job_without_a_store_stay(copies: int) -> None:
    life = failing_life(store=False, copies=copies)
    newest = fail(life)
    life.run(3600)
    assert life.cluster.newest_commit() == newest
    assert conditions(life)["PodsKept"] == "True"
    assert ("trainingjobs", "job") in {(k[0], k[2]) for k in life.cluster.api.objects}


def test_a_deadline_stops_the_gang_and_persists_what_it_saves() -> None:
    life = trained_life()
    life.change_spec(activeDeadlineSeconds=40)
    life.run(120)
    assert conditions(life)["Failed"] == "True"
    stored = max(i.step for i in life.cluster.store.checkpoints)
    assert stored >= 25
    assert life.status.last_persisted.step == stored
    assert not [p for p in life.cluster.pods.values() if p.view.alive]


def test_a_job_that_fails_without_a_commit_deletes_its_pods() -> None:
    life = Life(store=True, every=1000)
    life.run(30, until=lambda s: s.is_true("Running"))
    life.change_spec(failurePolicy={"maxRestarts": 0})
    life.rank_dies()
    life.run(60)
    assert conditions(life)["Failed"] == "True"
    assert not life.cluster.pods


def kept(life: Life) -> tuple[str, str, str]:
    """Return value, reason and message of condition PodsKept."""
    return life.condition("PodsKept")


def fail_while_the_store_is_away(life: Life) -> CheckpointId:
    life.cluster.store.away = True
    newest = fail(life)
    life.run(30)
    assert kept(life)[:2] == ("True", Reason.NOT_PERSISTED)
    assert "requests its upload" in kept(life)[2]
    return newest


def assert_persisted_when_the_store_is_back(life: Life, newest: CheckpointId) -> None:
    life.cluster.store.away = False
    life.run(120)
    assert newest in life.cluster.store.checkpoints
    assert not life.cluster.pods


@pytest.mark.fault("A member of a failed job is gone before its newest step is uploaded")
@pytest.mark.parametrize("worker", [0, 2], ids=["coordinator", "another member"])
def test_pods_go_if_the_newest_step_is_stored_although_a_member_is_gone(worker: int) -> None:
    life = Life(store=True, every=5)
    life.change_spec(failurePolicy={"maxRestarts": 0})
    life.run(60, until=lambda s: s.last_committed_step == 25)
    life.run_until_committed(is_stored=True)
    life.run(30, until=lambda s: s.last_persisted is not None and s.last_persisted.step >= 25)
    life.rank_dies()
    life.run(30, until=lambda s: s.is_true("Failed"))
    life.cluster.lose_pod(life.pod(worker))
    life.restart()
    life.run(60)
    assert conditions(life)["Failed"] == "True"
    assert not life.cluster.pods
    assert conditions(life).get("PodsKept") != "True"


@pytest.mark.fault("A member of a failed job is gone before its newest step is uploaded")
@pytest.mark.parametrize("restarts", [False, True], ids=["one operator", "a new operator"])
@pytest.mark.parametrize("worker", [0, 2], ids=["coordinator", "another member"])
def test_a_step_that_can_not_be_uploaded_any_more_is_kept_and_the_status_says_why(
    worker: int, restarts: bool
) -> None:
    life = failing_life(store=True)
    life.run(2)  # until the copies are there
    newest = fail_while_the_store_is_away(life)
    gone = life.pod(worker)
    life.cluster.lose_pod(gone)
    if restarts:
        life.restart()
    life.cluster.store.away = False
    life.run(600)
    assert newest not in life.cluster.store.checkpoints
    assert life.cluster.newest_commit() == newest, "the copies of the others are there"
    value, reason, message = kept(life)
    assert (value, reason) == ("True", Reason.CANNOT_PERSIST)
    assert f"step {newest.step}" in message
    assert gone in message
    assert "requests" not in message
    others = [life.pod(w) for w in range(4) if w != worker]
    assert all(name in message for name in others), "a person needs their names to copy the files"
    assert all(str(life.cluster.pods[name].view.node) in message for name in others)
    assert "delete the job" in message
    assert [e.message for e in life.operator.events if e.reason == Reason.CANNOT_PERSIST] == [
        message
    ]


def test_a_person_who_deletes_the_pods_gives_the_step_up() -> None:
    life = failing_life(store=True)
    fail_while_the_store_is_away(life)
    life.lose_all_pods()
    life.run(30)
    assert kept(life)[:2] == ("False", Reason.PODS_GONE)
    assert "in the object store" not in kept(life)[2]
    life.run(120)
    jobs = {k for k in life.cluster.api.objects if k[0] == "trainingjobs"}
    assert not jobs, "the job is deleted after its TTL"


def test_a_failure_with_a_lost_pod_keeps_the_copies_that_the_other_pods_have() -> None:
    life = failing_life(store=True)
    life.change_spec(
        failurePolicy={"rules": [{"onReasons": ["PodLost"], "action": "FailJob"}]},
    )
    life.run(2)  # until the copies are there
    newest = life.cluster.newest_commit()
    assert newest is not None
    lost = life.cluster.pods[life.pod(2)]
    life.cluster.delete_pod(lost.view.name, lost.view.uid, force=True)
    life.run(600)
    assert conditions(life)["Failed"] == "True"
    assert life.cluster.newest_commit() == newest
    assert kept(life)[:2] == ("True", Reason.CANNOT_PERSIST)


def test_a_failed_job_whose_round_has_no_restore_point_says_that_nothing_is_uploaded() -> None:
    """A round without a restore point has no coordinator, which could request the uploads."""
    life = trained_life()
    life.run(2)  # until the copies are there
    newest = life.cluster.newest_commit()
    assert newest is not None
    life.cluster.full_nodes = set(life.cluster.nodes)
    life.cluster.lose_pod(life.pod(2))
    life.change_spec(activeDeadlineSeconds=120, scheduleTimeoutSeconds=0)
    life.run(20, until=lambda s: s.restart_round == 1)
    life.silence()
    life.run(300)
    assert conditions(life)["Failed"] == "True"
    life.end_silence()
    life.run(60)
    assert life.cluster.newest_commit() == newest
    assert kept(life)[:2] == ("True", Reason.CANNOT_PERSIST)


@pytest.mark.fault("A member of a failed job is gone before its newest step is uploaded")
def test_another_member_coordinates_the_upload_if_the_coordinator_is_silent() -> None:
    life = failing_life(store=True)
    newest = fail_while_the_store_is_away(life)
    life.silence(0)
    assert_persisted_when_the_store_is_back(life, newest)


@pytest.mark.fault("A member of a failed job is gone before its newest step is uploaded")
def test_a_coordinator_whose_sidecar_restarts_after_the_end_persists_the_step() -> None:
    life = failing_life(store=True)
    newest = fail_while_the_store_is_away(life)
    for worker in range(4):
        life.cluster.restart_sidecar(life.pod(worker))
    life.cluster.gang.run.is_over = False  # type: ignore[union-attr]
    assert_persisted_when_the_store_is_back(life, newest)


def test_pods_whose_sidecars_are_silent_stay_and_the_status_names_the_coordinator() -> None:
    life = failing_life(store=True)
    life.cluster.store.away = True
    newest = fail(life)
    life.silence()
    life.run(600)
    assert life.cluster.newest_commit() == newest
    value, reason, message = kept(life)
    assert (value, reason) == ("True", Reason.WAITING_FOR_HOLDERS)
    assert life.pod(0) in message
    assert "requests" not in message
    life.end_silence()
    assert_persisted_when_the_store_is_back(life, newest)


@pytest.mark.fault("A user deletes a Checkpoint after the end of its job")
def test_a_checkpoint_object_that_a_user_deletes_after_the_end_is_not_created_again() -> None:
    life = failing_life(store=True)
    life.change_spec(ttlSecondsAfterFinished=None)
    newest = fail(life)
    life.run(120)
    assert newest.step in {c.spec.step for c in life.cluster.checkpoints.values()}
    for name in list(life.cluster.checkpoints):
        life.cluster.api.remove("checkpoints", "team-a", name)
    life.run(120)
    assert life.cluster.checkpoints == {}
