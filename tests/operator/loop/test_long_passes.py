"""Which decisions run outside of the event loop's thread."""

from __future__ import annotations

import threading

from tests.support.clock import ManualClock

from holdfast_operator.loop.workqueue import LongPasses
from holdfast_operator.model.ownership import job_key


async def test_a_decision_after_a_long_one_leaves_the_event_loop_free() -> None:
    clock, key, other = ManualClock(), job_key("team-a", "large"), job_key("team-b", "small")
    passes = LongPasses(clock)
    loop = threading.get_ident()

    def decide(seconds: float) -> int:
        clock.advance(seconds)
        return threading.get_ident()

    assert await passes.decide(key, lambda: decide(0.2)) == loop
    assert await passes.decide(other, lambda: decide(0.0)) == loop
    assert await passes.decide(key, lambda: decide(0.2)) != loop
    assert await passes.decide(key, lambda: decide(0.0)) != loop
    assert await passes.decide(key, lambda: decide(0.0)) == loop, "it is short again"
