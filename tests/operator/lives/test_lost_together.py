"""Pods that are lost together cost one round, and the wait for them is part of the detection."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import pytest
from tests.support.operator.builders import NAMESPACE, job, now, pod, sidecar, status
from tests.support.operator.decisions import of_kind
from tests.support.operator.life import WORKERS, Life, dies_after
from tests.support.operator.oracle import broken_rules
from tests.support.operator.progress import progress_of

from holdfast_core.api import (
    JobCondition,
    RecoveryStatus,
    RestorePointStatus,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import CoordinatorState, DeadRank, RestorePoint
from holdfast_core.names import pod_name
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.ends import KUBELET_SECONDS
from holdfast_operator.decide.failures import GATHER_SECONDS
from holdfast_operator.decide.report import recovery
from holdfast_operator.decide.report.status import notices
from holdfast_operator.model.actions import (
    BeginRound,
    ChooseRestorePoint,
    Decision,
    EmitEvent,
    EventKind,
)
from holdfast_operator.model.job import JobMemory, NodeView, Observed, PodPhase, PodView, Seen
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
    assert begun.status.members == (0, 1, 1)


@pytest.mark.fault("Ranks fail before the deletion of their peer's pod is seen")
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
    assert begun.status.last_recovery.workers == (2,), "the worker of the pod, not of the rank"


@pytest.mark.parametrize("workers", [1, 3])
def test_a_gang_without_a_remaining_pod_does_not_wait(workers: int) -> None:
    assert round_of(decide(world(workers=workers), now(SEEN_AT))) is not None


@pytest.mark.fault("A pod is lost after its gang has saved and stopped for its deletion")
def test_a_gang_that_has_saved_and_stopped_for_a_deleted_pod_does_not_wait() -> None:
    leaving = pod(2, terminating=True, trainer_exit_code=0)
    last = RestorePoint(Step(40), RestartRound(0))
    saved = CoordinatorState(
        5, RestartRound(0), running=True, progress=progress_of(40, 40), last_replicated=last
    )
    memory = JobMemory(
        round=RestartRound(0), round_seen_at=900.0, seen={(Seen.LEAVING, leaving.uid): 990.0}
    )
    observed = replace(world(pod(0), pod(1), leaving, memory=memory), coordinator=saved)
    assert round_of(decide(observed, now(SEEN_AT))) is not None


def trained() -> Life:
    return Life(store=True, every=20).trained(60)


def lose_all(life: Life, *tenths_between: int) -> None:
    """Delete the pods of all workers, with these times between one deletion and the next."""
    names = [life.pod(worker) for worker in range(WORKERS)]
    for name, tenths in zip(names, (*tenths_between, 1), strict=True):
        life.cluster.lose_pod(name)
        life.run_tenths(tenths)


@pytest.mark.fault("Several pods are deleted one after another, less than a second apart")
@pytest.mark.parametrize(
    ("tenths_between", "rounds"),
    [
        pytest.param((1, 1, 1), 1, id="one after another within the wait"),
        pytest.param((1, 6, 1), 1, id="two after the round had begun"),
        pytest.param((5, 5, 5), 1, id="half a second apart"),
        pytest.param((9, 9, 9), 1, id="almost a second apart"),
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
    assert newest.phase_seconds["back_off"] == 0.0, "the wait is part of the detection"
    base = life.status.lineage[-1].base
    assert newest.restored_step == base.step
    assert broken_rules(life.cluster, life.copies) == []


def test_one_event_and_one_log_line_describe_a_complete_recovery(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    life = trained()
    node = life.node_of(2)
    node.dead = True
    life.run(90)
    assert life.status.is_true("Running")
    texts = [e.message for e in life.operator.events if e.reason is Reason.RECOVERED]
    assert len(texts) == 1
    assert texts[0].startswith(f"round 1: NodeLost (worker 2, {node.name}), ")
    assert " s detect, " in texts[0] and " s in total, restored step " in texts[0]
    assert texts[0].endswith(" steps lost")
    assert [r.getMessage() for r in caplog.records].count(texts[0]) == 1


@pytest.mark.fault("Another pod is lost during a recovery")
def test_each_round_has_one_line_also_if_another_round_interrupts_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    life = trained()
    life.cluster.lose_pod(life.pod(2))
    life.run(60, until=lambda status: bool(status.restart_round and status.restore_point))
    life.cluster.lose_pod(life.pod(3))
    life.run(30)
    assert [r.total_seconds is None for r in life.status.recoveries] == [True, False]
    interrupted, complete = (
        [e.message for e in life.operator.events if e.reason is reason]
        for reason in (Reason.RECOVERY_INTERRUPTED, Reason.RECOVERED)
    )
    assert len(interrupted) == len(complete) == 1
    assert interrupted[0].startswith("round 1: PodLost (worker 2")
    assert interrupted[0].endswith("interrupted by round 2")
    assert complete[0].startswith("round 2: PodLost (worker 3")
    logged = [r.getMessage() for r in caplog.records]
    assert [text for text in logged if text.startswith("round ")] == [*interrupted, *complete]


@pytest.mark.fault("Pods and ranks are lost and the operator restarts at random moments")
@pytest.mark.parametrize("seed", [0, 2, 3])
def test_each_round_has_one_line_in_order_whatever_fails_and_whenever_the_operator_restarts(
    seed: int,
) -> None:
    chance = random.Random(seed)
    life, events = trained(), list[EmitEvent]()
    for _ in range(5):
        match chance.choice(("pod", "pod", "rank", "operator")):
            case "pod":
                pod = life.operator.worker_pod(chance.randrange(WORKERS))
                if pod is not None:
                    life.cluster.lose_pod(pod.name)
            case "rank" if life.cluster.gang.run is not None:
                life.rank_dies()
            case "operator":
                events += life.operator.events
                life.restart()
        chance.choice((life.run_tenths, life.run))(chance.randint(1, 8))
    life.run(200, until=lambda status: status.is_true("Running"))
    events += life.operator.events
    ends = (Reason.RECOVERED, Reason.RECOVERY_INTERRUPTED)
    lines = [e.message.partition(":")[0] for e in events if e.reason in ends]
    assert lines == [f"round {r + 1}" for r in range(life.status.restart_round or 0)]
    assert len(lines) > 1


def test_an_interrupted_recovery_keeps_the_phases_that_were_over() -> None:
    life = trained()
    life.cluster.lose_pod(life.pod(2))
    life.run(60, until=lambda status: len(status.recoveries) == 1 and bool(status.restore_point))
    life.run_tenths(1)
    life.cluster.lose_pod(life.pod(3))
    life.run_tenths(5)
    first, second = life.status.recoveries
    assert first.phase_seconds["seal"] > 0
    assert first.total_seconds is None and "first_step" not in first.phase_seconds
    assert "seal" not in second.phase_seconds


@pytest.mark.fault("The operator restarts while it waits for further lost pods")
@pytest.mark.parametrize("tenths", [1, 2])
def test_an_operator_that_restarts_in_the_wait_begins_one_round(tenths: int) -> None:
    """The new process has seen no failure: it waits again, and at most as long."""
    life = trained()
    life.cluster.lose_pod(life.pod(1))
    life.run_tenths(tenths)
    assert life.status.restart_round == 0
    life.restart()
    life.run_tenths(1)
    life.cluster.lose_pod(life.pod(2))
    life.run_tenths(4)
    assert life.status.members == (0, 1, 1, 0)
    life.run(30)
    assert life.status.is_true("Running")
    assert life.status.restart_round == 1
    assert broken_rules(life.cluster, life.copies) == []


@pytest.mark.fault("A pod of a newer round is seen while a loss is gathered")
def test_a_pod_of_a_newer_round_is_not_gathered() -> None:
    """Another operator process has begun round 1, and the watch of this one shows only its pod."""
    newer = pod(2, birth=1)
    begun = round_of(decide(world(pod(0), newer), now(GATHERED_AT)))
    assert begun.status.restart_round == 2
    assert begun.status.members == (0, 2, 1), "worker 2 has a pod that may hold the newest copies"


def test_a_pod_that_is_lost_in_the_next_round_has_a_wait_of_its_own() -> None:
    """The first failure of the previous round is 10 s old, and does not count for this one."""
    old = JobMemory(round=RestartRound(0), round_seen_at=900.0, failure_seen_at=SEEN_AT - 10)
    begun = status(1, (0, 0, 0), restore_point=RestorePointStatus(), coordinator=Worker(0))
    observed = replace(world(pod(0), pod(1), memory=old), job=job(3, begun), coordinator=None)
    gathering = decide(observed, now(SEEN_AT))
    assert round_of(gathering) is None
    assert gathering.requeue_after_seconds == pytest.approx(GATHER_SECONDS)


@pytest.mark.fault("Several pods leave at once")
def test_pods_that_leave_together_are_replaced_in_one_round() -> None:
    """Three pods are deleted. The round waits until all of them have left or their time is over."""
    leaving = [pod(w, terminating=True) for w in range(3)]
    since = {(Seen.LEAVING, p.uid): 999.0 for p in leaving}
    memory = JobMemory(round=RestartRound(0), round_seen_at=900.0, seen=since)
    observed = world(*leaving[1:], pod(3), workers=4, memory=memory)
    assert round_of(decide(observed, now(SEEN_AT + GATHER_SECONDS))) is None
    over = 999.0 + leaving[1].grace_seconds + KUBELET_SECONDS
    begun = round_of(decide(observed, now(over)))
    assert begun.status.members == (1, 1, 1, 0)
    assert begun.status.last_recovery.workers == (0, 1, 2)


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        (JobCondition.FAILED, "the failure of the job"),
        (JobCondition.SUSPENDED, "the suspension of the job"),
    ],
)
def test_a_recovery_that_the_end_of_the_gang_interrupts_has_its_line(
    condition: JobCondition, text: str
) -> None:
    record = RecoveryStatus(
        round=RestartRound(3), reason="RankFailed", workers=(Worker(1),), lost_steps=1
    )
    before = TrainingJobStatus(restart_round=RestartRound(3), recoveries=(record,))
    ended = before.with_condition(condition, True, "Ended", "", now(0).utc, 1)
    interrupted = EmitEvent(
        EventKind.WARNING,
        Reason.RECOVERY_INTERRUPTED,
        f"round 3: RankFailed (worker 1), 1 step lost, interrupted by {text}",
    )
    assert interrupted in notices(before, ended)
    assert notices(ended, ended) == []


def test_the_description_leaves_out_short_phases_and_names_what_was_lost() -> None:
    record = RecoveryStatus(
        round=RestartRound(4),
        reason="PodLost",
        workers=(Worker(2), Worker(3)),
        nodes=("node-2", "node-3"),
        phase_seconds={"detect": 2.06, "back_off": 0.0, "seal": 0.31, "first_step": 4.0},
        total_seconds=6.37,
        restored_step=Step(4200),
        sources={"memory": 2, "peer": 2},
        lost_steps=3,
    )
    assert recovery.describe(record) == (
        "round 4: PodLost (workers 2, 3, node-2, node-3), 2.1 s detect, 0.3 s seal, 4.0 s first step, "
        "6.4 s in total, restored step 4200 from memory x2 and peer x2, 3 steps lost"
    )
    empty = RecoveryStatus(round=RestartRound(1), reason="Resumed")
    assert recovery.describe(empty) == "round 1: Resumed, started without a checkpoint"


def in_round_1(*pods: PodView, members: tuple[int, ...] = (0, 0, 0, 1)) -> Observed:
    """Return a gang that was sealed for round 1 after the loss of worker 3, before CAS 2."""
    record = RecoveryStatus(round=RestartRound(1), reason="RankFailed", workers=(Worker(3),))
    begun = status(1, members, coordinator=None, recoveries=(record,))
    memory = JobMemory(
        round=RestartRound(1),
        round_seen_at=SEEN_AT,
        begun={RestartRound(1): SEEN_AT},
        failure_seen_at=SEEN_AT,
    )
    return Observed(
        job=job(len(members), begun),
        pods=pods,
        sidecars=tuple(sidecar(p, 1) for p in pods if p.birth_round == 0),
        memory=replace(memory, seen={(Seen.SCHEDULED, ""): SEEN_AT}),
    )


@pytest.mark.fault(
    "A further pod is lost after a round has sealed and before it has a restore point"
)
def test_a_round_without_a_restore_point_replaces_further_lost_pods() -> None:
    survivors = (pod(0), pod(1))
    found = decide(in_round_1(*survivors, pod(3, birth=1)), now(SEEN_AT + 0.5))
    taken_in = round_of(found)
    assert taken_in.status.restart_round == 1
    assert taken_in.status.members == (0, 0, 1, 1)
    assert taken_in.confirm_gone == ("job-l2msg4-2-r0",)
    (record,) = taken_in.status.recoveries
    assert record.workers == (2, 3)
    assert record.reason == "PodLost", "the lost pod explains the rank that failed"
    assert found.memory.seen_at(Seen.SCHEDULED) is None, "the new pod has not started"


@pytest.mark.fault("A round takes in more pods than its record may name")
def test_the_record_stays_within_its_limits_when_a_round_takes_in_many_pods() -> None:
    lost = [pod(w, phase=PodPhase.FAILED, reason="Evicted") for w in range(1, 14)]
    observed = in_round_1(pod(0), *lost, members=(*[0] * 14, 1))
    named = tuple(f"node-x{n}" for n in range(5))
    (record,) = observed.job.status.recoveries
    status_ = changed(observed.job.status, recoveries=(changed(record, nodes=named),))
    observed = replace(observed, job=changed(observed.job, status=status_))
    taken_in = round_of(decide(observed, now(SEEN_AT + 0.5)))
    assert taken_in.status.members == (0, *[1] * 14)
    assert TrainingJobStatus.model_validate(taken_in.status.model_dump()) == taken_in.status


@pytest.mark.parametrize(
    "pods",
    [
        pytest.param((pod(0), pod(1), pod(2), pod(3, birth=1, terminating=True)), id="a new pod"),
        pytest.param((pod(0), pod(2), pod(3, birth=1), pod(1, birth=2)), id="another process"),
        pytest.param((pod(0), pod(1), pod(2, birth=1), pod(3, birth=1)), id="status is behind"),
        pytest.param(
            (pod(0), pod(1), pod(2, phase=PodPhase.FAILED), pod(3, birth=1)), id="own failure"
        ),
    ],
)
def test_other_failures_in_a_sealed_round_begin_the_next_one(pods: tuple[PodView, ...]) -> None:
    begun = round_of(decide(in_round_1(*pods), now(SEEN_AT + 0.5)))
    assert (begun.status.restart_round or 0) > 1


@pytest.mark.fault(
    "An operator whose status is behind sees the pod of a worker that its round took in"
)
def test_a_status_that_is_behind_deletes_no_pod_that_its_round_took_in() -> None:
    """Another operator process took in worker 2 and created its pod. The status here is the one before."""
    newer = pod(2, birth=1)
    found = decide(in_round_1(pod(0), pod(1), pod(2), newer, pod(3, birth=1)), now(SEEN_AT + 0.5))
    begun = round_of(found)
    assert begun is not None, "its write conflicts, unless etcd was restored from a backup"
    assert begun.status.members[2] == 1
    assert not of_kind(found.actions, "delete Pod")


@pytest.mark.parametrize(("seconds", "waits"), [(0.9, True), (1.1, False)])
def test_the_choice_waits_a_second_for_further_losses_while_a_new_pod_starts(
    seconds: float, waits: bool
) -> None:
    new = pod(3, birth=1, phase=PodPhase.PENDING, sidecar_started=False)
    observed = in_round_1(pod(0), pod(1), pod(2), new)
    found = decide(observed, now(SEEN_AT + seconds))
    assert any(isinstance(a, ChooseRestorePoint) for a in found.actions) is not waits


def test_the_choice_does_not_wait_for_further_losses_once_all_pods_have_started() -> None:
    observed = in_round_1(pod(0), pod(1), pod(2), pod(3, birth=1, sidecar_started=True))
    found = decide(observed, now(SEEN_AT + 0.1))
    assert any(isinstance(a, ChooseRestorePoint) for a in found.actions)


@pytest.mark.fault("The operator ends while a round takes in a lost pod")
@pytest.mark.parametrize("writes", [1, 2, 3, 4, 5])
def test_an_operator_that_ends_while_a_round_takes_in_a_pod_costs_no_further_round(
    writes: int,
) -> None:
    life = trained()
    life.cluster.lose_pod(life.pod(1))
    life.run_tenths(5)
    assert life.status.members == (0, 1, 0, 0)
    life.cluster.lose_pod(life.pod(2))
    dies_after(life, writes)
    life.restart()
    life.run(30)
    assert life.status.is_true("Running")
    assert (life.status.restart_round, life.status.members) == (1, (0, 1, 1, 0))
    assert broken_rules(life.cluster, life.copies) == []


def test_the_leaves_of_all_workers_of_a_block_are_there_when_a_round_takes_in_a_pod() -> None:
    life = trained()
    life.cluster.lose_pod(life.pod(1))
    life.run_tenths(7)
    (secret,) = (s for s in life.cluster.secrets if s.endswith("-r1"))
    keys = life.cluster.api.objects["secrets", NAMESPACE, secret]["data"].keys()
    names = {pod_name("job", life.cluster.uid, worker, 1) for worker in range(WORKERS)}
    assert {key.removesuffix(".key") for key in keys if key.endswith(".key")} == names


@pytest.mark.fault("All nodes of a gang that trains are lost")
@pytest.mark.parametrize("store", [True, False])
def test_a_gang_whose_only_two_nodes_are_lost_goes_on_elsewhere_or_says_why_it_waits(
    store: bool,
) -> None:
    """Without a store, only the two nodes have the committed steps, and they may come back."""
    life = Life(store=store, every=5)
    life.cluster.pods_per_node = 2
    life.cluster.full_nodes = {f"node-{n}" for n in range(2, 6)}
    life.run(60)
    life.run_until_committed(is_stored=store)
    life.cluster.full_nodes = set()
    for name in ("node-0", "node-1"):
        life.cluster.nodes[name].dead = True
    life.run(100)
    assert life.nothing_was_deleted(), "the control plane may be cut off"
    found = life.status.condition(JobCondition.SIDECARS_UNREACHABLE)
    assert found is not None and found.is_true
    assert "Nodes that are lost: node-0, node-1" in found.message
    if store:
        assert "A round on other nodes begins 300 s after their last answers" in found.message
        life.run(400, until=lambda s: s.restart_round == 1 and s.is_true("Running"))
        assert life.status.restart_round == 1
        return
    assert "the job goes on when the nodes are back" in found.message
    life.run(600)
    assert life.nothing_was_deleted()
    for name in ("node-0", "node-1"):
        life.cluster.nodes[name].dead = False
    life.run(120, until=lambda s: not s.is_true("SidecarsUnreachable"))
    assert life.status.is_true("Running")
    assert broken_rules(life.cluster, life.copies) == []
