"""A checkpoint that ends every script that restores it is rejected and reported, and an older one is used."""

from __future__ import annotations

from tests.support.operator.life import Life

from holdfast_core.api import TrainingJob, merge_patch
from holdfast_core.ids import CheckpointId, Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import DeadRank
from holdfast_operator.model.reasons import Reason


def poisoned(life: Life) -> CheckpointId:
    """Make the newest commit end every script that restores it, and let a rank die. Return the commit."""
    newest = life.cluster.newest_commit()
    assert newest is not None
    life.cluster.gang.poisoned.add(newest)
    life.rank_dies()
    return newest


def test_the_next_older_one_is_taken_after_three_failures() -> None:
    life = Life()
    life.run(40)
    bad = poisoned(life)
    life.run(60)
    assert life.status.is_true("Running")
    choices = [c.status["restorePoint"]["step"] for c in life.cluster.choices[1:]]
    assert choices == [bad.step, bad.step, bad.step, bad.step - 5]
    rejections = [e for e in life.operator.events if e.reason == Reason.RESTORE_POINT_REJECTED]
    assert len(rejections) == 1
    assert f"gives up 5 steps: ranks that restored step {bad.step}" in rejections[0].message
    assert life.status.last_recovery is not None
    assert life.status.last_recovery.lost_steps is not None
    assert life.status.last_recovery.lost_steps >= 5


def test_an_operator_that_restarts_counts_the_same() -> None:
    life = Life()
    life.run(40)
    bad = poisoned(life)
    for _ in range(12):
        life.run(10)
        life.restart()
    choices = [c.status["restorePoint"]["step"] for c in life.cluster.choices[1:]]
    assert choices[:4] == [bad.step, bad.step, bad.step, bad.step - 5]


def test_the_only_restore_point_is_tried_until_the_budget_ends() -> None:
    life = Life()
    life.run(30, until=lambda s: s.last_committed_step == 5)
    life.cluster.job["spec"]["failurePolicy"]["maxRestarts"] = 5
    life.cluster.touch_job()
    bad = poisoned(life)
    life.run(120)
    assert life.status.is_true("Failed")
    steps = {c.status["restorePoint"].get("step") for c in life.cluster.choices[1:]}
    assert steps == {bad.step}, "never from nothing"


def test_a_failure_after_progress_is_not_the_restore_points_fault() -> None:
    life = Life()
    life.run(40)
    for _ in range(8):
        life.rank_dies()
        life.run(25, until=lambda s: s.is_true("Running"))
        life.run(2)
    assert not [e for e in life.operator.events if e.reason == Reason.RESTORE_POINT_REJECTED]


def test_ranks_that_are_killed_from_outside_do_not_count_against_the_restore_point() -> None:
    life = Life()
    life.run(40)
    life.rank_dies()
    for _ in range(6):
        life.run(60, until=lambda s: s.restore_point is not None and not s.is_true("Running"))
        run = life.cluster.gang.run
        assert run is not None
        run.dead = (DeadRank(Rank(0), Worker(0), -9),)
        run.version += 1
        life.run(1)
    assert not [e for e in life.operator.events if e.reason == Reason.RESTORE_POINT_REJECTED]


def test_uploads_after_it_are_recorded_although_their_steps_are_lower() -> None:
    """The rejected commit is not part of the lineage and hides no later commit."""
    life = Life(store=True, every=5)
    life.run(30, until=lambda s: s.last_persisted is not None and s.last_persisted.step >= 25)
    life.run(3)
    bad = poisoned(life)
    before = life.status.last_persisted
    assert before is not None
    gang = life.cluster.gang
    gang.poisoned |= {i for i in gang.manifests_made if i.step >= before.step - 5}
    life.run(400, until=lambda s: s.last_persisted is not None and s.last_persisted.round > 1)
    after = life.status.last_persisted
    assert after is not None
    assert after.round > bad.round
    assert after.step < before.step
    for pod in list(life.cluster.pods):
        life.cluster.lose_pod(pod)
    life.run(60)
    assert life.status.restore_point is not None
    assert life.status.restore_point.step is not None
    assert life.status.restore_point.step >= after.step


def test_the_record_is_kept_in_the_status() -> None:
    life = Life()
    life.run(40)
    bad = poisoned(life)
    life.run(60, until=lambda s: any(r.failed_from == bad for r in s.recent_restarts))
    read = TrainingJob.from_dict({**life.cluster.job, "status": merge_patch(life.status)}).status
    assert read.recent_restarts == life.status.recent_restarts
    assert CheckpointId(Step(bad.step), RestartRound(bad.round)) in {
        r.failed_from for r in read.recent_restarts
    }
