"""A checkpoint that ends every script that restores it is quarantined, and an older one is restored."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.support.operator.builders import (
    START,
    held,
    job,
    manifest,
    manifest_digest,
    now,
    pod,
    sidecar,
    silent,
    status,
    world_of,
)
from tests.support.operator.decisions import begun, counting
from tests.support.operator.life import Life, dies_after

from holdfast_core.api import (
    MAX_QUARANTINED,
    AvoidNodesSpec,
    CheckpointCondition,
    FailureAction,
    FailureRule,
    JobCondition,
    LineageEntry,
    PersistedStep,
    RestartRecord,
    RestorePointStatus,
    TrainingJob,
    changed,
    merge_patch,
)
from holdfast_core.ids import CheckpointId, Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import CoordinatorState, DeadRank, RestorePoint
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.gang import round_message
from holdfast_operator.decide.restore_point import Chosen, Exhausted, Wait, choose
from holdfast_operator.model.actions import BeginRound, WriteStatus
from holdfast_operator.model.job import JobMemory, Observed, Seen
from holdfast_operator.model.reasons import Reason


def poisoned(life: Life, *, is_stored: bool = False) -> CheckpointId:
    """Make the newest commit end every script that restores it, and let a rank die. Return the commit.

    No step waits for its commit, because that would be finished, and the step restored instead.
    """
    life.run_until_committed(is_stored=is_stored)
    newest = life.cluster.newest_commit()
    assert newest is not None
    life.cluster.gang.poisoned.add(newest)
    life.rank_dies()
    return newest


def reasons(life: Life) -> list[str]:
    return [e.reason for e in life.operator.events]


def policy(life: Life, **fields: object) -> None:
    life.change_spec(failurePolicy={"maxRestarts": 1000, "window": "24h", **fields})


@pytest.mark.fault("A checkpoint ends every gang that restores it")
def test_the_next_older_one_is_taken_after_three_failures() -> None:
    life = Life().trained()
    bad = poisoned(life)
    life.run(60)
    assert life.status.is_true("Running")
    assert life.restored_steps() == [bad.step, bad.step, bad.step, bad.step - 5]
    assert life.status.quarantined == (bad,)
    condition = life.status.condition(JobCondition.QUARANTINED)
    assert condition.is_true
    assert f"step {bad.step} of round {bad.round}" in condition.message
    first, second = (e.message for e in life.operator.events if e.reason == Reason.QUARANTINED)
    assert f"step {bad.step} of round {bad.round} is quarantined" in first
    assert f"gives up 5 steps: step {bad.step} of round {bad.round} is quarantined" in second
    assert life.status.last_recovery.lost_steps >= 5


@pytest.mark.parametrize("limit", [1, 2])
def test_the_limit_is_the_users(limit: int) -> None:
    life = Life().trained()
    policy(life, quarantineAfter=limit)
    bad = poisoned(life)
    life.run(60)
    assert life.restored_steps() == [bad.step] * limit + [bad.step - 5]


def test_an_operator_that_restarts_counts_the_same() -> None:
    life = Life().trained()
    bad = poisoned(life)
    for _ in range(5):
        life.run(40)
        life.restart()
    assert life.restored_steps()[:4] == [bad.step, bad.step, bad.step, bad.step - 5]


@pytest.mark.fault("The operator dies between two writes of a quarantine")
@pytest.mark.parametrize("writes", [1, 2, 4, 7])
def test_an_operator_that_dies_between_two_writes_quarantines_the_same(writes: int) -> None:
    life = Life(store=True, every=5).trained()
    policy(life, quarantineAfter=1)
    bad = poisoned(life)
    dies_after(life, writes)
    life.restart()
    life.run(60)
    assert life.status.quarantined == (bad,)
    assert life.restored_steps() == [bad.step, bad.step - 5]


@pytest.mark.fault("A checkpoint ends every gang that restores it, and there is no older one")
def test_the_last_checkpoint_is_tried_until_the_budget_ends() -> None:
    """A quarantine would leave nothing to restore, and something else may be the cause."""
    life = Life()
    life.run(30, until=lambda s: s.last_committed_step == 5)
    policy(life, maxRestarts=5)
    bad = poisoned(life)
    life.run(300)
    assert life.status.condition(JobCondition.FAILED).reason == Reason.BACKOFF_LIMIT_EXCEEDED
    assert life.status.quarantined == ()
    assert set(life.restored_steps()) == {bad.step}, "never from nothing"


def test_a_released_checkpoint_is_tried_until_the_budget_ends() -> None:
    life = Life().trained()
    bad = poisoned(life)
    policy(life, maxRestarts=5, releasedSteps=[bad.step])
    life.run(300)
    assert Reason.QUARANTINED not in reasons(life)
    assert life.status.condition(JobCondition.FAILED).reason == Reason.BACKOFF_LIMIT_EXCEEDED
    assert set(life.restored_steps()) == {bad.step}


def test_a_user_releases_a_checkpoint() -> None:
    life = Life(store=True, every=5).trained()
    bad = poisoned(life, is_stored=True)
    life.run(60)
    assert life.status.is_true(JobCondition.QUARANTINED)
    assert marked(life) == {bad.step}
    policy(life, releasedSteps=[bad.step])
    life.run(5)
    assert life.status.quarantined == ()
    assert life.condition(JobCondition.QUARANTINED)[:2] == ("False", Reason.RELEASED)
    assert reasons(life).count(Reason.RELEASED) == 1
    assert marked(life) == set()


def observed(life: Life) -> Observed:
    found = asyncio.run(life.operator.observe())
    assert found is not None
    return found


def marked(life: Life) -> set[int | None]:
    """Return the steps of the Checkpoint objects that show the quarantine."""
    found = observed(life).checkpoints
    return {c.spec.step for c in found if c.status.is_true(CheckpointCondition.QUARANTINED)}


@pytest.mark.fault("Retention meets a quarantined checkpoint in the store")
def test_a_quarantined_checkpoint_is_never_pruned_while_the_job_runs() -> None:
    life = Life(store=True, every=5).trained()
    bad = poisoned(life, is_stored=True)
    life.run(60, until=lambda s: bool(s.quarantined))
    life.run(100)
    assert life.status.last_persisted.step > bad.step + 20, "retention pruned others meanwhile"
    assert bad in life.cluster.gang.store.checkpoints
    assert marked(life) == {bad.step}
    world = world_of(observed(life))
    assert [p.own_checkpoint for p in round_message(world).quarantined] == [bad]


def test_a_failure_after_progress_is_not_the_restore_points_fault() -> None:
    life = Life().trained()
    for _ in range(8):
        life.rank_dies()
        life.run(25, until=lambda s: s.is_true("Running"))
        life.run(2)
    assert life.status.quarantined == ()


def test_ranks_that_are_killed_from_outside_do_not_count_against_the_restore_point() -> None:
    life = Life().trained()
    life.rank_dies()
    for _ in range(6):
        life.run(60, until=lambda s: s.restore_point is not None and not s.is_true("Running"))
        run = life.cluster.gang.run
        run.dead = (DeadRank(Rank(0), Worker(0), -9),)
        run.version += 1
        life.run(1)
    assert life.status.quarantined == ()


@pytest.mark.fault("A rank loses a peer that was killed or ran out of memory")
@pytest.mark.parametrize(
    ("cause", "counts"),
    [
        pytest.param(DeadRank(Rank(0), Worker(0), 1), True, id="both failed by themselves"),
        pytest.param(DeadRank(Rank(0), Worker(0), -9), False, id="killed from outside"),
        pytest.param(
            DeadRank(Rank(0), Worker(0), -9, out_of_memory="limit 4 MiB"), False, id="out of memory"
        ),
    ],
)
def test_a_rank_that_lost_its_peer_does_not_count_against_the_restore_point(
    cause: DeadRank, counts: bool
) -> None:
    """The peer's connections end with the cause, so the other rank fails with an error of its own."""
    observed = failing(record(4, 990.0), record(5, 991.0))
    both_dead = replace(observed.coordinator, dead=(cause, *observed.coordinator.dead))
    new = begun(decide(replace(observed, coordinator=both_dead), now()))
    assert bool(new.status.quarantined) is counts


