"""Cost of one pass by the number of objects of each kind that a tenant may create.

All jobs share the thread of one event loop. A cost that is quadratic in objects of one tenant would stop the
recoveries of all others. The tests count operations and read no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.support.operations import growth, operations
from tests.support.operator.builders import (
    START,
    checkpoint,
    job,
    manifest_digest,
    now,
    pod,
    request,
    sidecar,
    status,
    store,
)
from tests.support.operator.decisions import does, of_kind, status_of, step_of
from tests.support.operator.progress import progress_of

from holdfast_core.api import (
    Checkpoint,
    JobCondition,
    LineageEntry,
    PersistedStep,
    RestorePointStatus,
    changed,
)
from holdfast_core.errors import UnavailableError
from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Step, Worker
from holdfast_core.messages.schema import CoordinatorState, RestorePoint
from holdfast_operator.apply.apply import ActionFailed, Applied, memory_after
from holdfast_operator.decide.decide import decide
from holdfast_operator.model.job import JobMemory, Observed

NUMBER = 48
"""Objects of the smallest of the three passes. A pass writes 32: fewer would show that limit."""
LINEAR = 2.5
"""Largest growth of a cost that counts as linear. That of a quadratic cost is nearly 4."""
ROUND = RestartRound(2)


def named(item: Checkpoint, number: int) -> Checkpoint:
    """Return the object under a name and uid of its own, created `number` seconds after START."""
    metadata = changed(
        item.metadata,
        name=f"object-{number:05}",
        uid=f"uid-{number}",
        creation_timestamp=START + timedelta(seconds=number),
    )
    return changed(item, metadata=metadata)


def of_former_job(number: int, **changes: Any) -> Checkpoint:
    found = checkpoint(number, 1, job_uid=JobUid("of-a-former-job"), **changes)
    return named(found, number)


CHECKPOINTS: dict[str, Callable[[int], Checkpoint]] = {
    "requests": lambda n: named(request(), n),
    "requests in progress": lambda n: named(request(phase="InProgress"), n),
    "failed requests": lambda n: named(request(phase="Failed"), n),
    "records": lambda n: named(checkpoint(n, 2), n),
    "records of an earlier round": lambda n: named(checkpoint(n, 1), n),
    "records of the same step": lambda n: named(checkpoint(40, 2), n),
    "pinned records": lambda n: named(checkpoint(n, 2, pin=True), n),
    "records that are pruned": lambda n: named(checkpoint(n, 2, phase="Deleting"), n),
    "deleted records": lambda n: named(
        checkpoint(n, 2, deleting=True, has_finalizer=True, deletion_policy="DeleteData"), n
    ),
    "deleted records whose data stays": lambda n: named(
        checkpoint(n, 2, deleting=True, has_finalizer=True), n
    ),
    "records of a former job": of_former_job,
    "deleted records of a former job": lambda n: of_former_job(
        n, deleting=True, has_finalizer=True, deletion_policy="DeleteData"
    ),
}


def training(checkpoints: tuple[Checkpoint, ...], memory: JobMemory | None = None) -> Observed:
    """Return a job that trains in round 2 and has persisted step 40."""
    pods = (pod(0), pod(1))
    point = RestorePoint(Step(40), ROUND, manifest_digest(40, 2))
    return Observed(
        job=job(
            2,
            status(
                2,
                (0, 0),
                restore_point=RestorePointStatus(step=Step(30), round=RestartRound(1)),
                coordinator=Worker(0),
                lineage=(LineageEntry(round=ROUND, base=CheckpointId(Step(30), RestartRound(1))),),
                last_persisted=PersistedStep(
                    step=Step(40), round=ROUND, manifest=manifest_digest(40, 2)
                ),
            ),
            store="main",
            object_every_steps=10,
        ),
        pods=pods,
        sidecars=tuple(sidecar(p, 2, version=1) for p in pods),
        store=store(),
        coordinator=CoordinatorState(
            version=7,
            round=ROUND,
            running=True,
            progress=progress_of(44, 43),
            last_replicated=point,
            last_persisted=point,
        ),
        checkpoints=checkpoints,
        memory=memory or JobMemory(round=ROUND, round_seen_at=0.0),
    )


def choosing(observed: Observed) -> Observed:
    """Return the job in a round that has no restore point yet."""
    fresh = changed(observed.job.status, restore_point=None)
    return replace(observed, job=changed(observed.job, status=fresh), coordinator=None)


def over(observed: Observed) -> Observed:
    ended = observed.job.status.with_condition(
        JobCondition.COMPLETE, True, "Completed", "", now().utc
    )
    ended = changed(ended, completion_time=now().utc)
    return replace(observed, job=changed(observed.job, status=ended))


def deleted(observed: Observed) -> Observed:
    metadata = changed(observed.job.metadata, deletion_timestamp=START)
    return replace(observed, job=changed(observed.job, metadata=metadata))


def without_a_pod(observed: Observed) -> Observed:
    return replace(observed, pods=observed.pods[:1])


PHASES: dict[str, Callable[[Observed], Observed]] = {
    "trains": lambda observed: observed,
    "chooses": choosing,
    "lost a pod": without_a_pod,
    "over": over,
    "deleted": deleted,
}


@pytest.mark.fault("A tenant creates thousands of Checkpoints of one job")
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_pass_is_linear_in_the_checkpoints_of_its_job(kind: str, phase: str) -> None:
    def cost(number: int) -> int:
        found = tuple(CHECKPOINTS[kind](n) for n in range(number))
        observed = PHASES[phase](training(found))
        memory = decide(observed, now()).memory  # a later pass knows them from the first one
        return operations(lambda: decide(replace(observed, memory=memory), now(1001.0)))

    assert growth(cost, NUMBER) < LINEAR


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "births", [pytest.param(1, id="of an old round"), pytest.param(50, id="of a forged round")]
)
def test_a_pass_is_linear_in_the_pods_of_its_job(births: int, phase: str) -> None:
    def cost(number: int) -> int:
        observed = training(())
        others = tuple(pod(n, births) for n in range(2, number + 2))
        observed = PHASES[phase](replace(observed, pods=(*observed.pods, *others)))
        memory = decide(observed, now()).memory
        return operations(lambda: decide(replace(observed, memory=memory), now(1001.0)))

    assert growth(cost, NUMBER) < LINEAR


# --------------------------------------------------------------------------- open requests


def requests(number: int) -> tuple[Checkpoint, ...]:
    return tuple(named(request(), n) for n in range(number))


@pytest.mark.fault("A tenant creates thousands of Checkpoints of one job")
def test_sixteen_requests_are_open_and_the_newer_ones_fail() -> None:
    decision = decide(training(requests(20)), now())
    updates = {a.name: status_of(a) for a in of_kind(decision.actions, "change Checkpoint")}
    phases = {name: update.phase for name, update in updates.items()}
    assert phases == {
        **{f"object-{n:05}": "InProgress" for n in range(16)},
        **{f"object-{n:05}": "Failed" for n in range(16, 20)},
    }
    refused = updates["object-00016"].condition("Committed")
    assert refused is not None and refused.reason == "TooManyRequests"
    assert "16" in refused.message


def test_a_request_that_is_in_progress_stays_open_beside_older_ones() -> None:
    known = named(request(phase="InProgress"), 100)
    decision = decide(training((*requests(16), known)), now())
    failed = [
        a.name
        for a in of_kind(decision.actions, "change Checkpoint")
        if status_of(a).phase == "Failed"
    ]
    assert failed == ["object-00015"]


def test_a_pass_writes_a_limited_number_of_checkpoints() -> None:
    kinds: dict[str, Callable[[int], Checkpoint]] = CHECKPOINTS
    for kind, make in kinds.items():
        for phase, turn in PHASES.items():
            observed = turn(training(tuple(make(n) for n in range(500))))
            actions = decide(observed, now()).actions
            writes = of_kind(actions, "change Checkpoint", "delete Checkpoint")
            assert len(writes) <= 100, (kind, phase)


def test_requests_of_one_moment_share_one_save() -> None:
    first = decide(training(requests(3)), now())
    (ask,) = of_kind(first.actions, "call /v1/save-now")
    waiting = tuple(named(request(phase="InProgress"), n) for n in range(3))
    more = (*waiting, named(request(), 3))
    second = decide(training(more, first.memory), now(1001.0))
    assert not of_kind(second.actions, "call /v1/save-now"), (
        "no step has been finished since the save was requested, so it serves this request as well"
    )
    assert ask.message.token == "object-00002 after 44"

    saved = PersistedStep(step=Step(45), round=ROUND, manifest=manifest_digest(45, 2))
    observed = training(more, second.memory)
    done = replace(
        observed,
        job=changed(observed.job, status=changed(observed.job.status, last_persisted=saved)),
    )
    records = of_kind(decide(done, now(1002.0)).actions, "change Checkpoint")
    assert {(a.name, step_of(a)) for a in records} == {(f"object-{n:05}", 45) for n in range(4)}


@pytest.mark.fault("Two saves are requested before the first request has reached rank 0")
def test_one_save_fulfils_requests_between_which_a_step_was_finished() -> None:
    first = decide(training(requests(1)), now())
    both = (named(request(phase="InProgress"), 0), named(request(), 1))
    observed = training(both, first.memory)
    assert observed.coordinator is not None
    coordinator = replace(observed.coordinator, progress=progress_of(45, 44))
    second = decide(replace(observed, coordinator=coordinator), now(1001.0))
    (ask,) = of_kind(second.actions, "call /v1/save-now")
    assert ask.message.token == "object-00001 after 45", (
        "step 45 was finished before it was requested"
    )

    saved = PersistedStep(step=Step(46), round=ROUND, manifest=manifest_digest(46, 2))
    observed = training(both, second.memory)
    job = changed(observed.job, status=changed(observed.job.status, last_persisted=saved))
    records = of_kind(decide(replace(observed, job=job), now(1002.0)).actions, "change Checkpoint")
    found = {(a.name, step_of(a), status_of(a).phase) for a in records}
    assert found == {(f"object-{n:05}", 46, "Committed") for n in range(2)}


@pytest.mark.parametrize(
    ("failed", "written_again"),
    [pytest.param(True, True, id="it failed"), pytest.param(False, False, id="it succeeded")],
)
def test_a_mark_of_a_request_that_could_not_be_written_is_written_again(
    failed: bool, written_again: bool
) -> None:
    """The watch may deliver the mark late, so the phase alone does not show that the write failed."""
    observed = training(requests(1))
    first = decide(observed, now())
    errors = tuple(
        ActionFailed(a, UnavailableError("the API server is away"))
        for a in first.actions
        if failed and does(a, "change Checkpoint")
    )
    memory = memory_after(first, observed, Applied(failed=errors))
    second = decide(training(requests(1), memory), now(1001.0))
    marks = of_kind(second.actions, "change Checkpoint")
    assert bool(marks) == written_again
    assert not of_kind(second.actions, "call /v1/save-now")
