from __future__ import annotations

import pytest

from holdfast_core.errors import ConfigError
from holdfast_core.ids import Step
from holdfast_core.policy.interval import next_save, object_due, save_due


@pytest.mark.parametrize(
    ("step", "every", "due"),
    [(0, 5, False), (1, 5, False), (5, 5, True), (6, 5, False), (10, 5, True), (1, 1, True)],
)
def test_save_due(step: int, every: int, due: bool) -> None:
    assert save_due(Step(step), every) is due


@pytest.mark.parametrize(
    ("step", "every", "due"), [(100, None, False), (0, 50, False), (50, 50, True), (75, 50, False)]
)
def test_object_due(step: int, every: int | None, due: bool) -> None:
    assert object_due(Step(step), every) is due


@pytest.mark.parametrize(("step", "expected"), [(0, 5), (4, 5), (5, 10), (7, 10)])
def test_next_save(step: int, expected: int) -> None:
    assert next_save(Step(step), 5) == expected
    assert save_due(next_save(Step(step), 5), 5)


@pytest.mark.parametrize("every", [0, -1])
def test_an_interval_is_at_least_one(every: int) -> None:
    for decide in (save_due, object_due, next_save):
        with pytest.raises(ConfigError, match="at least 1"):
            decide(Step(5), every)
