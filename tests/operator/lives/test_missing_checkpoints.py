"""Checkpoints that the status names and the object store does not have: they are waited for."""

from __future__ import annotations

import pytest
from tests.support.operator.decisions import counting
from tests.support.operator.fake_cluster import TAINT_SECONDS
from tests.support.operator.life import Life

from holdfast_core.ids import CheckpointId
from holdfast_operator.model.job import ManifestView

MISSING = "CheckpointMissing"


def stored_life() -> Life:
    """Return a life that trains, and has at least two checkpoints in the store."""
    life = Life(store=True, every=5)
    life.run(60, until=lambda s: s.last_persisted is not None and s.last_persisted.step >= 20)
    life.run_until_committed(is_stored=True)
    life.run(3)
    assert len(life.cluster.store.checkpoints) >= 2
    return life


def empty_the_bucket(life: Life) -> dict[CheckpointId, ManifestView]:
    """Remove everything from the store, and return what it had."""
    had = dict(life.cluster.store.checkpoints)
    life.cluster.store.checkpoints.clear()
    return had


def persisted(life: Life) -> CheckpointId | None:
    found = life.status.last_persisted
    return None if found is None else found.id


def conditions(life: Life) -> dict[str, str]:
    return {c.type: c.status for c in life.status.conditions}


@pytest.mark.fault("The bucket is emptied, and all pods are lost")
def test_an_emptied_bucket_is_waited_for_and_the_job_goes_on_when_it_is_restored() -> None:
    life = stored_life()
    had = empty_the_bucket(life)
    life.lose_all_pods()
    life.run(300)
    events = len(life.operator.events)
    life.run(600)
    assert len(life.operator.events) == events, "it is said once"
    newest = life.status.last_persisted
    assert "Failed" not in conditions(life)
    assert life.status.quarantined == ()
    assert counting(life.status) == 0
    assert conditions(life)[MISSING] == "True"
    assert conditions(life)["RemoteTierHealthy"] == "False"
    assert life.condition("Running")[:2] == ("False", MISSING)
    assert f"step {newest.step} of round {newest.round}" in life.status.condition(MISSING).message
    assert MISSING in {e.reason for e in life.operator.events}
    rounds = life.status.restart_round
    life.cluster.store.checkpoints.update(had)
    life.run(60, until=lambda s: s.is_true("Running"))
    assert life.status.is_true("Running")
    assert life.status.restart_round == rounds, "the sidecars find it by themselves"
    assert life.restored_steps()[-1] == newest.step
    life.run(30)
    assert conditions(life)[MISSING] == "False"
    assert conditions(life)["RemoteTierHealthy"] == "True"


def test_an_older_checkpoint_that_the_store_has_is_restored_and_the_status_says_so() -> None:
    life = stored_life()
    newest = life.status.last_persisted
    del life.cluster.store.checkpoints[newest.id]
    older = max(i.step for i in life.cluster.store.checkpoints)
    life.lose_all_pods()
    life.run(120, until=lambda s: s.is_true("Running"))
    assert life.status.is_true("Running")
    assert life.restored_steps() == [newest.step, older]
    assert life.status.quarantined == ()
    assert counting(life.status) == 0
    texts = [e.message for e in life.operator.events if e.reason == MISSING]
    assert any(f"step {newest.step}" in t and f"from step {older}" in t for t in texts)


@pytest.mark.parametrize("restarts", [False, True], ids=["one operator", "a new operator"])
def test_if_all_of_them_are_missing_the_newest_is_waited_for(restarts: bool) -> None:
    life = stored_life()
    newest = life.status.last_persisted
    assert newest is not None
    empty_the_bucket(life)
    life.lose_all_pods()
    life.run(300)
    if restarts:
        life.restart()
        life.run(60)
    assert life.restored_steps()[-1] == newest.step
    rounds = life.status.restart_round
    life.run(600)
    assert life.status.restart_round == rounds, "no round begins while there is nothing else"


