"""Look for an input that breaks a target. The tests use one seed, and `make fuzz` uses many."""

from __future__ import annotations

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from tests.fuzz.inputs import inputs
from tests.fuzz.targets import Target


class BrokenTargetError(Exception):
    """A target is broken. `data` is the smallest input found that breaks it."""

    def __init__(self, target: Target, data: bytes) -> None:
        super().__init__(f"target {target.name} does not take {data!r}")
        self.data = data


def search(target: Target, *, seed: int, examples: int) -> None:
    """Try inputs on the target. Raises BrokenTargetError, caused by the target's error."""
    last: list[bytes] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
    )
    @given(inputs(target.seeds))
    def probe(data: bytes) -> None:
        try:
            target.run(data)
        except BaseException:
            last[:] = [data]
            raise

    try:
        probe()
    except BaseException as error:
        if last:
            raise BrokenTargetError(target, last[0]) from error
        raise
