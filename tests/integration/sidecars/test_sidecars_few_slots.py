"""A training process with one slot beside a real sidecar: saves that find the slot busy, and restores."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.sidecars.one_worker import OneWorker
from tests.support.hang import HANG_SECONDS
from tests.support.sidecar.gang import Gangs
from tests.support.trainer.launched import until

import holdfast
from holdfast.base.options import WhenBusy

pytestmark = pytest.mark.integration


@pytest.mark.fault("A save finds the one slot busy")
@pytest.mark.parametrize(("when_busy", "skipped"), [("skip", [2, 3]), ("wait", [])])
def test_a_save_that_finds_the_one_slot_busy(
    gangs: Gangs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    when_busy: WhenBusy,
    skipped: list[int],
) -> None:
    """The disk writes step 1 until the gate opens: before step 4, or, where saves wait, before step 2."""
    gate = tmp_path / "gate"
    caplog.set_level("INFO", logger="holdfast.checkpoint.status")

    def train() -> list[int]:
        state = {"t": torch.zeros(100_000)}
        with holdfast.Checkpointer(when_busy=when_busy) as ckpt:
            assert ckpt.restore(state) is None
            handles = []
            for step in range(1, 5):
                state["t"] += 1
                if step == (2 if when_busy == "wait" else 4):
                    gate.touch()
                if step == 4:
                    until(lambda: handles[0].settled, "step 1 is written")
                if ckpt.should_save(step):
                    handles.append(ckpt.save(step, state))
            handles[-1].wait(timeout=HANG_SECONDS)
            assert ckpt.saves_skipped == len(skipped)
        return [handle.step for handle in handles if handle.failure is None]

    async def scenario() -> None:
        async with gangs(1) as gang:
            gang.failpoints[0] = f"node.mid_write=wait:{gate}"
            worker = OneWorker(gang, monkeypatch, slots=1)
            await worker.begin()
            saved = await asyncio.to_thread(train)
            assert saved == [step for step in (1, 2, 3, 4) if step not in skipped]
            await worker.next_round(4)
            state = {"t": torch.zeros(100_000)}
            assert await asyncio.to_thread(restored, state) == 4
            assert torch.equal(state["t"], torch.full((100_000,), 4.0))

    asyncio.run(scenario())
    said = [r.getMessage() for r in caplog.records if "skipped:" in r.getMessage()]
    assert len(said) == (1 if skipped else 0), "a reason is logged once"


def restored(state: dict[str, Any]) -> int | None:
    with holdfast.Checkpointer() as ckpt:
        return ckpt.restore(state)
