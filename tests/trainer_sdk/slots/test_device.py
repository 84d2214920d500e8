"""The guarantees of test_device_copies.py on a real GPU, and page-locking. Skipped without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.gpu import needs_gpu
from tests.support.hang import HANG_SECONDS

import holdfast
from holdfast.slots.device import CudaDevice
from holdfast.state.tensors import uses_gpu
from holdfast_core.errors import DeviceError

LAG_CYCLES = 1_000_000_000
"""Cycles of about half a second. Copies queued behind such a delay are unfinished when training continues."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_process_without_a_gpu_uses_none() -> None:
    assert not uses_gpu()


def make(width: int = 2048) -> dict[str, Any]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    odd = torch.arange(12.0, device="cuda").to(torch.complex128).reshape(3, 4)
    return {"model": model, "optim": optimizer, "odd": {"t": odd.t(), "c": odd}, "n": 3}


def step(state: dict[str, Any]) -> None:
    model, optimizer = state["model"], state["optim"]
    model(torch.randn(8, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    optimizer = state["optim"].state_dict()["state"]
    entries = [value for entry in optimizer.values() for value in entry.values()]
    found = [*state["model"].state_dict().values(), *entries, *state["odd"].values()]
    return [tensor.detach().clone() for tensor in found]


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[holdfast.Checkpointer]:
    with holdfast.Checkpointer(dir=tmp_path / "ckpt", interval_steps=0) as opened:
        yield opened


def restored(tmp_path: Path) -> list[torch.Tensor]:
    state = make()
    step(state)
    for tensor in state["odd"].values():
        tensor.zero_()
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as again:
        again.restore(state)
    return tensors(state)


@needs_gpu
@pytest.mark.parametrize("steps_before", [0, 1], ids=["optimizer-unknown", "optimizer-known"])
def test_saved_bytes_are_those_of_the_step(tmp_path: Path, steps_before: int) -> None:
    """With a known optimizer, tensors are copied while training runs. Otherwise all copies finish first."""
    with holdfast.Checkpointer(dir=tmp_path / "ckpt", interval_steps=0) as ckpt:
        state = make()
        step(state)
        ckpt.restore(state)
        ckpt.allocate(state)
        for _ in range(steps_before):
            step(state)
        expected = tensors(state)
        torch.cuda._sleep(LAG_CYCLES)
        handle = ckpt.save(1, state)
        for _ in range(3):
            step(state)
        handle.wait(timeout=HANG_SECONDS)
        assert not torch.equal(tensors(state)[0], expected[0])
    for found, wanted in zip(restored(tmp_path), expected, strict=True):
        assert found.device == wanted.device
        assert torch.equal(found, wanted)


@needs_gpu
def test_save_returns_before_the_copies_are_done(ckpt: holdfast.Checkpointer) -> None:
    state = make()
    ckpt.allocate(state)
    step(state)
    ckpt.save(1, state).wait(timeout=HANG_SECONDS)
    step(state)
    torch.cuda._sleep(LAG_CYCLES)
    end = torch.cuda.Event()
    end.record()
    handle = ckpt.save(2, state)
    assert not end.query()
    handle.wait(timeout=HANG_SECONDS)


@needs_gpu
def test_wait_staged_delays_later_writes_of_the_script(tmp_path: Path) -> None:
    with holdfast.Checkpointer(dir=tmp_path / "ckpt", interval_steps=0) as ckpt:
        state = make()
        ckpt.allocate(state)
        step(state)
        expected = tensors(state)
        torch.cuda._sleep(LAG_CYCLES)
        handle = ckpt.save(1, state)
        ckpt.wait_staged()
        for parameter in state["model"].parameters():
            parameter.data.fill_(-1)
        handle.wait(timeout=HANG_SECONDS)
    assert all(map(torch.equal, restored(tmp_path), expected))


@needs_gpu
def test_slots_are_page_locked_until_the_end(ckpt: holdfast.Checkpointer) -> None:
    ckpt.allocate(make())
    payloads = [torch.from_numpy(slot.payload) for slot in ckpt._opened.ring.slots]
    assert [payload.is_pinned() for payload in payloads] == [True, True]
    ckpt.close()
    assert [payload.is_pinned() for payload in payloads] == [False, False]


@needs_gpu
def test_a_refused_page_lock_is_not_blamed_on_the_next_kernel() -> None:
    torch.zeros(1, device="cuda")
    device, memory = CudaDevice(), np.zeros(1 << 20, dtype=np.uint8)
    device.pin(memory.ctypes.data, memory.nbytes)
    with pytest.raises(DeviceError, match="cudaHostRegister returned 712"):
        device.pin(memory.ctypes.data, memory.nbytes)
    assert torch.ones(3, device="cuda").sum().item() == 3
    device.unpin(memory.ctypes.data)
    device.unpin(memory.ctypes.data)
    assert torch.ones(3, device="cuda").sum().item() == 3
