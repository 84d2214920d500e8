"""Files of pruned checkpoints are used again during a run, and none is left when it has ended."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.shards.builders import BytesSource, payload, shard_header
from tests.support.trainer.launched import until

import holdfast
from holdfast.directory.open_folder import OpenFolder, ServiceOptions
from holdfast_core.errors import CapacityError
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.messages.schema import Policy


def test_a_folder_at_rest_holds_only_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    spare = folder / "tier" / "spare"
    state = {"weights": torch.zeros(1 << 18)}
    with holdfast.Checkpointer(holdfast.Folder(folder, keep_last=1)) as ckpt:
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


@pytest.mark.fault("A full folder has spare files")
def test_spare_files_make_room_before_anything_else_does(tmp_path: Path) -> None:
    """Also for a record, which the tier does not write. The file of what is deleted is spare at first."""
    folder = OpenFolder.open(
        ServiceOptions(
            tmp_path / "ckpt",
            tmp_path / "slots",
            tmp_path / "layouts",
            world_size=1,
            own_ranks=range(1),
            policy=Policy(interval_steps=1),
        )
    )
    spare = tmp_path / "ckpt" / "tier" / "spare"
    for step in (1, 2, 3):
        header = shard_header(5000, step=step, rank=0, world_size=1)
        folder.tier.write_shard(header, BytesSource(payload(5000, seed=step)))
    folder.tier.delete_shard(folder.tier.list_shards()[0].ref)
    deleted: list[CheckpointId] = []
    tries: list[int] = []

    def write(enough: int) -> int:
        tries.append(len(list(spare.iterdir())))
        if tries[-1] or len(folder.tier.list_shards()) > enough:
            raise CapacityError("the disk is full")
        return enough

    wanted = CheckpointId(Step(4), RestartRound(0))
    assert folder.write(wanted, lambda: write(2), deleted.append) == 2
    assert (tries, deleted) == ([1, 0], [])
    tries.clear()
    assert folder.write(wanted, lambda: write(1), deleted.append) == 1
    assert (tries, [gone.step for gone in deleted]) == ([0, 1, 0], [2])
