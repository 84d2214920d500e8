"""Pods in a queue of Kueue: which group they join, when they are created and released (ADR 0012)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.operator.builders import UID, job, metadata, now, pod, sidecar, status, world_of
from tests.support.operator.decisions import created_pods, of_kind

from holdfast_core.api import (
    JobCondition,
    RestorePointStatus,
    TrainingJob,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import RestartRound, Worker
from holdfast_core.names import pod_group_name
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.facts.scheduling import counts, present_group
from holdfast_operator.model import labels
from holdfast_operator.model.actions import BeginRound, Delete, ReleasePod, WriteStatus
from holdfast_operator.model.job import (
    JobMemory,
    NodeView,
    Observed,
    PodGroup,
    PodPhase,
    PodView,
    Reachable,
)
from holdfast_operator.model.reasons import Reason

CHOSEN = status(1, (1, 1), restore_point=RestorePointStatus(), coordinator=Worker(0))
MEMORY = JobMemory(round=RestartRound(1), round_seen_at=999.0)


def group(round_: int, queue: str = "a", workers: int = 2, **changes: Any) -> PodGroup:
    name = pod_group_name("job", UID, workers, round_)
    return replace(PodGroup(name=name, queue=queue, pods=workers), **changes)


def queued_job(of: TrainingJobStatus, queue: str | None = "a", **marks: str) -> TrainingJob:
    found = dict(marks) if queue is None else {labels.QUEUE_NAME: queue, **marks}
    return metadata(job(2, of), labels=found)


def gated(worker: int, birth: int, of: PodGroup | None, **changes: Any) -> PodView:
    """Return a pod that Kueue's gate holds back."""
    fields: dict[str, Any] = {
        "phase": PodPhase.PENDING,
        "ip": None,
        "node": None,
        "ready": False,
        "sidecar_started": False,
        "reason": "SchedulingGated",
        "group": of,
        "queued": True,
        "has_kueue_finalizer": True,
    }
    return pod(worker, birth, **{**fields, **changes})


def member(worker: int, birth: int, of: PodGroup | None, **changes: Any) -> PodView:
    return pod(worker, birth, **{"group": of, "has_kueue_finalizer": True, **changes})


# --------------------------------------------------------------------------- which group

FRESH, OLD = group(1), group(0)
GROUPS: dict[str, tuple[tuple[int, ...], tuple[PodView, ...], str | None, PodGroup | None]] = {
    "no pod, no label": ((1, 1), (), None, None),
    "no pod exists": ((1, 1), (), "a", FRESH),
    "a pod that has started decides": ((0, 1), (member(0, 0, OLD),), "a", OLD),
    "a pod of an earlier round that has not started decides": (
        (0, 1),
        (gated(0, 0, OLD, queued=False, node="node-0"),),
        "a",
        OLD,
    ),
    "it decides against another label": ((0, 1), (member(0, 0, OLD),), "b", OLD),
    "it decides without a label": ((0, 1), (member(0, 0, OLD),), None, OLD),
    "it decides for no queue": ((0, 1), (member(0, 0, None),), "a", None),
    "a gated pod of the round keeps its queue": ((1, 1), (gated(0, 1, FRESH),), "b", FRESH),
    "a gated pod without a label of the job": ((1, 1), (gated(0, 1, FRESH),), None, FRESH),
    "a gated pod that is being deleted does not": (
        (1, 1),
        (gated(0, 1, FRESH, terminating=True),),
        "b",
        group(1, "b"),
    ),
    "a gated pod of an ended group does not": ((1, 1), (gated(0, 1, OLD),), "a", FRESH),
    "a replaced pod does not": ((1, 1), (member(0, 0, OLD),), "a", FRESH),
}


@pytest.mark.parametrize("case", GROUPS)
def test_the_group_of_new_pods(case: str) -> None:
    members, pods, queue, expected = GROUPS[case]
    observed = Observed(job=queued_job(status(1, members), queue), pods=pods)
    assert present_group(world_of(observed)) == expected


@pytest.mark.fault("Kueue's webhook adds a default priority class to pods")
def test_a_priority_class_that_a_webhook_added_does_not_create_pods_again() -> None:
    of = queued_job(status(1, (1, 1)))
    first, second = gated(0, 1, FRESH), gated(1, 1, replace(FRESH, priority_class="default"))
    decision = decide(Observed(job=of, pods=(first, second), memory=MEMORY), now())
    assert of_kind(decision.actions, "delete Pod") == []


