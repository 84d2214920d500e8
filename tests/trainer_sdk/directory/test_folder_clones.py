"""Checkpoints of states that are frozen except for an adapter, on a file system that can clone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiers.volumes import cannot_make, free_bytes, make_image, mounted

import holdfast

MIB = 1 << 20
why_not = cannot_make("xfs")


def state() -> dict[str, Any]:
    """Return 16 MiB that no step changes, and an adapter of 0.25 MiB with its optimizer."""
    torch.manual_seed(0)
    base = torch.nn.Linear(2048, 2048, bias=False).requires_grad_(False)
    adapter = torch.nn.Linear(2048, 32, bias=False)
    model = torch.nn.ModuleDict({"base": base, "adapter": adapter})
    return {"model": model, "optim": torch.optim.AdamW(adapter.parameters())}


def train(folder: Path, steps: range) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Train and save each step. Return the model at the end, and the bytes of the volume that each save
    used."""
    own = state()
    model, optimizer = own["model"], own["optim"]
    used = []
    with holdfast.Checkpointer(dir=folder, keep_last=3) as ckpt:
        assert (ckpt.restore(own) or 0) == steps.start
        for step in steps:
            free = free_bytes(folder)
            model["adapter"](model["base"](torch.ones(1, 2048))).sum().backward()
            optimizer.step()
            ckpt.save(step + 1, own).wait("local")
            used.append(free - free_bytes(folder))
    return model.state_dict(), used


@pytest.mark.skipif(why_not is not None, reason=str(why_not))
def test_a_frozen_base_is_stored_once_in_a_run(tmp_path: Path) -> None:
    make_image("xfs", tmp_path / "image")
    with mounted(tmp_path / "image", tmp_path / "volume") as volume:
        folder = volume / "ckpt"
        folder.mkdir()
        trained, used = train(folder, range(6))
        assert min(used[:2]) > 16 * MIB, "the first two saves of a run are written whole"
        assert max(used[2:]) < 3 * MIB
        again, used = train(folder, range(6, 10))
        assert min(used[:2]) > 14 * MIB, "of another run, too"
        restored = state()
        with holdfast.Checkpointer(dir=folder) as ckpt:
            assert ckpt.restore(restored) == 10
    assert torch.equal(trained["base.weight"], again["base.weight"])
    for name, value in restored["model"].state_dict().items():
        assert torch.equal(value, again[name]), name
