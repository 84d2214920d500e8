"""An interval that is given as a time, from the ROUND message to the coordinator's metrics."""

from __future__ import annotations

import asyncio
import re

import pytest
import torch
from tests.integration.sidecars.one_worker import OneWorker
from tests.support.hang import HANG_SECONDS
from tests.support.sidecar import until
from tests.support.sidecar.gang import Gangs

import holdfast
from holdfast_core.messages.schema import Policy, Timing

pytestmark = pytest.mark.integration

MTBF_SECONDS = 1e-6
"""So short that an automatic interval is a step."""


def intervals(page: str) -> dict[str, float]:
    """Return what the page of metrics says of the interval: its steps, and the seconds of its parts."""
    found = re.findall(
        r"^holdfast_save_interval_(?:(steps)|seconds{part=.(\w+).}) (\S+)$", page, re.M
    )
    return {steps or part: float(value) for steps, part, value in found}


@pytest.mark.parametrize("seconds", [1e-9, None], ids=["seconds", "auto"])
def test_a_time_becomes_steps_that_the_metrics_of_the_coordinator_show(
    gangs: Gangs, monkeypatch: pytest.MonkeyPatch, seconds: float | None
) -> None:
    timing = Timing(seconds, MTBF_SECONDS)
    monkeypatch.setenv("HOLDFAST_INTERVAL_STEPS", "0")
    monkeypatch.setenv("HOLDFAST_INTERVAL_SECONDS", "auto" if seconds is None else str(seconds))
    monkeypatch.setenv("HOLDFAST_MTBF_SECONDS", str(MTBF_SECONDS))

    def train() -> list[int]:
        state = {"t": torch.zeros(100)}
        saved = []
        with holdfast.Checkpointer(when_busy="wait") as ckpt:
            assert ckpt.restore(state) is None
            for step in range(1, 9):
                state["t"] += 1
                if ckpt.should_save(step):
                    ckpt.save(step, state).wait(timeout=HANG_SECONDS)
                    saved.append(step)
        return saved

    async def scenario() -> None:
        async with gangs(1) as gang:
            worker = OneWorker(gang, monkeypatch, slots=2)
            worker.policy = Policy(0, slots=2, peer_copies=0, timing=timing)
            await worker.begin()
            assert await asyncio.to_thread(train) == [5, 6, 7, 8]
            # The report of the step before the first save has no cost of a save yet.
            known = {"interval", "step"} | ({"save", "mtbf"} if seconds is None else set())
            await until(
                lambda: intervals(gang.metrics(0)).keys() == {"steps", *known}, f"only {known}"
            )
            found = intervals(gang.metrics(0))
            assert found["steps"] == 1
            assert found.get("mtbf", MTBF_SECONDS) == MTBF_SECONDS

    asyncio.run(scenario())