def test_failures_that_a_rule_ignores_do_not_count_against_the_restore_point() -> None:
    life = Life().trained()
    policy(life, rules=[{"onReasons": ["RankFailed"], "action": "Ignore"}])
    bad = poisoned(life)
    life.run(120)
    assert len(life.restored_steps()) > 4
    assert set(life.restored_steps()) == {bad.step}
    assert counting(life.status) == 0


@pytest.mark.fault("A quarantined restore point is followed by uploads")
def test_uploads_after_it_are_recorded_although_their_steps_are_lower() -> None:
    """The quarantined commit is not part of the lineage and hides no later commit."""
    life = Life(store=True, every=5)
    life.run(30, until=lambda s: s.last_persisted is not None and s.last_persisted.step >= 25)
    life.run(3)
    bad = poisoned(life, is_stored=True)
    life.run(60, until=lambda s: bool(s.quarantined))
    life.run(60, until=lambda s: s.is_true("Running"))
    run = life.cluster.gang.run
    run.interval = 2
    life.run(400, until=lambda s: s.last_persisted is not None and s.last_persisted.round > 1)
    after = life.status.last_persisted
    assert after.round > bad.round
    assert after.step < bad.step
    life.lose_all_pods()
    life.run(60)
    assert life.status.restore_point.step >= after.step


# --------------------------------------------------------------------------- rule by rule