# --------------------------------------------------------------------------- creates

COUNTS: dict[str, tuple[PodView, bool]] = {
    "it runs": (member(1, 0, OLD), True),
    "it is being deleted on its node": (member(1, 0, OLD, terminating=True), True),
    "it has succeeded": (member(1, 0, OLD, phase=PodPhase.SUCCEEDED), True),
    "it has failed": (member(1, 0, OLD, phase=PodPhase.FAILED), False),
    "it is gated": (gated(1, 0, OLD), True),
    "it is deleted and no node had taken it": (gated(1, 0, OLD, terminating=True), False),
}


@pytest.mark.parametrize("case", COUNTS)
def test_a_replacement_is_created_once_the_pod_before_does_not_count(case: str) -> None:
    before, expected = COUNTS[case]
    assert counts(before) is expected
    survivor = member(0, 0, OLD)
    observed = Observed(
        job=queued_job(status(1, (0, 1))),
        pods=(survivor, before),
        sidecars=(sidecar(survivor, 1),),
        memory=MEMORY,
    )
    creates = created_pods(decide(observed, now()).actions)
    assert [c.worker for c in creates] == ([] if expected else [1])
    assert all(c.group == OLD for c in creates)


def test_an_older_pod_of_another_group_does_not_delay_a_new_one() -> None:
    leaving = member(1, 0, OLD, terminating=True)
    observed = Observed(job=queued_job(status(1, (1, 1))), pods=(leaving,), memory=MEMORY)
    creates = created_pods(decide(observed, now()).actions)
    assert [(c.worker, c.group) for c in creates] == [(0, FRESH), (1, FRESH)]


@pytest.mark.parametrize(
    ("stray", "deleted"),
    [
        pytest.param(gated(0, 1, OLD), True, id="of a group that has ended"),
        pytest.param(gated(0, 1, None, queued=False), True, id="in no group"),
        pytest.param(gated(0, 1, OLD, terminating=True), False, id="is being deleted"),
        pytest.param(gated(0, 1, FRESH), False, id="of the present group"),
    ],
)
def test_a_pod_in_another_group_that_has_not_started_is_created_again(
    stray: PodView, deleted: bool
) -> None:
    observed = Observed(job=queued_job(CHOSEN), pods=(stray, gated(1, 1, FRESH)), memory=MEMORY)
    decision = decide(observed, now())
    found = [d.name for d in of_kind(decision.actions, "delete Pod")]
    assert found == ([stray.name] if deleted else [])
    assert of_kind(decision.actions, BeginRound) == [], "it costs no round"


# --------------------------------------------------------------------------- releases

DELETED = member(0, 1, FRESH, terminating=True)
ENDED = member(1, 1, FRESH, phase=PodPhase.FAILED)
ENDED_JOB = status(1, (1, 1), restore_point=RestorePointStatus())
RELEASES: dict[str, tuple[TrainingJob, list[ReleasePod]]] = {
    "the job is being deleted": (
        changed(
            queued_job(ENDED_JOB),
            metadata=changed(job(2, deleting=True).metadata, labels={labels.QUEUE_NAME: "a"}),
        ),
        [ReleasePod(DELETED.name, DELETED.uid, ends_group=False)],
    ),
    "the job is suspended": (
        changed(
            queued_job(
                ENDED_JOB.with_condition(JobCondition.SUSPENDED, True, "Suspended", "", now().utc)
            ),
            spec=changed(job(2).spec, suspend=True),
        ),
        [ReleasePod(DELETED.name, DELETED.uid, ends_group=False)],
    ),
    "the job has failed": (
        queued_job(ENDED_JOB.with_condition(JobCondition.FAILED, True, "Failed", "", now().utc)),
        [
            ReleasePod(DELETED.name, DELETED.uid, ends_group=False),
            ReleasePod(ENDED.name, ENDED.uid, ends_group=True),
        ],
    ),
    "the job is complete": (
        queued_job(ENDED_JOB.with_condition(JobCondition.COMPLETE, True, "Done", "", now().utc)),
        [
            ReleasePod(DELETED.name, DELETED.uid, ends_group=False),
            ReleasePod(ENDED.name, ENDED.uid, ends_group=True),
        ],
    ),
    "it has no label any more": (
        queued_job(
            ENDED_JOB.with_condition(JobCondition.FAILED, True, "Failed", "", now().utc), None
        ),
        [
            ReleasePod(DELETED.name, DELETED.uid, ends_group=False),
            ReleasePod(ENDED.name, ENDED.uid, ends_group=True),
        ],
    ),
}


