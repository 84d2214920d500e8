"""Pods that are lost together cost one round, and the wait for them is part of the detection."""

from __future__ import annotations

import logging

import pytest
from tests.support.operator.builders import job, now, pod, sidecar, status
from tests.support.operator.life import WORKERS, Life
from tests.support.operator.oracle import broken_rules

from holdfast_core.api import RecoveryStatus, RestorePointStatus, TierCounts
from holdfast_core.ids import Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import CoordinatorState, DeadRank
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.facts.failure import GATHER_SECONDS
from holdfast_operator.decide.report import recovery
from holdfast_operator.model.actions import BeginRound, Decision, EmitEvent
from holdfast_operator.model.job import JobMemory, NodeView, Observed, PodView
from holdfast_operator.model.reasons import Reason

SEEN_AT = 1000.0
GATHERED_AT = SEEN_AT + GATHER_SECONDS + 0.001


def world(*pods: PodView, workers: int = 3, memory: JobMemory | None = None) -> Observed:
    """Return a gang that trains in round 0 and has only these pods, with a failure seen at SEEN_AT."""
    begun = status(0, (0,) * workers, restore_point=RestorePointStatus(), coordinator=Worker(0))
    known = JobMemory(round=RestartRound(0), round_seen_at=900.0, failure_seen_at=SEEN_AT)
    return Observed(
        job=job(workers, begun),
        pods=pods,
        sidecars=tuple(sidecar(p, 0, version=1) for p in pods),
        nodes={f"node-{i}": NodeView(f"node-{i}") for i in range(workers)},
        coordinator=CoordinatorState(5, RestartRound(0), running=True),
        memory=known if memory is None else memory,
    )


def round_of(decision: Decision) -> BeginRound | None:
    return next((a for a in decision.actions if isinstance(a, BeginRound)), None)


def test_a_lost_pod_delays_the_round_until_further_ones_may_have_been_seen() -> None:
    gathering = decide(world(pod(0), pod(1)), now(SEEN_AT + 0.125))
    assert gathering.actions == ()
    assert gathering.requeue_after_seconds == pytest.approx(GATHER_SECONDS - 0.125)
    begun = round_of(decide(world(pod(0)), now(GATHERED_AT)))
    assert begun is not None
    assert begun.status.members == (0, 1, 1)


def test_the_wait_counts_from_the_first_failure_of_any_kind() -> None:
    """Ranks often fail before the deletion of their peer's pod is seen."""
    dead = (DeadRank(Rank(0), Worker(0), 1, "connection closed by peer"),)
    observed = world(pod(0), pod(1))
    failed = CoordinatorState(6, RestartRound(0), dead=dead)
    observed = Observed(
        job=observed.job, pods=observed.pods, coordinator=failed, memory=observed.memory
    )
    assert round_of(decide(observed, now(SEEN_AT + 0.125))) is None
    begun = round_of(decide(observed, now(GATHERED_AT)))
    assert begun is not None
    assert begun.status.last_recovery is not None
    assert begun.status.last_recovery.workers == (2,), "the worker of the pod, not of the rank"


@pytest.mark.parametrize("workers", [1, 3])
def test_a_gang_without_a_remaining_pod_does_not_wait(workers: int) -> None:
    assert round_of(decide(world(workers=workers), now(SEEN_AT))) is not None


def test_a_gang_that_has_saved_and_stopped_for_a_deleted_pod_does_not_wait() -> None:
    leaving = pod(2, terminating=True, trainer_exit_code=0)
    memory = JobMemory(
        round=RestartRound(0), round_seen_at=900.0, terminating_since=((leaving.uid, 990.0),)
    )
    observed = world(pod(0), pod(1), leaving, memory=memory)
    assert round_of(decide(observed, now(SEEN_AT))) is not None


def trained() -> Life:
    life = Life(store=True, every=20)
    life.run(60)
    assert life.status.is_true("Running")
    return life


def lose_all(life: Life, *tenths_between: int) -> None:
    """Delete the pods of all workers, with these times between one deletion and the next."""
    names = [life.pod(worker) for worker in range(WORKERS)]
    for name, tenths in zip(names, (*tenths_between, 1), strict=True):
        life.cluster.lose_pod(name)
        life.run_tenths(tenths)


@pytest.mark.parametrize(
    ("tenths_between", "rounds"),
    [
        pytest.param((1, 1, 1), 1, id="one after another within the wait"),
        pytest.param((1, 6, 1), 2, id="two after the round had begun"),
    ],
)
def test_all_pods_that_are_lost_at_once_cost_one_round(
    tenths_between: tuple[int, ...], rounds: int
) -> None:
    life = trained()
    lose_all(life, *tenths_between)
    life.run(30)
    assert life.status.is_true("Running")
    assert life.status.restart_round == rounds
    assert len(life.status.recoveries) == rounds
    newest = life.status.last_recovery
    assert newest is not None
    assert newest.back_off_seconds == 0.0, "the wait is part of the detection"
    assert newest.sources is not None
    assert newest.sources.object == WORKERS
    assert newest.restored_step == life.status.lineage[-1].base_step
    assert broken_rules(life.cluster, life.copies) == []


def test_one_event_and_one_log_line_describe_a_complete_recovery(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "holdfast_operator")
    life = trained()
    node = life.operator.worker_pod(2)
    assert node is not None and node.node is not None
    life.cluster.nodes[node.node].dead = True
    life.run(90)
    assert life.status.is_true("Running")
    texts = [e.message for e in life.operator.events if e.reason is Reason.RECOVERED]
    assert len(texts) == 1
    assert texts[0].startswith(f"round 1: NodeLost (worker 2, {node.node}), ")
    assert " s detect, " in texts[0] and " s in total, restored step " in texts[0]
    assert "peer x1" in texts[0] and texts[0].endswith(" steps lost")
    assert [r.getMessage() for r in caplog.records].count(texts[0]) == 1


def test_an_interrupted_recovery_is_not_described() -> None:
    life = trained()
    life.cluster.lose_pod(life.pod(2))
    life.run_tenths(5)
    assert life.status.restart_round == 1
    life.cluster.lose_pod(life.pod(3))
    life.run(30)
    assert [r.total_seconds is None for r in life.status.recoveries] == [True, False]
    events = [e for e in life.operator.events if e.reason is Reason.RECOVERED]
    assert len(events) == 1
    assert isinstance(events[0], EmitEvent) and events[0].message.startswith("round 2: PodLost")


def test_the_description_leaves_out_short_phases_and_names_what_was_lost() -> None:
    record = RecoveryStatus(
        round=RestartRound(4),
        reason="PodLost",
        workers=(Worker(2), Worker(3)),
        nodes=("node-2", "node-3"),
        detect_seconds=2.06,
        back_off_seconds=0.0,
        seal_seconds=0.31,
        first_step_seconds=4.0,
        total_seconds=6.37,
        restored_step=Step(4200),
        sources=TierCounts(memory=2, peer=2),
        lost_steps=3,
    )
    assert recovery.describe(record) == (
        "round 4: PodLost (workers 2, 3, node-2, node-3), 2.1 s detect, 0.3 s seal, 4.0 s first step, "
        "6.4 s in total, restored step 4200 from memory x2 and peer x2, 3 steps lost"
    )
    empty = RecoveryStatus(round=RestartRound(1), reason="Resumed")
    assert recovery.describe(empty) == "round 1: Resumed, started without a checkpoint"
