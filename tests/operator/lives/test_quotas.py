"""A quota of the store is reached: uploads wait, commits go on, and later the uploads go on by themselves."""

from __future__ import annotations

import pytest
from tests.support.operator.builders import NAMESPACE
from tests.support.operator.life import Life
from tests.support.operator.oracle import broken_rules

from holdfast_core.api import TrainingJobStatus

GIB = 1 << 30


def set_reached(life: Life, *reached: dict[str, object]) -> None:
    """Write the limits that the newest listing has found to be reached, as the store's pass does."""
    store = life.cluster.api.objects["checkpointstores", NAMESPACE, "main"]
    life.cluster.api.put(
        "checkpointstores", {**store, "status": {**store["status"], "reachedQuotas": list(reached)}}
    )


FULL = {"bytes": 3 * GIB, "limitBytes": 2 * GIB}


def training(every: int = 5) -> Life:
    life = Life(store=True, every=every)
    life.run(60, until=lambda s: s.last_persisted is not None)
    assert life.status.last_persisted is not None
    return life


def persisted(status: TrainingJobStatus) -> int:
    return status.last_persisted.step


def held(status: TrainingJobStatus) -> bool:
    return status.is_true("UploadsHeld")


@pytest.mark.fault("A quota of the object store is reached during training")
@pytest.mark.parametrize("scope", [{}, {"namespace": NAMESPACE}], ids=["whole store", "namespace"])
def test_uploads_wait_while_commits_go_on_and_then_go_on_by_themselves(
    scope: dict[str, object],
) -> None:
    life = training()
    set_reached(life, {**FULL, **scope})
    life.run(30, until=held)
    life.run(5)  # an upload that was under way ends
    before, committed = persisted(life.status), life.status.last_replicated_step
    assert committed is not None
    life.run(60)
    status = life.status
    assert persisted(status) == before
    assert status.last_replicated_step is not None and status.last_replicated_step > committed + 20
    assert status.is_true("Running") and status.restarts == 0
    condition = status.condition("UploadsHeld")
    assert condition is not None and condition.reason == "QuotaReached"
    for text in ("3.0 GiB", "2.0 GiB", "kubectl holdfast prune", "spec.quota"):
        assert text in condition.message
    assert "QuotaReached" in {e.reason for e in life.operator.events}
    set_reached(life)
    life.run(30, until=lambda s: persisted(s) > before)
    assert persisted(life.status) > before
    assert not held(life.status)
    assert broken_rules(life.cluster, life.copies) == []


def test_the_limit_of_another_job_or_namespace_holds_nothing() -> None:
    life = training()
    set_reached(
        life,
        {**FULL, "namespace": NAMESPACE, "jobUid": "another"},
        {**FULL, "namespace": "another"},
    )
    before = persisted(life.status)
    life.run(60, until=lambda s: persisted(s) > before)
    assert persisted(life.status) > before
    assert life.status.condition("UploadsHeld") is None


@pytest.mark.fault("A job fails while a quota of its object store is reached")
def test_the_last_upload_of_a_failed_job_waits_and_says_for_what() -> None:
    life = training(every=1000)
    set_reached(life, FULL)
    life.run(30, until=held)
    life.run(12)
    life.run_until_committed()
    life.change_spec(failurePolicy={"maxRestarts": 0})
    life.rank_dies()
    life.run(60, until=lambda s: s.is_true("PodsKept"))
    life.run(30)
    condition = life.status.condition("PodsKept")
    assert condition is not None and condition.is_true
    assert "It waits for a quota" in condition.message and "spec.quota" in condition.message
    before = persisted(life.status)
    set_reached(life)
    life.run(60, until=lambda s: s.condition("PodsKept") is None or not s.is_true("PodsKept"))
    status = life.status
    assert not status.is_true("PodsKept")
    assert persisted(status) > before, "the step is in the store"
    assert not held(status)
    assert broken_rules(life.cluster, life.copies) == []


@pytest.mark.fault("A job is resized while a quota of its object store is reached")
def test_a_gang_trains_on_until_its_last_step_before_a_resize_has_room() -> None:
    life = training(every=1000)
    set_reached(life, FULL)
    life.run(30, until=held)
    life.run(12)
    life.change_spec(workers=3)
    life.run(30)
    committed = life.status.last_committed_step
    life.run(60)
    status = life.status
    assert committed is not None
    assert status.last_committed_step is not None and status.last_committed_step > committed + 20
    condition = status.condition("Resizing")
    assert condition is not None and condition.reason == "QuotaReached"
    assert "is to have 3, but uploads wait for a quota" in condition.message
    set_reached(life)
    life.run(60, until=lambda s: len(s.members) == 3 and s.is_true("Running"))
    assert len(life.status.members) == 3
    assert broken_rules(life.cluster, life.copies) == []


@pytest.mark.fault("A job is suspended while a quota of its object store is reached")
def test_a_suspension_says_that_it_waits_for_a_quota() -> None:
    life = training(every=1000)
    set_reached(life, FULL)
    life.run(30, until=held)
    life.change_spec(suspend=True)
    life.run(30)
    condition = life.status.condition("Suspended")
    assert condition is not None and not condition.is_true
    assert "Its last step waits for a quota" in condition.message
    set_reached(life)
    life.run(60, until=lambda s: s.is_true("Suspended"))
    assert life.status.is_true("Suspended")


@pytest.mark.fault("An operator starts while a quota of an object store is reached")
def test_a_new_operator_holds_the_uploads_that_it_finds_held() -> None:
    life = training()
    set_reached(life, FULL)
    life.run(30, until=held)
    life.run(5)
    before = persisted(life.status)
    life.restart()
    life.run(60)
    assert persisted(life.status) == before
    set_reached(life)
    life.run(30, until=lambda s: persisted(s) > before)
    assert persisted(life.status) > before
