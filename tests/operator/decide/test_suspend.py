"""spec.suspend takes effect in every phase, creates no pod unless the gang must recover to save, loses no
commit, and stops the clock of the deadline."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from tests.support.operator.decisions import counting
from tests.support.operator.life import Life
from tests.support.operator.oracle import broken_rules

from holdfast_core.api import JobCondition
from holdfast_operator.model.reasons import Reason


def suspend(life: Life) -> set[str]:
    """Suspend the job. Return the uids of all pods that exist at this time."""
    life.change_spec(suspend=True)
    return {p.view.uid for p in life.cluster.pods.values()}


def stays_suspended(life: Life, before: set[str]) -> None:
    """Assert that no pod is created, and that none is left at the end."""
    for _ in range(60):
        life.run(1)
        assert {p.view.uid for p in life.cluster.pods.values()} <= before, "a pod was created"
    assert life.status.is_true(JobCondition.SUSPENDED)
    assert life.status.phase == "Suspended"
    assert life.status.start_time is None
    assert life.cluster.pods == {}


def resumes(life: Life, step: int | None) -> None:
    life.change_spec(suspend=False)
    life.run(60)
    assert life.status.is_true("Running")
    assert life.status.start_time is not None
    assert life.status.restore_point.step == step
    assert broken_rules(life.cluster, life.copies) == []


@pytest.mark.fault("A job is suspended at any second before anything was committed")
@pytest.mark.parametrize("seconds", range(10))
@pytest.mark.parametrize("store", [False, True], ids=["no store", "store"])
def test_a_job_that_has_committed_nothing_is_suspended_at_once(seconds: int, store: bool) -> None:
    life = Life(store=store)
    life.run(seconds)
    if life.status.last_committed_step is not None:
        pytest.skip("it has committed by then")
    stays_suspended(life, suspend(life))
    assert life.status.last_persisted is None or store
    last = life.status.last_persisted
    resumes(life, None if last is None else last.step)


@pytest.mark.fault("A job is suspended at any moment of a recovery")
@pytest.mark.parametrize("seconds", range(0, 16, 3))
@pytest.mark.parametrize("fault", ["pod", "rank", "node"])
def test_suspended_in_a_recovery_everything_committed_is_kept(fault: str, seconds: int) -> None:
    """If the store has the newest step, the job is suspended immediately. Otherwise the gang recovers, and
    then saves to the store and stops."""
    life = Life(store=True, every=5).trained()
    match fault:
        case "pod":
            life.cluster.lose_pod(life.pod(1))
        case "rank":
            life.rank_dies()
        case _:
            node = life.cluster.pods[life.pod(1)].view.node
            life.cluster.nodes[node or ""].dead = True
    life.run(seconds)
    newest = life.newest()
    suspend(life)
    life.run(60)
    assert life.status.is_true(JobCondition.SUSPENDED)
    assert life.cluster.pods == {}
    last = life.status.last_persisted
    assert last.step >= newest
    resumes(life, last.step)


@pytest.mark.fault("A job is suspended while its gang backs off")
def test_a_gang_that_keeps_failing_is_suspended_while_it_backs_off() -> None:
    life = Life(store=True, every=5).trained()
    life.run(60, until=lambda s: s.last_persisted is not None and s.last_persisted.step == s.step)
    last = life.status.last_persisted
    assert last.step == life.newest()
    life.run_until_committed(is_stored=True)
    life.cluster.gang.poisoned |= life.cluster.gang.manifests_made
    life.rank_dies()
    assert reached(life, 300, backs_off)
    before = suspend(life)
    life.run(3)
    assert life.status.is_true(JobCondition.SUSPENDED), "the next round would begin much later"
    for _ in range(90):
        life.run(1)
        assert {p.view.uid for p in life.cluster.pods.values()} <= before
    assert life.status.is_true(JobCondition.SUSPENDED)
    assert life.cluster.pods == {}


def backs_off(life: Life) -> bool:
    running = life.status.condition(JobCondition.RUNNING)
    return running is not None and running.reason == Reason.BACKING_OFF


@pytest.mark.fault("A job without a store is suspended")
def test_without_a_store_no_pod_is_created_while_suspend_is_refused() -> None:
    life = Life().trained()
    newest = life.newest()
    before = suspend(life)
    life.run(5)
    assert life.condition(JobCondition.SUSPENDED)[:2] == ("False", Reason.NO_OBJECT_TIER)
    assert len(life.cluster.pods) == 4
    life.cluster.lose_pod(life.pod(2))
    for _ in range(60):
        life.run(1)
        assert {p.view.uid for p in life.cluster.pods.values()} <= before
    assert life.newest() >= newest
    life.change_spec(suspend=False)
    life.run(60)
    assert life.status.is_true("Running")
    assert broken_rules(life.cluster, copies=1) == []


def test_without_a_store_a_refused_suspension_does_not_keep_the_job_from_its_end() -> None:
    life = Life(total_steps=60).trained()
    suspend(life)
    life.run(120)
    assert life.status.is_true(JobCondition.COMPLETE)


@pytest.mark.fault("A job is suspended while its sidecars are silent")
def test_silent_sidecars_may_have_commits_that_were_never_reported() -> None:
    """The first commit happened during the silence. Deleting the pods would lose it."""
    life = Life()
    life.run(30, until=lambda s: s.restore_point is not None)
    life.run(2)
    life.silence()
    life.run(200)
    newest = life.newest()
    suspend(life)
    life.run(200)
    assert not life.status.is_true(JobCondition.SUSPENDED)
    assert len(life.cluster.pods) == 4
    assert life.newest() >= newest


# --------------------------------------------------------------------------- resumed


@pytest.mark.fault("A suspension is taken back while the gang saves and stops")
@pytest.mark.parametrize("restarts", [False, True], ids=["operator lives", "operator restarts"])
@pytest.mark.parametrize("seconds", range(14))
def test_a_suspension_that_is_taken_back_does_not_end_the_job(seconds: int, restarts: bool) -> None:
    """Ranks that stopped for the suspension return 0, as ranks that have finished do."""
    life = Life(store=True, every=5).trained()
    step = life.newest()
    life.change_spec(suspend=True)
    life.run(seconds)
    life.change_spec(suspend=False)
    if restarts:
        life.restart()
    life.run(60)
    assert life.status.is_true("Running")
    assert life.newest() > step + 10
    assert counting(life.status) == 0
    held = life.status.condition(JobCondition.SUSPENDED)
    assert held is None or held.reason != Reason.STOPPING
    assert broken_rules(life.cluster, copies=1) == []


@pytest.mark.fault("The operator dies before it deletes the pods of a suspended job")
@pytest.mark.parametrize("resumed", [False, True], ids=["still suspended", "resumed meanwhile"])
def test_an_operator_that_dies_before_it_deletes_the_pods_loses_no_commit(resumed: bool) -> None:
    """Nothing was committed when Suspended was written. The last ROUND had been sent and no operator
    deleted the pods, so the gang trained."""
    life = Life(store=True, every=1000)
    life.run(30, until=lambda s: s.restore_point is not None)
    life.silence(3)
    life.run(3)
    life.change_spec(suspend=True)
    life.run(5, until=lambda s: s.is_true(JobCondition.SUSPENDED))
    assert life.status.is_true(JobCondition.SUSPENDED)
    first, last = (life.cluster.sidecars[life.pod(worker)] for worker in (0, 3))
    assert first.message is not None
    last.take_round(first.message)
    life.end_silence()
    for _ in range(60):
        life.cluster.tick()
    committed = life.newest()
    life.restart()
    if resumed:
        life.change_spec(suspend=False)
    life.run(60)
    assert broken_rules(life.cluster, copies=1) == []
    assert life.newest() >= committed
    if not resumed:
        assert life.status.is_true(JobCondition.SUSPENDED)
        assert life.status.last_persisted.step >= committed
        life.change_spec(suspend=False)
        life.run(60)
    assert life.status.is_true("Running")
    assert life.newest() > committed


@pytest.mark.fault("The object store is away when a gang stops for a suspension")
def test_a_store_that_is_away_when_the_gang_stops_costs_no_commit() -> None:
    """The sidecars gave up the upload and the ranks have ended, so the gang starts again and saves again."""
    life = Life(store=True, every=5).trained()
    life.cluster.store.away = True
    life.run(12)
    newest = life.newest()
    before = suspend(life)
    life.run(60)
    assert not life.status.is_true(JobCondition.SUSPENDED)
    assert life.newest() >= newest
    life.cluster.store.away = False
    life.run(60)
    assert life.status.is_true(JobCondition.SUSPENDED)
    assert life.status.last_persisted.step >= newest
    assert life.cluster.pods == {}
    assert broken_rules(life.cluster, copies=1) == []
    resumes(life, life.status.last_persisted.step)
    assert before.isdisjoint(p.view.uid for p in life.cluster.pods.values())


@pytest.mark.fault("The object store is away for long while a job is to be suspended")
@pytest.mark.parametrize("before", [0, 12], ids=["at the request", "known before"])
def test_a_gang_stops_for_a_suspension_only_while_its_store_answers(before: int) -> None:
    """A gang that stops keeps its nodes idle until its sidecars give the upload up. So it stops again only
    after the store has answered."""
    life = Life(store=True, every=5)
    life.run(40)
    life.cluster.store.away = True
    life.run(before)
    round_, newest = life.status.restart_round or 0, life.newest()
    suspend(life)
    life.run(120)
    waits = life.status.condition(JobCondition.SUSPENDED)
    assert waits is not None
    assert (waits.status, waits.reason) == ("False", Reason.STORE_UNAVAILABLE)
    assert "store" in waits.message
    assert life.status.is_true(JobCondition.RUNNING)
    assert life.newest() >= newest + 50, "the gang trains meanwhile"
    assert (life.status.restart_round or 0) <= round_ + (before == 0)
    life.cluster.store.away = False
    life.run(60)
    assert life.status.is_true(JobCondition.SUSPENDED)
    assert life.cluster.pods == {}


# --------------------------------------------------------------------------- deadline


def reached(life: Life, seconds: int, until: Callable[[Life], bool]) -> bool:
    for _ in range(seconds):
        life.run(1)
        if until(life):
            return True
    return False


def failed(life: Life) -> bool:
    return life.status.is_true(JobCondition.FAILED)


@pytest.mark.fault("A suspension is longer than activeDeadlineSeconds")
def test_time_that_a_job_is_suspended_does_not_count_towards_its_deadline() -> None:
    life = Life(store=True, every=5)
    life.change_spec(activeDeadlineSeconds=100)
    life.run(60)
    suspend(life)
    life.run(400)
    assert life.status.is_true(JobCondition.SUSPENDED)
    assert not failed(life)
    resumed = life.cluster.seconds
    life.change_spec(suspend=False)
    assert not reached(life, 95, failed), "the clock starts again at the resumption"
    assert reached(life, 20, failed)
    assert life.status.condition(JobCondition.FAILED).reason == Reason.DEADLINE_EXCEEDED
    start = datetime(2026, 1, 1, tzinfo=UTC).timestamp() + resumed
    assert abs(life.status.start_time.timestamp() - start) <= 2


def test_a_job_that_is_created_suspended_has_no_clock() -> None:
    life = Life()
    life.change_spec(activeDeadlineSeconds=50, suspend=True)
    life.run(300)
    assert life.status.is_true(JobCondition.SUSPENDED)
    assert life.status.start_time is None
    life.change_spec(suspend=False)
    assert not reached(life, 45, failed)
    assert reached(life, 20, failed)


def test_a_suspension_and_its_end_have_events_with_the_step_that_is_kept() -> None:
    life = Life(store=True).trained(60)
    suspend(life)
    life.run(60)
    last = life.status.last_persisted
    life.change_spec(suspend=False)
    life.run(60)
    events = [(e.reason, e.message) for e in life.operator.events]
    (text,) = [message for reason, message in events if reason == Reason.SUSPENDED]
    assert f"step {last.step} is kept in the CheckpointStore" in text
    assert [reason for reason, _ in events].count(Reason.RESUMED) == 1