def test_a_bucket_that_is_emptied_while_the_gang_trains_shows_in_the_health_of_the_store() -> None:
    life = stored_life()
    life.cluster.gang.run.persist_every = None  # type: ignore[union-attr]
    empty_the_bucket(life)
    life.run(60)
    assert life.status.is_true("Running")
    assert conditions(life)["RemoteTierHealthy"] == "False"
    assert conditions(life)[MISSING] == "True"


def test_pods_with_the_only_copies_are_not_deleted_for_a_checkpoint_that_is_missing() -> None:
    """A suspension deletes all pods once the newest step is in the store, which it is not."""
    life = stored_life()
    life.run(20, until=lambda _: persisted(life) == life.cluster.newest_commit())
    newest = life.cluster.newest_commit()
    assert newest is not None
    assert persisted(life) == newest
    empty_the_bucket(life)
    life.run(20, until=lambda s: s.is_true(MISSING))
    assert life.cluster.newest_commit() == newest
    life.cluster.gang.data_is_away = True
    life.rank_dies()
    life.change_spec(suspend=True)
    life.run(120)
    assert life.cluster.newest_commit() == newest
    assert not life.status.is_true("Suspended")


@pytest.mark.fault("Nodes with all copies of a step are cut off while the store lacks it")
@pytest.mark.parametrize("restarts", [False, True], ids=["one operator", "a new operator"])
@pytest.mark.parametrize("returns", ["nodes", "objects"])
def test_pods_on_lost_nodes_are_kept_while_the_store_lacks_the_step(
    returns: str, restarts: bool
) -> None:
    life = stored_life()
    life.cluster.gang.run.interval = 1_000_000  # type: ignore[union-attr]
    life.run(20)
    newest = persisted(life)
    assert newest is not None
    assert newest == life.cluster.newest_commit()
    had = empty_the_bucket(life)
    life.run(20, until=lambda s: s.is_true(MISSING))
    nodes = [life.cluster.nodes[life.cluster.pods[life.pod(w)].view.node or ""] for w in (0, 1)]
    for node in nodes:
        node.cut_off = True
    if restarts:
        life.restart()
    life.run(3 * TAINT_SECONDS)
    assert life.nothing_was_deleted()
    if returns == "objects":
        life.cluster.store.checkpoints.update(had)
    else:
        for node in nodes:
            node.cut_off = False
    life.run(200, until=lambda s: s.is_true("Running"))
    assert life.status.is_true("Running")
    assert set(life.restored_steps()) == {newest.step}


@pytest.mark.fault("The bucket is emptied, and filled again after the job has failed")
@pytest.mark.parametrize("trained", [True, False], ids=["while it trains", "while it waits"])
def test_pods_of_a_failed_job_go_when_the_bucket_is_filled_again(trained: bool) -> None:
    life = stored_life()
    life.cluster.gang.run.interval = 1_000_000  # type: ignore[union-attr]
    life.run(20)
    assert persisted(life) == life.cluster.newest_commit()
    life.cluster.gang.run.persist_every = None  # type: ignore[union-attr]
    had = empty_the_bucket(life)
    if trained:
        life.run(20, until=lambda s: s.is_true(MISSING))
        life.change_spec(failurePolicy={"maxRestarts": 0})
        life.rank_dies()
    else:
        life.lose_all_pods()
        life.change_spec(activeDeadlineSeconds=600)
    life.run(900, until=lambda s: s.is_true("Failed"))
    assert conditions(life)["Failed"] == "True"
    life.run(600)
    assert conditions(life)[MISSING] == "True"
    assert len(life.cluster.pods) == 4
    life.cluster.store.checkpoints.update(had)
    life.run(120)
    assert conditions(life)[MISSING] == "False"
    assert not [p for p in life.cluster.pods.values() if p.view.alive]


def test_a_store_that_is_away_during_the_restore_spends_no_restarts() -> None:
    life = stored_life()
    life.cluster.store.away = True
    life.lose_all_pods()
    life.run(1800)
    assert "Failed" not in conditions(life)
    assert life.status.quarantined == ()
    assert counting(life.status) == 0
    life.cluster.store.away = False
    life.run(400, until=lambda s: s.is_true("Running"))
    assert life.status.is_true("Running")
