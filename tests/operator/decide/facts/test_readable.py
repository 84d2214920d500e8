"""Which proof allows the operator to replace pods: what is left to read without them.

The gang of round 1 has restored step 20 of round 0. Each shard has one copy on another worker.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.operator.builders import (
    held,
    job,
    manifest,
    manifest_digest,
    pod,
    sidecar,
    silent,
    status,
    world_of,
)

from holdfast_core.api import LineageEntry, PersistedStep, RestorePointStatus
from holdfast_core.ids import CheckpointId, RestartRound, Step, Worker
from holdfast_core.messages.schema import CoordinatorState, RestorePoint
from holdfast_operator.decide.facts.readable import (
    answering_can_be_replaced,
    lost_can_be_given_up,
    silent_can_be_lost,
)
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.job import Observed

WORKERS = 4
BEFORE, NOW = 0, 1
"""Round 0 saved the restore point, and round 1 trains from it."""


def point(step: int, round_: int = NOW) -> RestorePoint:
    return RestorePoint(Step(step), RestartRound(round_))


def training(
    *,
    local: RestorePoint | None = None,
    replicated: RestorePoint | None = None,
    persisted: int | None = None,
    quiet: tuple[int, ...] = (),
    saved: tuple[int, ...] = (),
    holders: tuple[int, ...] = tuple(range(WORKERS)),
) -> World:
    """Return a world in which the gang trains.

    Args:
        local: Newest local step, as the coordinator (worker 0) reports it.
        replicated: Newest replicated step.
        persisted: Newest persisted step of round 1.
        quiet: Workers that do not answer.
        saved: Workers whose inventory lists a manifest of step 30 of round 1.
        holders: Workers that hold their shard of the restore point, and a copy of the next worker's.
    """
    last = None
    if persisted is not None:
        last = PersistedStep(
            step=Step(persisted), round=RestartRound(NOW), manifest=manifest_digest(persisted, NOW)
        )
    base: dict[str, Any] = {"base": CheckpointId(Step(20), RestartRound(BEFORE))}
    begun = status(
        NOW,
        [BEFORE] * WORKERS,
        restore_point=RestorePointStatus(step=Step(20), round=RestartRound(BEFORE)),
        lineage=(
            LineageEntry(round=RestartRound(BEFORE)),
            LineageEntry(round=RestartRound(NOW), **base),
        ),
        coordinator=Worker(0),
        last_persisted=last,
    )
    pods = tuple(pod(worker) for worker in range(WORKERS))
    sidecars = tuple(
        silent(of, since=1.0)
        if of.worker in quiet
        else sidecar(
            of,
            NOW,
            manifests=[
                manifest(20, BEFORE, WORKERS),
                *([manifest(30, NOW, WORKERS)] if of.worker in saved else []),
            ],
            shards=[
                held(20, BEFORE, rank)
                for rank in (of.worker, (of.worker + 1) % WORKERS)
                if of.worker in holders
            ],
        )
        for of in pods
    )
    state = CoordinatorState(
        version=1, round=RestartRound(NOW), last_local=local, last_replicated=replicated
    )
    return world_of(
        Observed(
            job=job(WORKERS, begun, peer_copies=1, store="main"),
            pods=pods,
            sidecars=sidecars,
            coordinator=state,
        )
    )


def workers(*numbers: int) -> tuple[Worker, ...]:
    return tuple(map(Worker, numbers))


@pytest.mark.parametrize(
    ("without", "world", "expected"),
    [
        pytest.param((1,), training(local=point(30), replicated=point(30)), True, id="one copy"),
        pytest.param(
            (1, 2),
            training(local=point(30), replicated=point(30)),
            False,
            id="a shard and its copy",
        ),
        pytest.param(
            (1,),
            training(local=point(30), replicated=point(30), quiet=(2,)),
            False,
            id="a silent worker may have the copy",
        ),
        pytest.param((1,), training(local=point(30)), False, id="no step is replicated"),
        pytest.param(
            (1,),
            training(local=point(30), replicated=point(20, BEFORE)),
            False,
            id="the replicated step of an older round may have lost a copy since",
        ),
        pytest.param((1, 2), training(local=point(30), persisted=30), True, id="persisted"),
    ],
)
def test_lost_pods_are_given_up_if_a_committed_step_is_left(
    without: tuple[int, ...], world: World, expected: bool
) -> None:
    assert lost_can_be_given_up(world, workers(*without)) is expected


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        pytest.param(training(local=point(30), replicated=point(30)), True, id="replicated"),
        pytest.param(
            training(local=point(30), replicated=point(29)),
            False,
            id="the newest is not replicated",
        ),
        pytest.param(training(local=point(30), persisted=30), True, id="persisted"),
        pytest.param(
            training(local=point(30), persisted=29), False, id="an older one is persisted"
        ),
        pytest.param(
            training(local=point(30), replicated=point(30), quiet=(2,)),
            False,
            id="another worker is silent",
        ),
    ],
)
def test_a_pod_that_answers_is_replaced_if_the_newest_step_is_left(
    world: World, expected: bool
) -> None:
    assert answering_can_be_replaced(world, workers(1)) is expected


@pytest.mark.parametrize(
    ("without", "world", "expected"),
    [
        pytest.param((1,), training(), True, id="copies of the restore point are left"),
        pytest.param((1, 3), training(), True, id="two whose shards have copies on others"),
        pytest.param((0, 2), training(), False, id="the coordinator may have committed since"),
        pytest.param((1, 2), training(), False, id="a shard and its copy"),
        pytest.param(
            (1,), training(holders=(0, 1, 3)), False, id="the other copy of a shard is gone"
        ),
        pytest.param((1,), training(local=point(30)), False, id="the round has a local step"),
        pytest.param(
            (1,), training(saved=(3,)), False, id="a new coordinator does not report a commit yet"
        ),
        pytest.param(
            (1,), training(saved=(1,)), True, id="only the silent worker seems to have a commit"
        ),
    ],
)
def test_silent_pods_are_lost_only_while_the_restore_point_is_untouched(
    without: tuple[int, ...], world: World, expected: bool
) -> None:
    """A commit of this round may have pruned the restore point on other workers."""
    assert silent_can_be_lost(world, workers(*without)) is expected
