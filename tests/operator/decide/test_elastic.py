"""The number of workers with which an elastic gang is to continue, and whether it may (ADR 0011)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.support.operator.builders import job, metadata, now, pod, status, store, world_of
from tests.support.operator.decisions import of_kind

from holdfast_core.api import (
    ElasticSpec,
    ElasticStatus,
    JobCondition,
    ResizeStatus,
    RestorePointStatus,
)
from holdfast_core.ids import RestartRound
from holdfast_core.names import placeholder_name
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.facts import sizes
from holdfast_operator.model.actions import BeginRound, Delete, WriteStatus
from holdfast_operator.model.job import JobMemory, Observed, PodPhase, PodView, Seen
from holdfast_operator.model.labels import QUEUE_NAME
from holdfast_operator.model.reasons import Reason

FROM_TWO = ElasticSpec(min=2, shrink_after_seconds=30)
WANTED = {
    "not elastic": (4, None, None, 4),
    "all workers have nodes": (4, FROM_TWO, None, 4),
    "one worker has no node": (4, FROM_TWO, (3, 4), 3),
    "nodes were found for all": (4, FROM_TWO, (4, 4), 4),
    "workers has changed since": (6, FROM_TWO, (3, 4), 6),
    "workers was lowered since": (2, FROM_TWO, (3, 4), 2),
    "elastic was removed since": (4, None, (3, 4), 4),
    "min was raised above the present number": (8, ElasticSpec(min=5), (3, 8), 5),
}


@pytest.mark.parametrize("case", WANTED)
def test_the_number_that_the_gang_is_to_have(case: str) -> None:
    workers, elastic, record, expected = WANTED[case]
    found = None if record is None else ElasticStatus(workers=record[0], of_workers=record[1])
    gang = job(workers, status(0, (0, 0, 0), elastic=found), store="main", elastic=elastic)
    assert sizes.wanted_workers(gang, gang.status) == expected


def test_a_gang_in_a_queue_keeps_its_size_and_its_condition_says_why() -> None:
    observed = waiting([0, 1, 2])
    queued = replace(observed, job=metadata(observed.job, labels={QUEUE_NAME: "team-a"}))
    actions = decide(queued, now()).actions
    assert not of_kind(actions, BeginRound, "create Pod")
    [write] = [a for a in actions if isinstance(a, WriteStatus)]
    found = write.status.condition(JobCondition.WORKERS_MISSING)
    assert (found.status, found.reason) == ("False", Reason.CANNOT_SHRINK)
    assert "elastic has no effect in a queue" in found.message


def waiting(
    with_nodes: Sequence[int],
    *,
    workers: int = 4,
    minimum: int | None = 2,
    refused: tuple[int, int] | None = None,
    waited: float = 30.0,
) -> Observed:
    """Return a new job with a restore point, whose other pods have had no nodes for this time."""
    record = None
    if refused is not None:
        record = ResizeStatus(
            round=RestartRound(0), refused_workers=refused[0], refused_of_workers=refused[1]
        )
    pods = [_pending(w, f"node-{w}" if w in with_nodes else None) for w in range(workers)]
    return Observed(
        job=job(
            workers,
            status(0, (0,) * workers, resize=record, restore_point=RestorePointStatus()),
            store="main",
            elastic=None if minimum is None else ElasticSpec(min=minimum, shrink_after_seconds=30),
        ),
        pods=tuple(pods),
        store=store(),
        memory=JobMemory(
            round=RestartRound(0), round_seen_at=900.0, seen={(Seen.LACKING, ""): 1000.0 - waited}
        ),
    )


def _pending(worker: int, node: str | None) -> PodView:
    return pod(
        worker, phase=PodPhase.PENDING, ip=None, node=node, ready=False, sidecar_started=False
    )


TRIED: dict[str, tuple[Observed, int | None]] = {
    "three of four pods have nodes": (waiting([0, 1, 2]), 3),
    "the missing worker is the first one": (waiting([1, 2, 3]), 3),
    "as many as min have nodes": (waiting([0, 3]), 2),
    "fewer than min have nodes": (waiting([0]), None),
    "it is not elastic": (waiting([0, 1, 2], minimum=None), None),
    "all have nodes": (waiting([0, 1, 2, 3]), None),
    "the scheduler has had less time": (waiting([0, 1, 2], waited=29.0), None),
    "the ranks refused three": (waiting([0, 1, 2], refused=(3, 4)), 2),
    "the ranks refused three, and min is three": (
        waiting([0, 1, 2], refused=(3, 4), minimum=3),
        None,
    ),
    "the ranks refused three of another number": (waiting([0, 1, 2], refused=(3, 5)), 3),
    "the ranks refused more": (waiting([0, 1], refused=(4, 4)), 2),
}


@pytest.mark.parametrize("case", TRIED)
def test_a_gang_without_nodes_continues_with_this_number(case: str) -> None:
    observed, expected = TRIED[case]
    begun = [a for a in decide(observed, now()).actions if isinstance(a, BeginRound)]
    assert [len(a.status.members) for a in begun] == ([] if expected is None else [expected])
    for action in begun:
        assert action.status.elastic == ElasticStatus(workers=expected or 0, of_workers=4)
        found = action.status.condition(JobCondition.WORKERS_MISSING)
        assert (found.status, found.reason) == ("True", Reason.SHRUNK)


def placeholder(worker: int, node: str) -> PodView:
    gang = job()
    name = placeholder_name(gang.name, gang.uid, worker)
    return replace(_pending(worker, node), name=name, uid=f"uid-{name}", placeholder=True)


def test_a_placeholder_is_no_worker() -> None:
    """Its worker is a member of the gang, as after a growth that has just begun its round."""
    observed = waiting([0, 1, 2, 3])
    with_it = replace(observed, placeholders=(placeholder(2, "node-9"),))
    assert world_of(with_it).obsolete_pods == ()
    assert world_of(with_it).next_round == world_of(observed).next_round
    actions = decide(with_it, now()).actions
    deleted = Delete("Pod", "job-l2msg4-placeholder-2", "uid-job-l2msg4-placeholder-2", "")
    assert [a for a in actions if a != deleted] == list(decide(observed, now()).actions)
    assert deleted in actions, "the gang lacks no worker"
    assert not of_kind(actions, "create Pod")
