"""Commits, Checkpoint objects, requests, retention and deletes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.support.operator.builders import (
    UID,
    checkpoint,
    manifest_digest,
    now,
    request,
)
from tests.support.operator.decisions import of_kind, status_of, step_of
from tests.support.operator.persisting import persisted, point, world
from tests.support.operator.progress import progress_of

from holdfast_core.api import (
    Checkpoint,
    PersistedStep,
    changed,
)
from holdfast_core.ids import JobUid, Rank, RestartRound, Step, TierName, Worker
from holdfast_core.messages.schema import (
    DeadRank,
    Failure,
    RestorePoint,
)
from holdfast_operator.decide.checkpoints import PRUNE_TURN_SECONDS, WRITES_PER_PASS
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.report.status import LEVELS_EVERY_SECONDS
from holdfast_operator.model.actions import (
    Action,
    CommitPersisted,
    Decision,
    EmitEvent,
    WriteStatus,
)
from holdfast_operator.model.job import JobMemory


def only(decision: Decision, kind: type | str) -> list[Any]:
    return of_kind(decision.actions, kind)


# --------------------------------------------------------------------------- the commit


@pytest.mark.parametrize(
    ("committed", "reported", "objects", "expected"),
    [
        pytest.param(None, point(40), (), 40, id="the first"),
        pytest.param(persisted(40), point(50), (checkpoint(40, 2),), 50, id="the next"),
        pytest.param(persisted(40), point(50), (), None, id="not before the last has its object"),
        pytest.param(persisted(40), point(40), (checkpoint(40, 2),), None, id="known already"),
        pytest.param(persisted(40), point(30, 1), (checkpoint(40, 2),), None, id="older"),
        pytest.param(None, point(35, 1), (), None, id="off the lineage"),
        pytest.param(None, point(30, 1), (), 30, id="uploaded across a restart"),
        pytest.param(
            None,
            replace(point(40), job_uid=JobUid("other")),
            (),
            None,
            id="of another job's lineage",
        ),
    ],
)
def test_commit(
    committed: PersistedStep | None,
    reported: RestorePoint,
    objects: tuple[Checkpoint, ...],
    expected: int | None,
) -> None:
    decision = decide(world(committed=committed, reported=reported, checkpoints=objects), now())
    commits = only(decision, CommitPersisted)
    assert [c.status.last_persisted.step for c in commits] == (
        [] if expected is None else [expected]
    )
    assert len(only(decision, CommitPersisted)) + len(only(decision, WriteStatus)) <= 1


def test_a_state_of_an_older_round_commits_nothing() -> None:
    decision = decide(world(reported=point(40), coordinator={"round": RestartRound(1)}), now())
    assert not only(decision, CommitPersisted)


@pytest.mark.fault(
    "The operator dies between the Checkpoint object and the acknowledgement of a commit"
)
def test_finish_is_released_only_up_to_what_is_durable() -> None:
    assert decide(world(reported=point(40)), now()).acted_version is None
    done = world(committed=persisted(40), reported=point(40), checkpoints=(checkpoint(40, 2),))
    assert decide(done, now()).acted_version == 7


@pytest.mark.fault("The operator dies between the write of the status and the Checkpoint object")
def test_the_object_is_a_projection_of_the_commit() -> None:
    decision = decide(world(committed=persisted(40), reported=point(40)), now())
    (create,) = only(decision, "create Checkpoint")
    assert create.name == "job-l2msg4-s40-r2"
    written = status_of(create)
    assert (written.phase, written.manifest) == ("Committed", manifest_digest(40, 2))
    assert (written.bytes, written.world_size, written.job_uid) == (1234, 2, UID)
    assert (step_of(create), written.round, written.job_namespace) == (40, 2, "team-a")
    held = {c.type for c in written.conditions if c.is_true}
    assert held == {"Committed", "Replicated", "Persisted", "Restorable"}


# --------------------------------------------------------------------------- requests


ASKED = "before-lunch after 44"
"""Token of the request for a save after the step that the gang has finished."""


def test_a_request_is_asked_once_and_becomes_the_record() -> None:
    first = decide(world(checkpoints=(request(),)), now())
    (ask,) = only(first, "call /v1/save-now")
    assert (ask.message.token, ask.message.round, ask.worker) == (ASKED, 2, 0)
    (update,) = only(first, "change Checkpoint")
    assert status_of(update).phase == "InProgress"

    waiting = request(phase="InProgress")
    second = decide(world(checkpoints=(waiting,), memory=first.memory), now(1001.0))
    assert not only(second, "call /v1/save-now")

    older = decide(
        world(
            committed=persisted(40),
            checkpoints=(waiting, checkpoint(40, 2)),
            memory=second.memory,
        ),
        now(1002.0),
    )
    assert not only(older, "change Checkpoint"), "saved before it was asked for"

    done = decide(
        world(committed=persisted(45), checkpoints=(waiting,), memory=older.memory), now(1003.0)
    )
    (record,) = only(done, "change Checkpoint")
    assert status_of(record).phase == "Committed"
    assert (step_of(record), status_of(record).round) == (45, 2)
    assert not only(done, "create Checkpoint"), "the request is the object of this commit"


def test_a_request_is_asked_again_by_a_new_operator_and_in_a_new_round() -> None:
    waiting = request(phase="InProgress")
    (again,) = only(decide(world(checkpoints=(waiting,)), now()), "call /v1/save-now")
    first = only(decide(world(checkpoints=(request(),)), now()), "call /v1/save-now")[0].message
    assert again.message.token == first.token, "no step was finished meanwhile"


@pytest.mark.fault("The operator is restarted while a save that was requested is uploaded")
def test_a_new_operator_requests_a_save_that_it_can_tell_from_the_one_before() -> None:
    """It does not know which steps are later than the request. The commit of the save that the process before
    has requested may not be: the request would wait for the next step that is persisted anyhow."""
    (first,) = only(decide(world(checkpoints=(request(),)), now()), "call /v1/save-now")
    waiting, known = request(phase="InProgress"), {"save_tokens": (first.message.token,)}
    trained = {**known, "progress": progress_of(61, 61)}
    new = decide(world(checkpoints=(waiting,), coordinator=trained), now())
    (again,) = only(new, "call /v1/save-now")
    assert again.message.token not in known["save_tokens"], "the coordinator ignores what it knows"
    done = world(
        committed=persisted(62), reported=point(62), checkpoints=(waiting,), memory=new.memory
    )
    (record,) = only(decide(done, now(1003.0)), "change Checkpoint")
    assert (status_of(record).phase, step_of(record)) == ("Committed", 62)


@pytest.mark.fault("The coordinator restarts between a request to save and its commit")
def test_a_coordinator_that_does_not_know_a_request_gets_it_again() -> None:
    def later(version: int, **state: Any) -> Decision:
        found = {"version": version, **state}
        given = world(checkpoints=(waiting,), memory=last.memory, coordinator=found)
        return decide(given, now(1001.0))

    waiting = request(phase="InProgress")
    last = decide(world(checkpoints=(request(),), coordinator={"version": 7}), now())
    last = later(7)
    assert not only(last, "call /v1/save-now"), "the state is older than the request"
    last = later(8, save_tokens=(ASKED,))
    assert not only(last, "call /v1/save-now")
    last = later(1)
    (again,) = only(last, "call /v1/save-now")
    assert again.message.token == ASKED
    last = later(1)
    assert not only(last, "call /v1/save-now")
    last = later(2, save_tokens=(ASKED,))
    assert not only(last, "call /v1/save-now")
    done = world(committed=persisted(45), checkpoints=(waiting,), memory=last.memory)
    (record,) = only(decide(done, now(1003.0)), "change Checkpoint")
    assert (status_of(record).phase, step_of(record)) == ("Committed", 45)


@pytest.mark.fault("The record of a save request is interrupted between its two writes")
@pytest.mark.parametrize("store", ["main", None])
def test_a_record_that_was_interrupted_is_completed(store: str | None) -> None:
    """The operator ended after it had written spec.step and before it had written the status."""
    waiting = request(phase="InProgress")
    half = changed(waiting, spec=changed(waiting.spec, step=Step(45)))
    stored = (
        {"committed": persisted(45)} if store else {"coordinator": {"last_replicated": point(45)}}
    )
    decision = decide(world(checkpoints=(half,), store=store, **stored), now())
    (update,) = only(decision, "change Checkpoint")
    assert (update.name, step_of(update), status_of(update).round) == (half.name, 45, 2)
    assert status_of(update).phase == "Committed"
    assert not only(decision, "create Checkpoint"), "the request is the object of this commit"


def test_an_interrupted_record_waits_for_its_own_step() -> None:
    waiting = request(phase="InProgress")
    half = changed(waiting, spec=changed(waiting.spec, step=Step(45)))
    decision = decide(world(checkpoints=(half,), committed=persisted(60)), now())
    assert not only(decision, "change Checkpoint")
    assert not only(decision, "call /v1/save-now")


def test_without_a_store_a_request_is_recorded_when_it_is_replicated() -> None:
    first = decide(world(checkpoints=(request(),), store=None), now())
    (ask,) = only(first, "call /v1/save-now")
    assert ask.message.token == ASKED
    done = decide(
        world(
            checkpoints=(request(phase="InProgress"),),
            store=None,
            memory=first.memory,
            coordinator={"last_replicated": point(45)},
        ),
        now(),
    )
    (record,) = only(done, "change Checkpoint")
    assert (step_of(record), status_of(record).round) == (45, 2)
    assert not status_of(record).is_true("Persisted")


def test_the_record_has_the_metric_of_keep_best_and_some_others() -> None:
    reported = {f"m{n:02}": float(n) for n in range(40)}
    given = world(
        committed=persisted(40),
        reported=point(40),
        coordinator={"last_persisted_metrics": reported},
        retention={"keep_best": {"metric": "m30", "mode": "max"}},
    )
    (record,) = only(decide(given, now()), "create Checkpoint")
    assert status_of(record).metrics == {
        **{f"m{n:02}": float(n) for n in range(15)},
        "m30": 30.0,
    }


# --------------------------------------------------------------------------- retention


def names(actions: list[Action]) -> list[str]:
    return [a.name for a in of_kind(actions, "change Checkpoint", "prune Checkpoint")]


FOUR = tuple(checkpoint(step, 2) for step in (40, 50, 60, 70))


def test_retention_marks_first_and_prunes_in_a_later_pass() -> None:
    sized = (checkpoint(40, 2, bytes=6_700_000), *FOUR[1:])
    marked = decide(world(committed=persisted(70), checkpoints=sized), now())
    updates = only(marked, "change Checkpoint")
    assert [(u.name, status_of(u).phase) for u in updates] == [("job-l2msg4-s40-r2", "Deleting")]
    assert not only(marked, "prune Checkpoint")
    (condition,) = (c for c in status_of(updates[0]).conditions if c.type == "Committed")
    assert condition.message == "pruned by spec.checkpoint.retention: no rule keeps it"
    (event,) = (e for e in only(marked, EmitEvent) if e.reason == "Pruning")
    assert event.message == (
        "pruning checkpoints in the object store: s40-r2 (size 6.4 MiB): no rule keeps it"
    )
    doomed = (checkpoint(40, 2, phase="Deleting"), *FOUR[1:])
    (prune,) = only(
        decide(world(committed=persisted(70), checkpoints=doomed), now()), "prune Checkpoint"
    )
    assert (prune.name, prune.uid) == ("job-l2msg4-s40-r2", "ckpt-40-2")
    assert [c.step for c in prune.data.message.checkpoints] == [40]


@pytest.mark.fault(
    "Steps that were trained again after a rollback are pinned as an earlier round saved them"
)
def test_steps_that_sidecars_protect_hold_up_no_other_prune() -> None:
    """The sidecars protect steps, not rounds, and refuse to delete any checkpoint of such a step."""
    steps = (1, 2, 3, 4)
    pinned = tuple(checkpoint(step, 0, pin=True) for step in steps)
    again = tuple(checkpoint(step, 1, phase="Deleting") for step in steps)
    others = (checkpoint(30, 0), checkpoint(40, 2, phase="Deleting"), *FOUR[1:])
    given = world(committed=persisted(70), checkpoints=(*pinned, *again, *others))
    assert names(list(decide(given, now()).actions)) == ["job-l2msg4-s40-r2"]


@pytest.mark.fault("The store refuses for ever to delete some checkpoints of a job")
@pytest.mark.parametrize(
    "doomed",
    [
        {"phase": "Deleting"},
        {"deleting": True, "has_finalizer": True, "deletion_policy": "DeleteData"},
    ],
    ids=["by retention", "by a user"],
)
def test_prunes_that_fail_hold_up_no_other_for_ever(doomed: dict[str, Any]) -> None:
    """A number of them is ordered at a time, and each of them is repeated until it is carried out."""
    steps = [step for step in range(1, WRITES_PER_PASS + 2) if step != 30]  # restored by the round
    refused = [checkpoint(step, 2, **doomed) for step in steps]
    objects = (*refused, checkpoint(40, 2, **doomed), *FOUR[1:])
    given = world(committed=persisted(70), checkpoints=objects)
    first = pruned(decision := decide(given, now()))
    assert first == [c.name for c in refused]
    given = replace(given, memory=decision.memory)
    decision = decide(given, now(1000.0 + PRUNE_TURN_SECONDS - 1))
    assert pruned(decision) == first
    given = replace(given, memory=decision.memory)
    decision = decide(given, now(1000.0 + PRUNE_TURN_SECONDS))
    assert pruned(decision) == ["job-l2msg4-s40-r2", *first[:-1]]
    given = replace(given, memory=decision.memory)
    decision = decide(given, now(1000.0 + 2 * PRUNE_TURN_SECONDS))
    assert first[-1] in pruned(decision)


def pruned(decision: Decision) -> list[str]:
    return [action.name for action in only(decision, "prune Checkpoint")]


def test_what_a_clone_has_chosen_meanwhile_is_not_deleted() -> None:
    doomed = (checkpoint(40, 2, phase="Deleting"), *FOUR[1:])
    cloned = frozenset({doomed[0].name})
    given = world(committed=persisted(70), checkpoints=doomed, cloned=cloned)
    assert names(list(decide(given, now()).actions)) == []


def test_a_clock_that_jumps_ahead_ends_no_keep_for() -> None:
    stamped = tuple(checkpoint(step, 2, committed_at=now().utc) for step in (40, 50, 60, 70))
    given = world(committed=persisted(70), checkpoints=stamped, retention={"keep_for": "24h"})
    day = timedelta(hours=25)
    jumped = replace(now(), utc=now().utc + day, jumped=day)
    assert names(list(decide(given, jumped).actions)) == []
    later = replace(now(), utc=now().utc + day)
    assert names(list(decide(given, later).actions)) == ["job-l2msg4-s40-r2"]


@pytest.mark.parametrize(
    ("objects", "changes", "pruned"),
    [
        pytest.param(FOUR, {"keep_last": 4}, [], id="few enough"),
        pytest.param(
            FOUR, {"keep_last": 2}, ["job-l2msg4-s40-r2", "job-l2msg4-s50-r2"], id="two are kept"
        ),
        pytest.param((checkpoint(40, 2, pin=True), *FOUR[1:]), {}, [], id="pinned"),
        pytest.param(FOUR, {"cloned": frozenset({"job-l2msg4-s40-r2"})}, [], id="cloned"),
        pytest.param(FOUR, {"retention": {"hourly": 4}}, ["job-l2msg4-s40-r2"], id="one hour"),
        pytest.param(FOUR, {"retention": {"keep_every": {"steps": 40}}}, [], id="each 40 steps"),
        pytest.param(
            (checkpoint(40, 2, metrics={"loss": 0.1}), *FOUR[1:]),
            {"retention": {"keep_best": {"metric": "loss", "mode": "min"}}},
            [],
            id="the best",
        ),
        pytest.param((checkpoint(30, 1), *FOUR[1:]), {}, [], id="the restore point"),
        pytest.param(
            (checkpoint(35, 1), *FOUR[1:]), {}, ["job-l2msg4-s35-r1"], id="off the lineage"
        ),
        pytest.param(
            FOUR, {"coordinator": {"last_replicated": None}}, [], id="before the first replicated"
        ),
        pytest.param(
            FOUR,
            {"coordinator": {"last_replicated": point(30, 1)}},
            [],
            id="replicated in an older round",
        ),
        pytest.param(
            (checkpoint(40, 2, job_uid="former"), *FOUR[1:]), {}, [], id="of a former job"
        ),
    ],
)
def test_retention(
    objects: tuple[Checkpoint, ...], changes: dict[str, Any], pruned: list[str]
) -> None:
    decision = decide(world(committed=persisted(70), checkpoints=objects, **changes), now())
    assert names(list(decision.actions)) == pruned


# --------------------------------------------------------------------------- deletes


def going(**changes: Any) -> Checkpoint:
    """Return a Checkpoint with deletionPolicy DeleteData that a user has deleted."""
    given = {"deleting": True, "has_finalizer": True, "deletion_policy": "DeleteData", **changes}
    return checkpoint(40, 2, **given)


@pytest.mark.parametrize(
    ("view", "committed", "pruned", "released"),
    [
        pytest.param(going(), 70, True, False, id="data first"),
        pytest.param(going(), 40, False, False, id="not the newest commit"),
        pytest.param(going(deletion_policy="Retain"), 70, False, True, id="retained after all"),
        pytest.param(going(pin=True), 70, False, True, id="pinned: the data stays"),
        pytest.param(going(has_finalizer=False), 70, False, False, id="not ours to do"),
    ],
)
def test_deletes_by_people(view: Checkpoint, committed: int, pruned: bool, released: bool) -> None:
    objects = (view, checkpoint(70, 2)) if committed == 70 else (view,)
    decision = decide(world(committed=persisted(committed), checkpoints=objects), now())
    assert bool(only(decision, "prune Checkpoint")) is pruned
    assert bool(only(decision, "delete Checkpoint")) is released


@pytest.mark.parametrize(
    ("committed", "cloned", "why"),
    [
        (40, frozenset[str](), "the newest one in the object store"),
        (70, frozenset({"job-l2msg4-s40-r2"}), "another job starts from it"),
        (70, frozenset[str](), "when its data is deleted"),
    ],
)
def test_a_checkpoint_that_a_user_has_deleted_says_why_it_is_still_there(
    committed: int, cloned: frozenset[str], why: str
) -> None:
    """`kubectl delete` waits for up to ten minutes."""
    objects = (going(phase="Deleting"), checkpoint(70, 2))[: 1 if committed == 40 else 2]
    given = world(committed=persisted(committed), checkpoints=objects, cloned=cloned)
    written = [d for d in decide(given, now()).objects if d.name == objects[0].name]
    (said,) = [
        condition
        for condition in written[0].body["status"]["conditions"]
        if condition["type"] == "Restorable"
    ]
    assert said["status"] == "False"
    assert why in said["message"]


# --------------------------------------------------------------------------- status


def test_levels_are_written_at_most_every_10_seconds() -> None:
    first = decide(world(), now())
    (write,) = only(first, WriteStatus)
    assert (write.status.step, write.status.last_replicated_step) == (43, 40)
    assert write.status.is_true("Running")
    later = world(memory=first.memory)
    later = replace(later, job=changed(later.job, status=write.status))
    assert later.coordinator is not None
    moved = replace(later, coordinator=replace(later.coordinator, progress=progress_of(60)))
    assert not only(decide(moved, now(1005.0)), WriteStatus)
    (second,) = only(decide(moved, now(1000.0 + LEVELS_EVERY_SECONDS)), WriteStatus)
    assert second.status.step == 60


def test_ready_workers_are_written_like_levels() -> None:
    """Otherwise each lost pod costs a write of the status before the one that begins the round."""
    first = decide(world(), now())
    (write,) = only(first, WriteStatus)
    later = world(memory=first.memory)
    later = replace(later, job=changed(later.job, status=write.status))
    one, *others = later.pods
    later = replace(later, pods=(replace(one, ready=False), *others))
    assert not only(decide(later, now(1005.0)), WriteStatus)
    (second,) = only(decide(later, now(1000.0 + LEVELS_EVERY_SECONDS)), WriteStatus)
    assert str(second.status.ready_workers).startswith(f"{len(others)}/")


def test_with_many_jobs_levels_are_written_less_often() -> None:
    first = decide(world(), now())
    (write,) = only(first, WriteStatus)
    later = replace(world(memory=first.memory), routine_seconds=40.0)
    later = replace(later, job=changed(later.job, status=write.status))
    assert later.coordinator is not None
    moved = replace(later, coordinator=replace(later.coordinator, progress=progress_of(60)))
    assert not only(decide(moved, now(1039.0)), WriteStatus)
    assert only(decide(moved, now(1040.0)), WriteStatus)


def test_a_new_process_waits_with_the_routine_write_of_a_job_that_trains() -> None:
    started = JobMemory(round=RestartRound(2), round_seen_at=1000.0, counted_at=1000.0)
    first = decide(world(memory=started), now())
    (write,) = only(first, WriteStatus)
    status = changed(write.status, step=Step(1))  # written by the process before
    given = replace(world(memory=started), routine_seconds=40.0)
    given = replace(given, job=changed(given.job, status=status))
    assert not only(decide(given, now(1039.0)), WriteStatus)
    (write,) = only(decide(given, now(1040.0)), WriteStatus)
    assert write.status.step == 43
    counted = write.status.goodput.training_seconds - status.goodput.training_seconds
    assert counted == 40.0, "the time since the start counts"


def test_a_changed_truth_is_written_at_once() -> None:
    first = decide(world(), now())
    (write,) = only(first, WriteStatus)
    broken = world(
        memory=first.memory,
        coordinator={
            "failures": (Failure(Step(50), TierName.OBJECT, "AccessDenied", "403 from the store"),)
        },
    )
    broken = replace(broken, job=changed(broken.job, status=write.status))
    (second,) = only(decide(broken, now(1001.0)), WriteStatus)
    healthy = second.status.condition("RemoteTierHealthy")
    assert (healthy.status, healthy.reason) == ("False", "AccessDenied")


def test_time_goes_to_training_and_recovery() -> None:
    first = decide(world(), now())
    (write,) = only(first, WriteStatus)
    later = world(memory=first.memory)
    later = replace(later, job=changed(later.job, status=write.status))
    (second,) = only(decide(later, now(1020.0)), WriteStatus)
    assert second.status.goodput.training_seconds == 20.0
    assert second.status.goodput.recovery_seconds == 0.0
    assert second.status.goodput.ratio == 1.0


@pytest.mark.fault("A step becomes persisted while failed ranks are handled")
def test_a_commit_is_recorded_before_the_round_that_follows_a_failure() -> None:
    """The coordinator of the next round has no record of what this coordinator uploaded."""
    dead = (DeadRank(Rank(0), Worker(0), 1, "boom"),)
    observed = world(reported=point(40), coordinator={"dead": dead, "running": False})
    (commit,) = only(decide(observed, now()), CommitPersisted)
    assert commit.status.last_persisted.step == 40
    observed = world(
        committed=persisted(40),
        reported=point(40),
        checkpoints=(checkpoint(40, 2),),
        coordinator={"dead": dead, "running": False},
    )
    assert only(decide(observed, now(1000.0)), CommitPersisted) == []
