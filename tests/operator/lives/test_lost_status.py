"""A job whose status is lost goes on from its newest checkpoint, in a round above all that there were."""

from __future__ import annotations

import pytest
from tests.support.operator.builders import NAMESPACE
from tests.support.operator.life import Life, after_each_death
from tests.support.operator.oracle import broken_rules

LONG_AGO = "2025-12-01T00:00:00Z"
"""A creation of the job that is long before the clock of the cluster."""


def trained_life() -> Life:
    """Return a gang that trains in its second round and has persisted steps in both."""
    life = Life(store=True, every=5)
    life.run(80, until=lambda s: s.last_persisted is not None)
    life.rank_dies()
    life.run(80, until=lambda s: s.last_persisted is not None and s.last_persisted.round == 1)
    life.run_until_committed(is_stored=True)
    assert life.status.restart_round == 1
    return life


def lose_status(life: Life, *, pods: bool = False, objects: bool = False) -> None:
    """Empty the status as a tool does that restores an object without it. Lose pods and Checkpoints."""
    life.cluster.job["status"] = {}
    life.cluster.job["metadata"]["creationTimestamp"] = LONG_AGO
    life.cluster.statuses.clear()
    life.cluster.choices.clear()
    for name in list(life.cluster.pods) if pods else ():
        life.cluster.lose_pod(name)
    for name in list(life.cluster.checkpoints) if objects else ():
        life.cluster.api.remove("checkpoints", NAMESPACE, name)
    life.cluster.touch_job()


def goes_on_from(life: Life, step: int) -> None:
    """Assert that the gang trains from this step in a new round, and keeps every rule."""
    life.run(120, until=lambda s: s.is_true("Running") and (s.step or 0) > step + 10)
    (choice,) = life.cluster.choices
    assert choice.status["restorePoint"]["step"] == step
    assert choice.status["restartRound"] == 2, (
        "a round that is used again would overwrite its objects"
    )
    assert life.status.is_true("Running")
    assert life.status.last_persisted is not None
    assert broken_rules(life.cluster, life.copies) == []


@pytest.mark.fault("A job's status is lost")
@pytest.mark.parametrize(
    ("pods", "objects"),
    [(False, False), (False, True), (True, False), (True, True)],
    ids=["all else is left", "pods are left", "Checkpoints are left", "only the store is left"],
)
def test_a_job_without_its_status_goes_on(pods: bool, objects: bool) -> None:
    life = trained_life()
    newest = life.newest()
    lose_status(life, pods=pods, objects=objects)
    life.restart()
    goes_on_from(life, newest)


@pytest.mark.fault(
    "The operator dies at any write while it finds the steps of a job without a status"
)
def test_an_operator_that_dies_finds_them_again() -> None:
    begun = trained_life()
    newest = begun.newest()
    lose_status(begun, pods=True, objects=True)
    begun.restart()
    for life in after_each_death(begun, seconds=30):
        goes_on_from(life, newest)


@pytest.mark.fault("The object store is down while the gang looks there for its last checkpoint")
def test_a_store_that_is_down_is_waited_for() -> None:
    life = trained_life()
    newest = life.newest()
    lose_status(life, pods=True, objects=True)
    life.cluster.store.away = True
    life.restart()
    life.run(300)
    running = life.status.condition("Running")
    assert running is not None and running.reason == "WaitingForStore"
    assert life.cluster.choices == []
    life.cluster.store.away = False
    goes_on_from(life, newest)


def test_a_pod_that_does_not_answer_is_waited_for() -> None:
    """It may have a newer step than the store, although the status names no step at all."""
    life = Life()
    life.run(60, until=lambda s: s.last_replicated_step is not None)
    life.run_until_committed()
    newest = life.newest()
    lose_status(life)
    life.silence(0, 1)
    life.restart()
    life.run(400)
    assert life.cluster.choices == []
    assert life.nothing_was_deleted()
    life.end_silence()
    life.run(60)
    (choice,) = life.cluster.choices
    assert choice.status["restorePoint"]["step"] == newest


def test_a_new_job_does_not_wait_for_a_list_of_its_store() -> None:
    life = Life(store=True)
    life.cluster.store.away = True
    life.run(60, until=lambda s: s.is_true("Running"))
    assert life.status.is_true("Running")


def test_an_old_job_that_never_trained_starts_when_the_store_has_answered() -> None:
    life = Life(store=True)
    life.cluster.job["metadata"]["creationTimestamp"] = LONG_AGO
    life.run(60, until=lambda s: s.is_true("Running"))
    assert life.status.is_true("Running")
    assert life.status.restart_round == 0
