"""Files of pruned checkpoints are used again during a run, and none is left when it has ended."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.support.trainer.launched import until

import holdfast


def test_a_folder_at_rest_holds_only_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    spare = folder / "tier" / "spare"
    state = {"weights": torch.zeros(1 << 18)}
    with holdfast.Checkpointer(dir=folder, keep_last=1) as ckpt:
        ckpt.restore(state)
        for step in range(1, 5):
            state["weights"].fill_(step)
            ckpt.save(step, state).wait("local")
        until(lambda: len(list(spare.iterdir())) == 1, "the file of step 3 is spare")
    assert list(spare.iterdir()) == []
    assert len(list(folder.rglob("*.shard"))) == 1
    restored = {"weights": torch.zeros(1 << 18)}
    with holdfast.Checkpointer(dir=folder) as ckpt:
        assert ckpt.restore(restored) == 4
    assert torch.equal(restored["weights"], torch.full((1 << 18,), 4.0))
