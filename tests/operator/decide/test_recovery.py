"""The phases of a recovery are counted from the fault, are disjoint, and add up to the total."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.operator.builders import (
    condition,
    held,
    job,
    manifest,
    manifest_digest,
    now,
    pod,
    sidecar,
    status,
    world_of,
)
from tests.support.operator.progress import progress_of

from holdfast_core.api import (
    JobCondition,
    RecoveryStatus,
    RestorePointStatus,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import Digest, Rank, RestartRound, Step, TierName, Worker
from holdfast_core.messages.schema import CoordinatorState, DeadRank, RestorePoint
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.facts.evidence import Failure
from holdfast_operator.decide.facts.world import World
from holdfast_operator.decide.report import recovery
from holdfast_operator.model.actions import BeginRound, StatusWrite
from holdfast_operator.model.job import (
    JobMemory,
    NodeView,
    Now,
    Observed,
    PodPhase,
    Reachable,
    Seen,
    SidecarView,
)
from holdfast_operator.model.reasons import Reason

PODS = (pod(0), pod(1))


def state(round_: int = 0, step: int = 0, **changes: object) -> CoordinatorState:
    found = CoordinatorState(
        version=1,
        round=RestartRound(round_),
        progress=progress_of(step, step) if step else None,
        running=step > 0,
        last_local=RestorePoint(Step(10), RestartRound(0), manifest_digest(10, 0)),
    )
    return replace(found, **changes)  # type: ignore[arg-type]


@dataclass
class Timeline:
    """Passes of one operator process over one job, in which every status write succeeds."""

    observed: Observed
    memory: JobMemory = field(default_factory=JobMemory)

    def at(self, seconds: float, **seen: object) -> TrainingJobStatus:
        """Change what the operator sees from now on, and run passes until the status no longer changes."""
        self.observed = replace(self.observed, **seen)  # type: ignore[arg-type]
        for _ in range(4):
            decision = decide(replace(self.observed, memory=self.memory), now(seconds))
            self.memory = decision.memory
            writes = [a for a in decision.actions if isinstance(a, StatusWrite)]
            if not writes:
                break
            known = self.observed.job
            self.observed = replace(self.observed, job=changed(known, status=writes[0].status))
        return self.observed.job.status

    def restart_operator(self) -> None:
        self.memory = JobMemory()


def holders(round_: int) -> tuple[SidecarView, ...]:
    return tuple(
        sidecar(p, round_, manifests=(manifest(10, 0),), shards=(held(10, 0, p.worker),))
        for p in PODS
    )


def trained() -> Timeline:
    """Return a gang of two in round 0, whose newest step was seen at 120 s."""
    timeline = Timeline(Observed(job=job(2)))
    timeline.at(100.0)
    timeline.at(101.0, pods=PODS, sidecars=holders(0))
    timeline.at(110.0, coordinator=state(0, 5))
    timeline.at(120.0, coordinator=state(0, 12))
    assert timeline.observed.job.status.is_true(JobCondition.RUNNING)
    return timeline


DEAD = DeadRank(Rank(1), Worker(1), -9, "")
TIMES = {"rehydrate_seconds": 0.5, "rendezvous_seconds": 1.2, "first_step_seconds": 0.25}


def restarted(timeline: Timeline, seen_at: float) -> TrainingJobStatus:
    """Run from the pass that sees the fault: the gang is sealed 2 s later, and trains 3 s after that."""
    timeline.at(seen_at + 2.0, sidecars=holders(1), coordinator=None)
    return timeline.at(seen_at + 5.0, coordinator=state(1, 11, **TIMES))


def assert_adds_up(record: RecoveryStatus | None) -> RecoveryStatus:
    assert record.total_seconds == pytest.approx(sum(record.phases().values()), abs=1e-6)
    assert all(seconds >= 0.0 for seconds in record.phases().values())
    return record


@pytest.mark.parametrize(
    ("reported", "shown"),
    [
        pytest.param({TierName.MEMORY: 2}, {"memory": 2}, id="what the ranks read"),
        pytest.param(None, None, id="a sidecar of an earlier version"),
    ],
)
def test_the_record_says_from_where_the_ranks_restored(
    reported: dict[TierName, int] | None, shown: dict[str, int] | None
) -> None:
    timeline = trained()
    timeline.at(121.5, coordinator=state(0, 12, dead=(DEAD,)))
    status = timeline.at(123.5, sidecars=holders(1), coordinator=None)
    status = timeline.at(126.5, coordinator=state(1, 11, restored_from=reported, **TIMES))
    assert status.last_recovery.sources == shown


@pytest.mark.fault("A rank is killed some time before the pass that sees it")
def test_a_killed_rank_counts_from_the_last_sound_pass() -> None:
    timeline = trained()
    timeline.at(121.0)
    timeline.at(121.5, coordinator=state(0, 12, dead=(DEAD,)))
    record = assert_adds_up(restarted(timeline, 121.5).last_recovery)
    assert record.phases() == {
        "detect": 0.5,
        "back_off": 0.0,
        "seal": 2.0,
        "schedule": 0.0,
        "rehydrate": 0.5,
        "rendezvous": 2.25,
        "first_step": 0.25,
    }
    assert record.total_seconds == 5.5


@pytest.mark.fault("A node falls silent some time before it counts as lost")
@pytest.mark.parametrize(
    ("renewed_at", "answered_at", "expected"),
    [
        pytest.param(115.0, 118.0, 20.5, id="the newest step"),
        pytest.param(124.0, 118.0, 16.5, id="the lease"),
        pytest.param(115.0, 126.0, 14.5, id="the sidecar's last answer"),
        pytest.param(None, None, 20.5, id="neither lease nor answer"),
        pytest.param(
            150.0,
            None,
            0.5,
            id="a sign after it was seen counts as then, and only the wait is left",
        ),
    ],
)
def test_a_silent_node_counts_from_its_last_sign_of_life(
    renewed_at: float | None, answered_at: float | None, expected: float
) -> None:
    timeline = trained()
    timeline.at(130.0)
    lost = NodeView("node-1", lost_because="is gone", renewed_at=renewed_at)
    there, gone = holders(0)
    silent = replace(gone, reachable=Reachable.NO, unreachable_since=130.0, answered_at=answered_at)
    timeline.at(140.0, nodes={"node-1": lost}, sidecars=(there, silent))
    timeline.at(140.5)
    record = timeline.observed.job.status.last_recovery
    assert record.reason == Reason.NODE_LOST
    assert record.phase_seconds.get("detect") == expected


@pytest.mark.fault("The kubelet's clock is ahead or behind")
@pytest.mark.parametrize(
    ("stamp_age", "expected"),
    [
        pytest.param(3.0, 3.0, id="the kubelet's stamp"),
        pytest.param(-60.0, 0.0, id="a kubelet whose clock is ahead"),
        pytest.param(3600.0, 10.0, id="a kubelet whose clock is behind"),
    ],
)
def test_a_failed_pod_counts_from_its_end_within_what_is_possible(
    stamp_age: float, expected: float
) -> None:
    timeline = trained()
    timeline.at(129.0)
    moment = now(130.0)
    failed = replace(
        PODS[1],
        phase=PodPhase.FAILED,
        reason="Error",
        trainer_exit_code=1,
        trainer_finished_at=moment.utc - timedelta(seconds=stamp_age),
    )
    timeline.at(130.0, pods=(PODS[0], failed))
    record = timeline.observed.job.status.last_recovery
    assert record.phase_seconds.get("detect") == expected


@pytest.mark.fault("A deleted pod trains through its grace period")
def test_a_deleted_pod_counts_from_the_end_of_training_not_of_its_grace() -> None:
    """The gang may save and stop first. Training during that time does not count as an outage."""
    timeline = trained()
    leaving = (PODS[0], replace(PODS[1], terminating=True, grace_seconds=5.0))
    timeline.at(125.0, pods=leaving)
    timeline.at(131.0, coordinator=state(0, 14))
    timeline.at(141.0)
    record = timeline.observed.job.status.last_recovery
    assert record.reason == Reason.POD_LOST
    assert record.phase_seconds["detect"] == 10.0


@pytest.mark.fault("Ranks fail long before the lease of their peer's node has stopped")
def test_the_wait_for_a_sidecar_that_does_not_answer_is_part_of_the_detection() -> None:
    """Ranks fail when the machine of their peer dies, long before its lease has stopped."""
    timeline = trained()
    timeline.at(121.0)
    there, gone = (replace(s, answered_at=121.0) for s in holders(0))
    timeline.at(122.0, sidecars=(there, gone), coordinator=state(0, 12, dead=(DEAD,)))
    answered = replace(there, answered_at=122.5)
    dead = replace(gone, reachable=Reachable.NO, unreachable_since=124.0)
    timeline.at(125.0, sidecars=(answered, dead))
    assert timeline.observed.job.status.restart_round == 0
    timeline.at(
        140.0, nodes={"node-1": NodeView("node-1", lost_because="is gone", renewed_at=119.0)}
    )
    record = timeline.observed.job.status.last_recovery
    assert (record.reason, record.workers, record.nodes) == (Reason.NODE_LOST, (1,), ("node-1",))
    assert record.phases() == {"detect": 19.0, "back_off": 0.0}


@pytest.mark.fault("A back-off falls into another phase of a recovery")
def test_back_off_is_a_separate_phase() -> None:
    """A gang that fails repeatedly from the same step waits before the next round."""
    timeline = trained()
    timeline.observed = replace(
        timeline.observed,
        job=changed(timeline.observed.job, spec=job(2).spec),
        coordinator=state(0, 12, last_local=None),
    )
    base = 121.0
    for round_ in range(4):
        dead = state(round_, 12, dead=(DEAD,), last_local=None)
        timeline.at(base, coordinator=dead)
        timeline.at(base + 70.0)
        timeline.at(base + 71.0, coordinator=None, sidecars=holders(round_ + 1))
        running = state(round_ + 1, 12, last_local=None, **TIMES)
        record = timeline.at(base + 80.0, coordinator=running).last_recovery
        assert_adds_up(record)
        base += 100.0
    assert record.phase_seconds["back_off"] == 70.0


@pytest.mark.fault("The operator restarts in the middle of a recovery")
def test_an_operator_that_restarts_in_between_knows_the_total_and_no_more_than_it_saw() -> None:
    timeline = trained()
    timeline.at(121.0)
    timeline.at(121.5, coordinator=state(0, 12, dead=(DEAD,)))
    timeline.restart_operator()
    record = restarted(timeline, 121.5).last_recovery
    assert record.phases() == {
        "detect": 0.5,
        "back_off": 0.0,
        "rehydrate": 0.5,
        "rendezvous": 0.7,
        "first_step": 0.25,
    }
    assert record.total_seconds == 5.5


@pytest.mark.fault("A suspension interrupts a recovery, and the job resumes")
def test_a_resume_keeps_the_phases_of_the_recovery_that_the_suspension_interrupted() -> None:
    record = RecoveryStatus(round=RestartRound(1), reason="RankFailed", begun_at=now(100.0).utc)
    suspended = status(
        1,
        (1, 1),
        restore_point=RestorePointStatus(),
        recoveries=(record,),
        conditions=(condition(JobCondition.SUSPENDED, True, "Suspended"),),
    )
    memory = JobMemory(
        round=RestartRound(1),
        round_seen_at=100.0,
        begun={RestartRound(1): 100.0},
        seen={(Seen.SEALED, ""): 104.0, (Seen.CHOSEN, ""): 106.0},
    )
    decision = decide(Observed(job=job(2, suspended), memory=memory), now(200.0))
    assert isinstance(decision.status, BeginRound)
    interrupted, resumed = decision.status.status.recoveries
    assert (interrupted.phase_seconds["seal"], interrupted.total_seconds) == (4.0, None)
    assert (resumed.round, resumed.reason) == (2, "Resumed")


def test_the_pass_that_begins_the_first_round_remembers_when() -> None:
    accepted = decide(Observed(job=job(2)), now(100.0))
    assert isinstance(accepted.status, BeginRound)
    assert accepted.memory.begun == {RestartRound(0): 100.0}
    assert accepted.memory.levels_written_at == 100.0


@pytest.mark.fault("A gang finishes before it was seen to run")
def test_a_gang_that_finishes_before_it_was_seen_to_run_closes_its_recovery() -> None:
    """At the end of a job, the pass that sees the end may be the first that sees the new round."""
    timeline = trained()
    timeline.at(121.0)
    timeline.at(121.5, coordinator=state(0, 12, dead=(DEAD,)))
    timeline.at(123.5, sidecars=holders(1), coordinator=None)
    ended = timeline.at(160.0, coordinator=state(1, 40, finished=True, **TIMES))
    assert ended.is_true(JobCondition.COMPLETE)
    assert ended.step == 40
    record = assert_adds_up(ended.last_recovery)
    assert record.total_seconds == 0.5 + 2.0 + 1.2 + 0.25
    assert ended.goodput.recovery_seconds + ended.goodput.training_seconds == pytest.approx(60.0)
    assert ended.goodput.training_seconds == pytest.approx(160.0 - 123.5 - 1.45 + 11.5, abs=0.01)


@pytest.mark.fault("A job of 20 seconds ends with an old step and without goodput")
def test_the_status_of_a_job_of_twenty_seconds_is_final() -> None:
    """Levels are written every ten seconds at most, but the last write always contains them."""
    timeline = Timeline(Observed(job=job(2)))
    timeline.at(100.0)
    timeline.at(101.0, pods=PODS, sidecars=holders(0))
    timeline.at(103.0, coordinator=state(0, 1))
    timeline.at(104.0, coordinator=state(0, 20))
    done = RestorePoint(Step(320), RestartRound(0), Digest("b3:last"))
    ended = timeline.at(120.0, coordinator=state(0, 320, finished=True, last_local=done))
    assert ended.is_true(JobCondition.COMPLETE)
    assert (ended.step, ended.last_committed_step, ended.phase) == (320, 320, "Succeeded")
    assert ended.goodput.training_seconds == pytest.approx(17.0)
    assert ended.goodput.ratio == pytest.approx(17.0 / 20.0)


SECONDS = st.floats(0.0, 1e4, allow_nan=False)
MAYBE = st.none() | SECONDS


@pytest.mark.fault("Phases of a recovery overlap or leave time out")
@given(
    before=st.tuples(MAYBE, SECONDS),
    marks=st.tuples(SECONDS, MAYBE, MAYBE, MAYBE),
    times=st.tuples(MAYBE, MAYBE, MAYBE),
    end=SECONDS,
    finished=st.booleans(),
    here=st.booleans(),
)
def test_the_phases_add_up_for_all_measurements(
    before: tuple[float | None, float],
    marks: tuple[float, float | None, float | None, float | None],
    times: tuple[float | None, float | None, float | None],
    end: float,
    finished: bool,
    here: bool,
) -> None:
    """This also holds if the coordinator reports longer durations than the operator measured."""
    begin, *after = marks
    sealed, scheduled, chosen = (None if m is None else begin + m for m in after)
    known_at = {Seen.SEALED: sealed, Seen.SCHEDULED: scheduled, Seen.CHOSEN: chosen}
    moment = Now(begin + end + max(m or 0.0 for m in after), now(begin + end).utc)
    memory = JobMemory(
        round=RestartRound(1),
        begun={RestartRound(1): begin} if here else {},
        seen={(state, ""): at for state, at in known_at.items() if at is not None},
    )
    begun = RecoveryStatus(
        round=RestartRound(1),
        reason="RankFailed",
        begun_at=now(begin).utc,
    ).with_phases(detect=before[0], back_off=before[1])
    found = state(1, 11, finished=finished, **dict(zip(TIMES, times, strict=True)))
    world = World(Observed(job=job(2, status(1)), memory=memory), moment)
    record = recovery.closed(begun, found, world)
    assert record.total_seconds is not None
    assert all(seconds >= 0.0 for seconds in record.phases().values())
    known = sum(record.phases().values())
    if here:
        assert record.total_seconds == pytest.approx(known, abs=0.01)
        longest = moment.monotonic - begin + sum(b or 0.0 for b in before)
        assert record.total_seconds <= longest + 0.01
    else:
        assert record.total_seconds >= known - 0.01


@pytest.mark.fault("A fault is dated after it was seen")
@given(
    seen=SECONDS,
    signs=st.tuples(MAYBE, MAYBE, MAYBE, MAYBE),
    reason=st.sampled_from([Reason.NODE_LOST, Reason.RANK_FAILED, Reason.POD_LOST]),
)
def test_the_time_of_a_failure_is_never_after_its_detection(
    seen: float,
    signs: tuple[float | None, float | None, float | None, float | None],
    reason: Reason,
) -> None:
    progress_at, sound_at, renewed_at, answered_at = signs
    progress = None if progress_at is None else (7, progress_at)
    memory = JobMemory(failure_seen_at=seen, progress=progress, sound_at=sound_at)
    observed = Observed(
        job=job(2, status(0)),
        pods=PODS,
        sidecars=(replace(sidecar(PODS[1], 0), answered_at=answered_at),),
        nodes={"node-1": NodeView("node-1", renewed_at=renewed_at)},
    )
    failure = Failure(reason, "lost", Worker(1))
    fault = recovery.fault_at(world_of(observed, memory, at=seen), (failure,))
    assert fault is None or fault <= seen
    if progress_at is not None:
        assert fault >= min(progress_at, seen)