BAD = CheckpointId(Step(20), RestartRound(0))
OLDER_THAN_BAD = [held(10, 0, 0), held(10, 0, 1)]
BOTH_OF_BAD = [held(20, 0, 0), held(20, 0, 1)]


def choice(
    *sidecars: Any, quarantined: tuple[CheckpointId, ...] = (BAD,), **changes: Any
) -> Chosen | Wait | Exhausted:
    """Return the choice of round 1, which two survivors have reached after step 20 was committed."""
    begun = status(
        1,
        (0, 0),
        lineage=(LineageEntry(round=RestartRound(0)),),
        last_committed_step=Step(20),
        quarantined=quarantined,
    )
    seen = Observed(job=job(2, begun, **changes), pods=(pod(0), pod(1)), sidecars=sidecars)
    memory = JobMemory(
        round=RestartRound(1), round_seen_at=1000.0, seen={(Seen.ANSWERING, ""): 1000.0}
    )
    return choose(world_of(seen, memory, at=5000.0))


def both(*manifests: Any, shards: Any) -> tuple[Any, ...]:
    return tuple(sidecar(pod(w), 1, manifests=manifests, shards=shards) for w in (0, 1))


def test_the_newest_that_is_not_quarantined_is_chosen() -> None:
    seen = both(manifest(10, 0), manifest(20, 0), shards=[*OLDER_THAN_BAD, *BOTH_OF_BAD])
    found = choice(*seen)
    assert isinstance(found, Chosen)
    assert (found.point.step, found.reason) == (10, Reason.QUARANTINED)


def test_a_released_one_is_chosen_before_the_status_is_written() -> None:
    seen = both(manifest(10, 0), manifest(20, 0), shards=[*OLDER_THAN_BAD, *BOTH_OF_BAD])
    spec = job(2).spec.failure_policy
    found = choice(*seen, failure_policy=changed(spec, released_steps=(20,)))
    assert isinstance(found, Chosen)
    assert (found.point.step, found.reason) == (20, Reason.RESTORE_POINT_CHOSEN)


def test_a_step_of_the_same_number_and_another_round_is_not_quarantined() -> None:
    other = replace(BAD, round=RestartRound(7))
    found = choice(*both(manifest(20, 0), shards=BOTH_OF_BAD), quarantined=(other,))
    assert isinstance(found, Chosen)
    assert found.point.step == 20


@pytest.mark.fault("The last checkpoint is quarantined while a worker is silent")
def test_the_job_does_not_fail_while_a_silent_worker_may_have_an_older_checkpoint() -> None:
    seen = sidecar(pod(0), 1, manifests=[manifest(20, 0)], shards=BOTH_OF_BAD)
    found = choice(seen, silent(pod(1), since=1000.0))
    assert isinstance(found, Wait)
    assert found.note.reason == Reason.WAITING_FOR_HOLDERS
    assert isinstance(choice(*both(manifest(20, 0), shards=BOTH_OF_BAD)), Exhausted)


def failing(*records: RestartRecord, **changes: Any) -> Observed:
    """Return a gang whose ranks fail in round 5 before they have finished a step after step 10.

    It also has step 5.
    """
    point = RestorePointStatus(step=Step(10), round=RestartRound(1))
    spec = changes.pop("spec", {})
    begun = status(
        5,
        (0, 0),
        restore_point=point,
        coordinator=Worker(0),
        recent_restarts=records,
        last_committed_step=Step(10),
        **changes,
    )
    pods = (pod(0), pod(1))
    return Observed(
        job=job(2, begun, **spec),
        pods=pods,
        sidecars=tuple(
            sidecar(p, 5, version=1, manifests=[manifest(5, 1)], shards=[held(5, 1, p.worker)])
            for p in pods
        ),
        coordinator=CoordinatorState(
            5,
            RestartRound(5),
            dead=(DeadRank(Rank(1), Worker(1), 1, "boom"),),
            last_local=RestorePoint(Step(10), RestartRound(1)),
        ),
        memory=JobMemory(round=RestartRound(5), round_seen_at=900.0, failure_seen_at=1.0),
    )


def record(round_: int, seconds: float) -> RestartRecord:
    return RestartRecord(
        round=RestartRound(round_),
        at=START + timedelta(seconds=seconds),
        failed_from=CheckpointId(Step(10), RestartRound(1)),
    )


@pytest.mark.fault("A script fails so late that no failure is in the window")
def test_failures_outside_of_the_window_count_against_the_checkpoint() -> None:
    """A script that takes half an hour until it fails would otherwise restart for ever."""
    old = (record(4, 0.0), record(5, 1.0))
    new = begun(decide(failing(*old, spec={"window": "10s", "max_restarts": 3}), now()))
    assert [q.step for q in new.status.quarantined] == [10]
    assert counting(new.status) == 3


