"""A training process with one slot beside a real sidecar: saves that find the slot busy, and restores."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.sidecar.gang import Gang, Gangs
from tests.support.trainer.launched import until

import holdfast
from holdfast.base.options import WhenBusy
from holdfast_core.contract import PodContract
from holdfast_core.messages.schema import Policy

pytestmark = pytest.mark.integration


class OneWorker:
    """A gang of one worker, whose rank is a Checkpointer of this process."""

    def __init__(self, gang: Gang, monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
        self.gang = gang
        self.policy = Policy(interval_steps=1, slots=slots, peer_copies=0)
        self._monkeypatch = monkeypatch

    async def begin(self) -> None:
        """Start the sidecar and round 0."""
        await self.gang.start(policy=self.policy)
        self._become_rank(0)

    async def next_round(self, step: int) -> None:
        """Seal round 0 and begin round 1 at the committed `step`."""
        point = await self.gang.point(step, local=True)
        await self.gang.operator.seal(0, 1)
        await self.gang.begin(1, restore=point, policy=self.policy)
        self._become_rank(1)

    def _become_rank(self, round_: int) -> None:
        self.gang.ranks[0].close()
        of = self.gang.sidecars[0].contract
        contract = PodContract(
            of.job_uid,
            of.job,
            of.namespace,
            of.worker,
            of.birth_round,
            1,
            of.shared_dir,
            slots=self.policy.slots,
        )
        env = {"HOLDFAST_ROUND": str(round_), "RANK": "0", "WORLD_SIZE": "1"}
        for name, value in {**contract.to_env(), **env}.items():
            self._monkeypatch.setenv(name, value)


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
            handles[-1].wait(timeout=60)
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
