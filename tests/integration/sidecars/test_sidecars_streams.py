"""Saves that stream through a ring which is smaller than the state, with a real sidecar and a real state."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.sidecars.one_worker import OneWorker
from tests.support import zygote
from tests.support.crash.failpoints import (
    PANIC_EXIT_CODE,
    VARIABLE,
    failpoints,
    in_every_python,
)
from tests.support.sidecar import until
from tests.support.sidecar.gang import Gangs
from tests.support.sidecar.processes import files_below

import holdfast
from holdfast_core.errors import HoldfastError
from holdfast_core.messages.schema import Refusal, Segment, StageSegment

pytestmark = pytest.mark.integration

RING_BYTES = 16 << 20
MIB = 1 << 20


class Training:
    """A module with AdamW whose state takes 38 MiB, more than twice the ring."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(900, 900) for _ in range(4)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optimizer, "seed": [seed]}

    def train(self, step: int) -> None:
        torch.manual_seed(step)
        self.optimizer.zero_grad()
        self.model(torch.randn(2, 900)).square().sum().backward()
        self.optimizer.step()

    def after(self, steps: int) -> Training:
        for step in range(1, steps + 1):
            self.train(step)
        return self

    def equals(self, other: Training) -> bool:
        ours = (self.model.state_dict(), self.optimizer.state_dict()["state"])
        theirs = (other.model.state_dict(), other.optimizer.state_dict()["state"])
        return all(torch.equal(ours[0][name], theirs[0][name]) for name in ours[0]) and all(
            torch.equal(ours[1][index][name], theirs[1][index][name])
            for index in ours[1]
            for name in ours[1][index]
        )


def saved(steps: int, *, first: int = 1) -> tuple[list[int], int]:
    """Train and save each step. Return the steps whose save succeeded, and the number of failed saves."""
    training = Training(0).after(first - 1)
    done = []
    with holdfast.Checkpointer() as ckpt:
        for step in range(first, steps + 1):
            training.train(step)
            handle = ckpt.save(step, training.state)
            if handle.failure is None:
                handle.wait(timeout=60)
                done.append(step)
        failed = ckpt.saves_failed
    return done, failed


def restored() -> tuple[int | None, Training]:
    training = Training(1)
    with holdfast.Checkpointer() as ckpt:
        return ckpt.restore(training.state), training


def slot_bytes(shared: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in (shared / "slots").glob("*.slot"))


@pytest.fixture
def worker(gangs: Gangs, monkeypatch: pytest.MonkeyPatch) -> OneWorker:
    return OneWorker(gangs(1), monkeypatch, slots=0, ring_bytes=RING_BYTES)


async def test_a_state_that_is_larger_than_its_ring(worker: OneWorker) -> None:
    async with worker.gang as gang:
        await worker.begin()
        assert await asyncio.to_thread(saved, 3) == ([1, 2, 3], 0)
        shared = gang.sidecars[0].shared
        assert slot_bytes(shared) <= RING_BYTES + 8 * 4096
        await worker.next_round(3)
        step, training = await asyncio.to_thread(restored)
        assert step == 3
        assert training.equals(Training(0).after(3))
        assert slot_bytes(shared) <= RING_BYTES + 8 * 4096, "the restore needed no more"


async def test_a_state_with_a_view_that_is_loaded_from_a_whole_slot(worker: OneWorker) -> None:
    """A module with loading code of its own cannot be loaded in place. The slot is removed afterwards."""

    class Wrapped(torch.nn.Linear):
        def load_state_dict(self, state: Any, *arguments: Any, **named: Any) -> Any:
            return super().load_state_dict(state, *arguments, **named)

    def both(restores: bool) -> torch.Tensor:
        torch.manual_seed(7)
        module = Wrapped(1500, 3000)
        expected = module.weight.detach().clone()
        with holdfast.Checkpointer() as ckpt:
            if restores:
                module.weight.data.zero_()
                assert ckpt.restore({"m": module}) == 1
                assert torch.equal(module.weight, expected)
            ckpt.save(2 if restores else 1, {"m": module}).wait(timeout=60)
        return expected

    async with worker.gang as gang:
        await worker.begin()
        await asyncio.to_thread(both, False)
        await worker.next_round(1)
        await asyncio.to_thread(both, True)
        assert slot_bytes(gang.sidecars[0].shared) <= RING_BYTES + 8 * 4096


