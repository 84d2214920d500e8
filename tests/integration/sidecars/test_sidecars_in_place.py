"""A rank restores in place from the slot or the file of its shard, which its sidecar opens for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.sidecars.one_worker import OneWorker
from tests.support.hang import HANG_SECONDS
from tests.support.sidecar.gang import Gangs
from tests.support.sidecar.processes import flip_a_bit
from tests.support.sidecar.waiting import until

import holdfast
from holdfast_core.errors import HoldfastError
from holdfast_core.shm.slot_file import HEADER_BYTES, SlotHeader, SlotState

pytestmark = pytest.mark.integration

VALUES = torch.arange(1 << 20, dtype=torch.float32)


def state_with(values: torch.Tensor, n: int) -> dict[str, Any]:
    return {"t": values.clone(), "n": n}


def save() -> None:
    with holdfast.Checkpointer() as ckpt:
        state = state_with(torch.zeros_like(VALUES), 0)
        assert ckpt.restore(state) is None
        ckpt.allocate(state)
        ckpt.save(1, state_with(VALUES, 1)).wait("local", timeout=HANG_SECONDS)


def restore(caplog: pytest.LogCaptureFixture) -> str:
    """Restore into other values, in place. Return the tier that the log names."""
    caplog.clear()
    caplog.set_level(logging.INFO, logger="holdfast.checkpoint.restoring")
    state = state_with(torch.full_like(VALUES, 7), 7)
    place = state["t"].data_ptr()
    with holdfast.Checkpointer() as ckpt:
        assert ckpt.restore(state) == 1
    assert (state["n"], state["t"].data_ptr()) == (1, place)
    assert torch.equal(state["t"], VALUES)
    (record,) = [r for r in caplog.records if r.msg.startswith("rank %d restored")]
    assert isinstance(record.args, tuple)
    return str(record.args[2])


def slots_of(worker: OneWorker) -> list[Path]:
    return list((worker.gang.sidecars[0].shared / "slots").glob("*.slot"))


def is_free(slot: Path) -> bool:
    return SlotHeader.unpack(slot.read_bytes()[:HEADER_BYTES]).state is SlotState.FREE


def keep(worker: OneWorker) -> None:
    return


def remove_slots(worker: OneWorker) -> None:
    for slot in slots_of(worker):
        slot.unlink()


def damage_slots(worker: OneWorker) -> None:
    for slot in slots_of(worker):
        with slot.open("r+b") as file:
            file.seek(HEADER_BYTES + (3 << 20))
            file.write(b"damaged")


@pytest.mark.fault("A slot that a restore reads in place is damaged")
@pytest.mark.parametrize(
    ("change", "tier"), [(keep, "memory"), (remove_slots, "node"), (damage_slots, "node")]
)
def test_a_rank_reads_its_shard_in_place(
    gangs: Gangs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[OneWorker], None],
    tier: str,
) -> None:
    async def scenario() -> None:
        async with gangs(1) as gang:
            worker = OneWorker(gang, monkeypatch, slots=2)
            await worker.begin()
            await asyncio.to_thread(save)
            await until(lambda: all(is_free(slot) for slot in slots_of(worker)), "free slots")
            left = {slot: slot.read_bytes() for slot in slots_of(worker)}
            await worker.next_round(1)
            for slot, content in left.items():  # the gang's scripted rank has replaced them
                slot.write_bytes(content)
            change(worker)
            assert await asyncio.to_thread(restore, caplog) == tier
            if change is remove_slots:
                contents = [slot.read_bytes()[HEADER_BYTES:] for slot in slots_of(worker)]
                assert not any(any(content) for content in contents), "no slot was filled"

    asyncio.run(scenario())


@pytest.mark.fault("The file that a rank reads in place is damaged")
def test_a_damaged_file_is_quarantined(
    gangs: Gangs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rank finds the damage, and asks for a filled slot. There is no other copy in this gang."""

    async def scenario() -> None:
        async with gangs(1) as gang:
            worker = OneWorker(gang, monkeypatch, slots=2)
            await worker.begin()
            await asyncio.to_thread(save)
            await worker.next_round(1)
            remove_slots(worker)
            flip_a_bit(gang.sidecars[0].node, rank=0)
            with pytest.raises(HoldfastError, match="cannot be restored"):
                await asyncio.to_thread(restore, caplog)
            quarantine = gang.sidecars[0].node / "quarantine"
            assert len(list(quarantine.glob("*.shard"))) == 1

    asyncio.run(scenario())
