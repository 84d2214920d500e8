from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.reshard.boxes import Box, StridedRun, intersect, runs, subtract


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))

    def box() -> Box:
        offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
        lengths = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True))
        return Box(offsets, lengths)

    return shape, box(), box()


def painted(shape: tuple[int, ...], *boxes: Box) -> np.ndarray:
    array = np.zeros(shape, dtype=int)
    for box in boxes:
        array[slices(box)] += 1
    return array


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))


@given(two_boxes())
def test_common_part_and_rest_are_the_whole_once(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, one, other = case
    part = intersect(one, other)
    both = painted(shape, one) & painted(shape, other)
    if part is None:
        assert not both.any()
        return
    assert (painted(shape, part) == both).all()
    assert (painted(shape, part, *subtract(one, part)) == painted(shape, one)).all()


@given(two_boxes())
def test_runs_copy_the_common_part(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, source, target = case
    part = intersect(source, target)
    if part is None:
        return
    numbers = np.arange(1, int(np.prod(shape)) + 1).reshape(shape)
    held = numbers[slices(source)].reshape(-1)
    made = np.zeros(target.elements, dtype=int)
    for run in runs(part, source, target):
        for i in range(run.times):
            a, b = run.source + i * run.source_step, run.target + i * run.target_step
            assert not made[b : b + run.length].any()
            made[b : b + run.length] = held[a : a + run.length]
    expected = np.where(painted(shape, part) > 0, numbers, 0)[slices(target)]
    assert (made.reshape(target.lengths) == expected).all()


@pytest.mark.parametrize(
    ("part", "source", "target", "expected"),
    [
        pytest.param(
            Box((), ()), Box((), ()), Box((), ()), [StridedRun(0, 0, 1)], id="no dimensions"
        ),
        pytest.param(
            Box((2, 0), (2, 3)),
            Box((0, 0), (4, 3)),
            Box((2, 0), (2, 3)),
            [StridedRun(6, 0, 6)],
            id="rows are one run",
        ),
        pytest.param(
            Box((0, 2), (2, 2)),
            Box((0, 0), (2, 4)),
            Box((0, 2), (2, 2)),
            [StridedRun(2, 0, 2, 2, 4, 2)],
            id="columns are one run a row",
        ),
        pytest.param(
            Box((0, 1, 0), (2, 1, 5)),
            Box((0, 1, 0), (2, 1, 5)),
            Box((0, 0, 0), (2, 3, 5)),
            [StridedRun(0, 5, 5, 2, 5, 15)],
            id="whole in the source alone",
        ),
    ],
)
def test_runs_are_as_long_as_they_can_be(
    part: Box, source: Box, target: Box, expected: list[StridedRun]
) -> None:
    assert runs(part, source, target) == expected