@pytest.mark.parametrize(
    "failpoint",
    [
        "stream.segment_read=panic@1",
        "stream.segment_read=panic@12",
        "node.mid_write=panic",
        "stream.segment_read=panic@19",
    ],
)
async def test_the_sidecar_is_killed_within_a_stream(worker: OneWorker, failpoint: str) -> None:
    """The save fails, training continues, and the next save goes through the same ring."""
    async with worker.gang as gang:
        await worker.begin()
        assert await asyncio.to_thread(saved, 1) == ([1], 0)
        sidecar = gang.sidecars[0]
        sidecar.kill()
        sidecar.start({VARIABLE: failpoint})
        await worker.sidecar_is_back()

        def train() -> tuple[list[int], int]:
            return saved(2, first=2)

        assert await asyncio.to_thread(train) == ([], 1)
        assert sidecar.process is not None
        assert sidecar.process.wait(60) == PANIC_EXIT_CODE
        sidecar.start()
        await worker.sidecar_is_back()

        def train_on() -> tuple[list[int], int]:
            return saved(3, first=3)

        assert await asyncio.to_thread(train_on) == ([3], 0)
        assert files_below(sidecar.node, "*.tmp*") == []
        await worker.next_round(3)
        step, training = await asyncio.to_thread(restored)
        assert step == 3
        assert training.equals(Training(0).after(3))


RANK_PROGRAM = """
from tests.integration.sidecars.test_sidecars_streams import saved
saved({steps}, first={first})
"""


def rank_that_dies(folder: Path, segment: int) -> int:
    """Run a rank that saves step 2 and dies after it has copied this segment. Return its exit code."""
    return zygote.run(
        [sys.executable, "-c", RANK_PROGRAM.format(steps=2, first=2)],
        env={**os.environ, **in_every_python(folder, f"stream.segment_copied=panic@{segment}")},
        check=False,
        timeout=120,
    ).returncode


@pytest.mark.parametrize("segment", [1, 9, 18])
async def test_the_rank_is_killed_within_a_stream(
    worker: OneWorker, tmp_path: Path, segment: int
) -> None:
    """Nothing of the step is committed, and the next rank streams the same step again."""
    async with worker.gang as gang:
        await worker.begin()
        assert await asyncio.to_thread(saved, 1) == ([1], 0)

        assert await asyncio.to_thread(rank_that_dies, tmp_path, segment) == PANIC_EXIT_CODE
        sidecar = gang.sidecars[0]
        await until(
            lambda: not files_below(sidecar.node, "*.tmp*"), "the temporary file is removed"
        )
        await worker.next_round(1)
        step, training = await asyncio.to_thread(restored)
        assert step == 1
        assert training.equals(Training(0).after(1))
        assert await asyncio.to_thread(lambda: saved(2, first=2)) == ([2], 0)
        await worker.next_round(2)
        step, training = await asyncio.to_thread(restored)
        assert step == 2
        assert training.equals(Training(0).after(2))


async def test_both_are_killed_within_a_stream(worker: OneWorker, tmp_path: Path) -> None:
    async with worker.gang as gang:
        await worker.begin()
        assert await asyncio.to_thread(saved, 1) == ([1], 0)
        sidecar = gang.sidecars[0]
        sidecar.kill()
        sidecar.start({VARIABLE: "stream.segment_read=panic@5"})
        await worker.sidecar_is_back()

        await asyncio.to_thread(rank_that_dies, tmp_path, 9)
        sidecar.kill()
        sidecar.start()
        await worker.sidecar_is_back()
        assert files_below(sidecar.node, "*.tmp*") == []
        assert await asyncio.to_thread(lambda: saved(2, first=2)) == ([2], 0)


async def test_a_write_that_fails_within_a_stream(worker: OneWorker) -> None:
    """The bytes before are no longer in memory, so that the save fails. The next one succeeds."""
    async with worker.gang as gang:
        gang.failpoints[0] = "node.mid_write=err:ENOSPC@1"
        await worker.begin()
        done, failed = await asyncio.to_thread(saved, 3)
        assert (done, failed) == ([2, 3], 1)


async def test_a_copy_that_fails_within_a_stream(worker: OneWorker) -> None:
    """The sidecar receives the notice, drops the segments that it has, and takes the next save."""

    async with worker.gang as gang:
        await worker.begin()
        with failpoints("stream.segment_copied=raise:MemoryError@9"):
            assert await asyncio.to_thread(saved, 1) == ([], 1)
        node = gang.sidecars[0].node
        await until(lambda: not files_below(node, "*.tmp*"), "the temporary file is removed")
        assert await asyncio.to_thread(lambda: saved(2, first=2)) == ([2], 0)


async def test_a_segment_of_no_stream_is_refused(worker: OneWorker) -> None:
    async with worker.gang as gang:
        await worker.begin()
        rank = await gang.connect_rank(0, 0)
        name = rank.names[0]
        rank.fill_slot(name, 5, bytes(100))
        stage = rank.stage_message(name, 5, bytes(300))
        for segment in (Segment(100, 200), Segment(0, 50), Segment(0, 1 << 40)):
            with pytest.raises(HoldfastError) as refused:
                await rank.request(StageSegment(stage, segment))
            assert getattr(refused.value, "code", None) is Refusal.BAD_REQUEST