def test_records_of_another_checkpoint_outside_of_the_window_are_dropped() -> None:
    other = changed(record(1, 0.0), failed_from=CheckpointId(Step(5), RestartRound(1)))
    new = begun(decide(failing(other, spec={"window": "10s"}), now()))
    assert [r.round for r in new.status.recent_restarts] == [6]


@pytest.mark.fault("The object store is away for minutes while a checkpoint is restored")
def test_a_store_that_is_away_is_no_evidence_against_the_checkpoint() -> None:
    """Otherwise an outage of some minutes would quarantine one checkpoint after the other."""
    seen = failing(record(4, 1.0), record(5, 2.0))
    for may_succeed, reason in ((True, Reason.RESTORE_FAILED), (False, Reason.CHECKPOINT_MISSING)):
        state = CoordinatorState(
            5,
            RestartRound(5),
            cannot_restore="worker 1: object store: connection refused",
            restore_may_succeed=may_succeed,
        )
        new = begun(decide(replace(seen, coordinator=state), now()))
        newest = new.status.recent_restarts[-1]
        assert (newest.ignored, newest.failed_from) == (True, None)
        assert new.status.recoveries[-1].reason == reason
        assert new.status.quarantined == ()


def test_ranks_that_end_for_want_of_their_checkpoint_are_no_evidence_against_it() -> None:
    """They ran, but not from this checkpoint: their restore failed."""
    seen = failing(record(4, 1.0), record(5, 2.0))
    assert seen.coordinator is not None
    state = replace(seen.coordinator, cannot_restore="worker 1: rank 1: no place has a good copy")
    new = begun(decide(replace(seen, coordinator=state), now()))
    assert new.status.quarantined == ()
    assert [m.step for m in new.status.missing] == [10]
    assert counting(new.status) == 2


@pytest.mark.fault("A rule would replace the pods with the checkpoint that follows a quarantine")
@pytest.mark.parametrize(
    "policy_",
    [
        {"rules": (FailureRule(on_exit_codes=(1,), action=FailureAction.RESTART_POD),)},
        {
            "failure_policy": changed(
                job(2).spec.failure_policy, avoid_nodes=AvoidNodesSpec(failures=1)
            )
        },
    ],
    ids=["RestartPod", "avoidNodes"],
)
@pytest.mark.parametrize("has_older", [True, False])
def test_a_pod_with_the_checkpoint_below_the_restore_point_is_not_replaced(
    has_older: bool, policy_: dict[str, Any]
) -> None:
    """The restore point is in the store. If its quarantine follows, the pods have the only other one."""
    seen = failing(
        record(4, 1.0),
        record(5, 2.0),
        last_persisted=PersistedStep(
            step=Step(10), round=RestartRound(1), manifest=manifest_digest(10, 1)
        ),
        spec=policy_,
    )
    shards = [held(5, 1, 0), held(5, 1, 1)]
    manifests = [manifest(5, 1), manifest(10, 1)] if has_older else [manifest(10, 1)]
    sidecars = tuple(
        sidecar(p, 5, version=1, manifests=manifests, shards=[shards[p.worker]]) for p in seen.pods
    )
    new = begun(decide(replace(seen, sidecars=sidecars), now()))
    assert [q.step for q in new.status.quarantined] == ([10] if has_older else [])
    assert new.status.members == ((0, 0) if has_older else (0, 6))


def test_a_job_with_as_many_quarantined_checkpoints_as_fit_fails() -> None:
    many = tuple(replace(BAD, step=Step(1000 + i)) for i in range(MAX_QUARANTINED))
    records = (record(4, 1.0), record(5, 2.0))
    first = decide(failing(quarantined=many), now())
    assert any(isinstance(a, BeginRound) for a in first.actions), "one failure is not too often"
    decision = decide(failing(*records, quarantined=many), now())
    [write] = [a for a in decision.actions if isinstance(a, WriteStatus)]
    assert write.status.condition(JobCondition.FAILED).reason == Reason.NO_PROGRESS
    fewer = failing(*records, quarantined=many[1:])
    assert any(isinstance(a, BeginRound) for a in decide(fewer, now()).actions)
    policy = changed(job(2).spec.failure_policy, released_steps=(10,))
    released = failing(*records, quarantined=many, spec={"failure_policy": policy})
    assert any(isinstance(a, BeginRound) for a in decide(released, now()).actions)


def test_the_status_is_read_as_it_was_written() -> None:
    life = Life().trained()
    bad = poisoned(life)
    life.run(60, until=lambda s: bool(s.quarantined))
    read = TrainingJob.from_dict({**life.cluster.job, "status": merge_patch(life.status)}).status
    assert read.quarantined == life.status.quarantined
    assert [r.failed_from for r in read.recent_restarts] == [None, bad, bad, bad]
