"""Phases of a job, as functions that bring a new one into them."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.operator.life import Life

from holdfast_core.api import JobCondition

Phase = Callable[[Life], None]


def not_accepted(life: Life) -> None:
    """The job exists, and no pass has seen it."""


def pods_refused(life: Life) -> None:
    life.cluster.pod_refusal = "exceeded quota: gpus"
    life.run(4)
    assert life.cluster.pods == {}


def pending(life: Life) -> None:
    life.cluster.hold_starts = True
    life.run(4)
    assert len(life.cluster.pods) == 4


def partly_unschedulable(life: Life) -> None:
    life.cluster.full_nodes = set(list(life.cluster.nodes)[1:])
    life.cluster.hold_starts = True
    life.run(4)
    assert len(life.cluster.pods) == 4


def starting(life: Life) -> None:
    life.run(30, until=lambda s: s.restore_point is not None)
    assert not life.status.is_true(JobCondition.RUNNING)


def training(life: Life) -> None:
    life.run(40)
    assert life.status.is_true(JobCondition.RUNNING)


def pod_lost(life: Life) -> None:
    life.run(40)
    life.cluster.lose_pod(life.pod(1))


def coordinator_lost(life: Life) -> None:
    life.run(40)
    life.cluster.lose_pod(life.pod(0))


def rank_failed(life: Life) -> None:
    life.run(40)
    life.rank_dies()


def restarting(life: Life) -> None:
    pod_lost(life)
    life.run(3)
    assert life.status.restart_round == 1


def restart_unschedulable(life: Life) -> None:
    life.run(40)
    life.cluster.full_nodes = set(life.cluster.nodes)
    life.cluster.lose_pod(life.pod(1))
    life.run(5)
    assert life.status.restart_round == 1


PHASES: tuple[Phase, ...] = (
    not_accepted,
    pods_refused,
    pending,
    partly_unschedulable,
    starting,
    training,
    pod_lost,
    coordinator_lost,
    rank_failed,
    restarting,
    restart_unschedulable,
)


def heal(life: Life) -> None:
    life.cluster.pod_refusal = ""
    life.cluster.hold_starts = False
    life.cluster.full_nodes = set()
