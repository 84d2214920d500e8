"""Waits for the ROUND of a sidecar that has restarted."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.sidecar.rounds import accepted, round_message

from holdfast_core.ids import RestartRound, Worker
from holdfast_sidecar.base.pod import CurrentRound
from holdfast_sidecar.base.rounds import RoundState

SEALED = RoundState(Worker(0), 1, RestartRound(2), "gpt-0-r0")


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(accepted(round_message(2, workers=1)), id="it receives its ROUND"),
        pytest.param(SEALED.sealed_for(RestartRound(3)), id="a newer round is sealed"),
    ],
)
async def test_the_wait_ends_when_the_round_is_known_or_over(after: RoundState) -> None:
    current = CurrentRound(SEALED)
    waits = asyncio.ensure_future(current.unsealed(RestartRound(2)))
    await asyncio.sleep(0)
    current.state = SEALED
    await asyncio.sleep(0)
    assert not waits.done()
    current.state = after
    await waits


async def test_nothing_waits_for_another_round() -> None:
    await CurrentRound(SEALED).unsealed(RestartRound(1))