@pytest.mark.parametrize("case", RELEASES)
def test_pods_that_would_stay_for_ever_are_released(case: str) -> None:
    of, expected = RELEASES[case]
    decision = decide(Observed(job=of, pods=(DELETED, ENDED), memory=MEMORY), now())
    assert of_kind(decision.actions, ReleasePod) == expected


def test_a_pod_of_a_lost_node_is_released_once_it_is_deleted() -> None:
    lost = member(1, 0, OLD, terminating=True)
    node = NodeView("node-1", lost_because="has not renewed its lease", is_silent=True)
    survivor = member(0, 0, OLD)
    silent = sidecar(lost, 0, reachable=Reachable.NO, unreachable_since=900.0)
    observed = Observed(
        job=queued_job(status(1, (0, 1))),
        pods=(survivor, lost),
        sidecars=(sidecar(survivor, 1), silent),
        nodes={"node-1": node},
        memory=MEMORY,
    )
    decision = decide(observed, now())
    assert of_kind(decision.actions, "delete Pod") == [
        Delete("Pod", lost.name, lost.uid, "", force=True)
    ]
    assert of_kind(decision.actions, ReleasePod) == [ReleasePod(lost.name, lost.uid, False)]


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(member(1, 0, OLD), id="it runs"),
        pytest.param(member(1, 0, OLD, phase=PodPhase.FAILED), id="it has failed"),
        pytest.param(
            member(1, 0, OLD, terminating=True, has_kueue_finalizer=False), id="it has no finalizer"
        ),
    ],
)
def test_other_pods_of_a_job_that_is_not_over_keep_their_finalizers(kept: PodView) -> None:
    survivor = member(0, 0, OLD)
    observed = Observed(
        job=queued_job(status(1, (0, 1))),
        pods=(survivor, kept),
        sidecars=(sidecar(survivor, 1),),
        memory=MEMORY,
    )
    assert of_kind(decide(observed, now()).actions, ReleasePod) == []


def test_a_pass_that_begins_a_round_releases_no_pod() -> None:
    chosen = status(0, (0, 0), restore_point=RestorePointStatus())
    leaving = member(1, 0, OLD, terminating=True, phase=PodPhase.FAILED)
    memory = JobMemory(round=RestartRound(0), round_seen_at=900.0, failure_seen_at=990.0)
    observed = Observed(job=queued_job(chosen), pods=(member(0, 0, OLD), leaving), memory=memory)
    decision = decide(observed, now())
    assert len(of_kind(decision.actions, BeginRound)) == 1
    assert of_kind(decision.actions, ReleasePod) == []


# --------------------------------------------------------------------------- the condition


def reported(of: TrainingJob, *pods: PodView) -> tuple[str, str, str] | None:
    """Return condition Queued in the status that a pass writes, or None without it."""
    decision = decide(Observed(job=of, pods=pods, memory=MEMORY), now())
    [write] = of_kind(decision.actions, WriteStatus)
    found = write.status.condition(JobCondition.QUEUED)
    return None if found is None else (found.status, found.reason, found.message)


def test_a_pod_that_kueue_holds_back_by_itself_is_reported() -> None:
    """Kueue can be set to hold back all pods of a namespace, or to give them a default queue."""
    of = queued_job(CHOSEN, None)
    found = reported(of, gated(0, 1, None), gated(1, 1, None))
    assert found[:2] == ("True", Reason.WAITING_FOR_QUEUE)
    assert f"the job has no label {labels.QUEUE_NAME}" in found[2]


def test_another_priority_class_is_reported_and_takes_effect_later() -> None:
    of = queued_job(CHOSEN, "a", **{labels.QUEUE_PRIORITY: "high"})
    found = reported(of, gated(0, 1, FRESH), gated(1, 1, FRESH))
    assert found[:2] == ("True", Reason.QUEUE_CHANGES_LATER)
    assert "the labels of the job name LocalQueue a with priority class high" in found[2]


def test_a_removed_label_is_reported_and_takes_effect_later() -> None:
    of = queued_job(CHOSEN, None)
    found = reported(of, gated(0, 1, FRESH), gated(1, 1, FRESH))
    assert found[:2] == ("True", Reason.QUEUE_CHANGES_LATER)
    assert "are in LocalQueue a, and the labels of the job name no queue" in found[2]
