"""The grace period of new pods, and how the flush is measured that it follows from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.operator.builders import job, pod, sidecar, status, template, world_of

from holdfast_core.api import (
    GoodputStatus,
    RestorePointStatus,
    TrainingJobStatus,
    changed,
)
from holdfast_core.ids import RestartRound, Step, Worker
from holdfast_core.messages.schema import CoordinatorState, RestorePoint
from holdfast_operator.decide.facts.world import World, advance
from holdfast_operator.decide.report.status import refresh
from holdfast_operator.model.job import JobMemory, Observed
from holdfast_operator.model.template import Grace, grace_of

TRAINED = GoodputStatus(ratio=1.0, training_seconds=2000.0)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        pytest.param({}, Grace(30, 150), id="nothing is measured"),
        pytest.param({"flush_seconds": 3}, Grace(30, 60), id="a short flush"),
        pytest.param({"flush_seconds": 200}, Grace(30, 430), id="twice a long flush"),
        pytest.param({"step": 100, "goodput": TRAINED}, Grace(80, 200), id="steps of 20 s"),
        pytest.param({"step": 1, "goodput": TRAINED}, Grace(1800, 1920), id="a step of 2000 s"),
        pytest.param({"flush_seconds": 9999}, Grace(30, 3600), id="no more than an hour"),
    ],
)
def test_the_grace_period_is_an_upper_bound(status: dict[str, Any], expected: Grace) -> None:
    assert grace_of(job(2, TrainingJobStatus(**status))) == expected


@pytest.mark.parametrize(("chosen", "expected"), [(600, Grace(300, 600)), (0, Grace(0, 0))])
def test_a_grace_period_of_the_template_stays(chosen: int, expected: Grace) -> None:
    own = template()
    own["spec"]["terminationGracePeriodSeconds"] = chosen
    one = job(2, TrainingJobStatus(flush_seconds=200))
    one = changed(one, spec=changed(one.spec, template=own))
    assert grace_of(one) == expected


def gang(
    local: int, copied: int | None, memory: JobMemory, copies: int = 1, *, at: float = 150
) -> World:
    begun = status(0, (0, 0), restore_point=RestorePointStatus(), coordinator=Worker(0))
    pods = (pod(0), pod(1))
    newest = None if copied is None else RestorePoint(Step(copied), RestartRound(0))
    return world_of(
        Observed(
            job=job(2, begun, peer_copies=copies),
            pods=pods,
            sidecars=tuple(sidecar(p, 0, version=1) for p in pods),
            coordinator=CoordinatorState(
                5,
                RestartRound(0),
                running=True,
                last_local=RestorePoint(Step(local), RestartRound(0)),
                last_replicated=newest,
            ),
        ),
        memory,
        at=at,
    )


def measured(*seen: tuple[float, int, int | None], copies: int = 1) -> JobMemory:
    """Return the memory after passes at these times, which see these local and copied steps."""
    memory = JobMemory()
    for at, local, copied in seen:
        world = gang(local, copied, memory, copies, at=at)
        advance(world)
        memory = world.memory
    return memory


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param([(100, 10, None), (107, 10, 10)], 7.0, id="one step"),
        pytest.param(
            [(100, 10, None), (101, 20, None), (107, 20, 20)], 7.0, id="a step is skipped"
        ),
        pytest.param(
            [(100, 10, None), (107, 10, 10), (120, 20, 10), (122, 20, 20)], 7.0, id="the longest"
        ),
        pytest.param([(100, 10, 10), (200, 20, 20)], 0.0, id="copied before it was seen"),
        pytest.param([(100, 10, None), (900, 10, None)], 0.0, id="not copied yet"),
    ],
)
def test_the_flush_is_measured_from_the_local_commit_to_the_last_copy(
    seen: list[tuple[float, int, int | None]], expected: float
) -> None:
    assert measured(*seen).flush_seconds == expected


def test_without_copies_there_is_no_flush_to_peers() -> None:
    assert measured((100, 10, None), (107, 10, 10), copies=0).flush_seconds == 0.0


def test_the_status_shows_the_longest_flush() -> None:
    memory = replace(measured((100, 10, None), (140, 10, 10)), flush_seconds=39.5)
    world = gang(10, 10, memory)
    shown = refresh(world, world.status)
    assert shown.flush_seconds == 40
    longer = changed(world.status, flush_seconds=50)
    assert refresh(world, longer).flush_seconds == 50
