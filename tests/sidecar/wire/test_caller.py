"""Who calls a sidecar follows from the names of its certificate."""

from __future__ import annotations

import pytest

from holdfast_sidecar.base.rounds import OPERATOR, Caller
from holdfast_sidecar.wire.server import caller_of


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("operator.job-1.holdfast",), OPERATOR),
        (("gpt-0-r0.job-1.holdfast",), Caller("gpt-0-r0")),
        (("gpt-0-r0.job-2.holdfast",), None),
        (("operator.job-2.holdfast",), None),
        ((".job-1.holdfast",), None),
        (("job-1.holdfast",), None),
        ((), None),
    ],
)
def test_the_caller_is_read_from_the_names_of_the_certificate(
    names: tuple[str, ...], expected: Caller | None
) -> None:
    assert caller_of(names, "job-1") == expected
