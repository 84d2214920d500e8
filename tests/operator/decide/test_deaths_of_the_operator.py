"""The operator dies after each of its writes to the API, and another one continues."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.operator.life import Life, dies_after
from tests.support.operator.oracle import broken_rules

from holdfast_core.api import JobCondition


def suspends(life: Life) -> None:
    life.change_spec(suspend=True)


def loses_a_pod(life: Life) -> None:
    life.cluster.lose_pod(life.pod(1))


def rank_dies(life: Life) -> None:
    life.rank_dies()


@pytest.mark.fault("The operator is killed at every write (API server with real watches)")
@pytest.mark.fault(
    "The operator dies after each of its writes (suspend and resume, pod lost, rank dies)"
)
@pytest.mark.parametrize("away_seconds", [1, 60])
@pytest.mark.parametrize("fault", [suspends, loses_a_pod, rank_dies], ids=lambda f: f.__name__)
def test_the_operator_dies_after_each_write(
    fault: Callable[[Life], None], away_seconds: int
) -> None:
    begun = Life(store=True, every=10)
    begun.run(40, until=lambda s: s.last_persisted is not None and s.last_persisted.step >= 20)
    fault(begun)
    for writes in range(1, 12):
        life = begun.copy()
        dies_after(life, writes)
        for _ in range(away_seconds):
            life.cluster.tick()
        life.restart()
        life.run(45)
        if fault is suspends:
            assert life.status.is_true(JobCondition.SUSPENDED), f"after write {writes}"
            assert life.cluster.pods == {}
            life.change_spec(suspend=False)
            life.run(45)
        assert life.status.is_true("Running"), f"after write {writes}"
        assert broken_rules(life.cluster, copies=1) == [], f"after write {writes}"
