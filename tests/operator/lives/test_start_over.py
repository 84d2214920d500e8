"""A job that has lost every checkpoint starts over by itself or by a command. Silence is no loss."""

from __future__ import annotations

import pytest
from tests.support.operator.life import Life, after_each_death
from tests.support.operator.oracle import broken_rules

from holdfast_core.api import TrainingJobStatus
from holdfast_operator.model.reasons import Reason

LOST = "CheckpointsLost"


def committed_life(*, at_most: str = "30m", store: bool = False) -> Life:
    """Return a gang that trains and has committed a step. A store, if it has one, has been away."""
    life = Life(store=store)
    life.change_spec(failurePolicy={"startOver": {"atMost": at_most}})
    life.cluster.store.away = store
    life.run(60, until=lambda s: s.last_replicated_step is not None)
    life.run_until_committed()
    life.run(12)
    assert life.status.last_committed_step is not None
    assert life.status.last_persisted is None
    return life


def lose_two(life: Life) -> None:
    """Lose the pods of two neighbours: worker 1 has the only copies of worker 0."""
    for name in [life.pod(0), life.pod(1)]:
        life.cluster.lose_pod(name)


def running_reason(status: TrainingJobStatus) -> str:
    return status.condition("Running").reason


def confirm(life: Life) -> None:
    """Do what `kubectl holdfast restart JOB --from-start` does."""
    life.change_spec(rollback={"round": life.status.lineage[-1].round})


def starts(life: Life) -> list[int | None]:
    """Return the steps of all restore points after that of the first round."""
    return [c.status["restorePoint"].get("step") for c in life.cluster.choices[1:]]


@pytest.mark.fault("All copies of the only checkpoint are lost with pods and volumes")
def test_a_young_job_that_lost_everything_starts_over_by_itself() -> None:
    life = committed_life()
    trained = life.status.step
    lose_two(life)
    life.run(120, until=lambda s: s.is_true("Running") and s.restart_round == 1)
    status = life.status
    assert starts(life) == [None]
    record = status.last_recovery
    assert record.lost_steps >= trained
    assert Reason.STARTED_OVER in {e.reason for e in life.operator.events}
    assert broken_rules(life.cluster, life.copies) == []


@pytest.mark.fault("All copies of the only checkpoint are lost with pods and volumes")
def test_otherwise_it_waits_for_a_person_who_starts_it_over_once() -> None:
    life = committed_life(at_most="0s")
    lose_two(life)
    life.run(300)
    assert running_reason(life.status) == LOST
    condition = life.status.condition(LOST)
    assert condition is not None and condition.is_true
    assert "--from-start" in condition.message
    life.restart()
    life.run(60)
    assert life.operator.events == [], "it is said once"
    confirm(life)
    life.run(120, until=lambda s: s.is_true("Running"))
    assert starts(life) == [None]
    assert not life.status.is_true(LOST)
    life.run(60, until=lambda s: s.last_replicated_step is not None)
    life.run_until_committed()
    lose_two(life)
    life.run(120)
    assert running_reason(life.status) == LOST, "the confirmation was for the first loss"
    assert broken_rules(life.cluster, life.copies) == []


@pytest.mark.fault("The operator dies at any write of a start over")
def test_an_operator_that_dies_starts_it_over_once() -> None:
    waiting = committed_life(at_most="0s")
    lose_two(waiting)
    waiting.run(60)
    confirm(waiting)
    for life in after_each_death(waiting, seconds=40):
        life.run(60)
        assert life.status.is_true("Running")
        assert starts(life) == [None]
        assert broken_rules(life.cluster, life.copies) == []


@pytest.mark.fault("The object store is down while the gang looks there for its last checkpoint")
def test_a_store_that_is_down_is_waited_for() -> None:
    life = committed_life(store=True)
    lose_two(life)
    life.run(300)
    assert running_reason(life.status) == Reason.WAITING_FOR_STORE
    assert starts(life) == []
    life.cluster.store.away = False
    life.run(60, until=lambda s: s.is_true("Running"))
    assert starts(life) == [None]
    assert broken_rules(life.cluster, life.copies) == []


@pytest.mark.fault("All pods are lost before the status records an upload")
def test_an_upload_that_the_status_does_not_name_is_found() -> None:
    life = committed_life(store=True)
    newest = life.cluster.newest_commit()
    assert newest is not None
    info = next(iter(life.cluster.sidecars.values())).manifests[newest]
    life.cluster.store.checkpoints[newest] = info
    life.lose_all_pods()
    life.cluster.store.away = False
    life.run(120, until=lambda s: s.is_true("Running") and s.restart_round == 1)
    assert starts(life) == [newest.step]
    last = life.status.last_persisted
    assert last is not None and last.step >= newest.step


@pytest.mark.fault("Silent nodes and sidecars hold the only copies of the newest step")
def test_silence_is_no_loss() -> None:
    for silence in ("sidecars", "nodes"):
        life = committed_life()
        if silence == "sidecars":
            life.silence(0, 1)
            life.rank_dies()
        for worker in (0, 1) if silence == "nodes" else ():
            pod = life.operator.worker_pod(worker)
            assert pod is not None and pod.node is not None
            life.cluster.nodes[pod.node].cut_off = True
        life.run(400)
        assert starts(life) == [], silence
        life.end_silence()
        for node in life.cluster.nodes.values():
            node.cut_off = False
        life.run(120)
        assert life.status.is_true("Running")
        assert None not in starts(life)
        assert broken_rules(life.cluster, life.copies) == []


@pytest.mark.fault("A node with old shards comes back after the gang has started over")
def test_shards_of_the_old_lineage_are_never_restored() -> None:
    """A person deletes the pods of two dead nodes, and both nodes come back later."""
    life = committed_life()
    nodes = []
    for worker in (0, 1):
        pod = life.operator.worker_pod(worker)
        assert pod is not None and pod.node is not None
        nodes.append(life.cluster.nodes[pod.node])
        nodes[-1].dead = True
        life.cluster.delete_pod(pod.name, pod.uid, force=False)
    life.run(300, until=lambda s: s.is_true("Running") and s.restart_round != 0)
    begun = life.status.restart_round
    assert starts(life) == [None]
    for node in nodes:
        node.dead = False
    life.run(60, until=lambda s: s.last_replicated_step is not None)
    life.run_until_committed()
    life.rank_dies()
    life.run(60, until=lambda s: s.restore_point is not None and s.restart_round != begun)
    point = life.status.restore_point
    assert point is not None and point.round is not None
    assert point.round == begun
    assert broken_rules(life.cluster, life.copies) == []
