"""`peek` shows what a restore would load: the same on every rank, without reading a tensor."""

from __future__ import annotations

import enum
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.counted import Training
from tests.support.trainer.launched import run_two_ranks
from tests.support.trainer.watched_sidecar import WatchedSidecar

import holdfast
from holdfast import TensorInfo
from holdfast_core.errors import ConfigError, CorruptionError


class Mode(enum.Enum):
    WARM = "warm"


class Trainer:
    def __init__(self, seen: int = 0) -> None:
        self.seen = seen

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "order": torch.arange(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def state_of(seen: int = 0) -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    return {
        "model": model,
        "optim": torch.optim.SGD(model.parameters(), lr=0.5),
        "trainer": Trainer(seen),
        "mode": Mode.WARM,
        "parts": [torch.zeros(2, dtype=torch.complex128), {"n": seen}],
        "array": np.zeros(4, np.int16),
        "rng": holdfast.RNG(),
    }


def expect_step_2(found: holdfast.RestorePoint | None) -> None:
    assert found.step == 2
    assert found.tensors == {
        "model.weight": TensorInfo("float32", (2, 3)),
        "model.bias": TensorInfo("float32", (2,)),
        "parts.0": TensorInfo("complex128", (2,)),
        "array": TensorInfo("int16", (4,)),
    }
    objects = found.objects
    assert objects["trainer"] == {"seen": 7, "order": TensorInfo("int64", (3,))}
    assert objects["mode"] == "warm"
    assert objects["parts"] == [TensorInfo("complex128", (2,)), {"n": 7}]
    assert objects["model"]["bias"] == TensorInfo("float32", (2,))
    assert objects["optim"]["param_groups"][0]["lr"] == 0.5


def test_a_folder_shows_what_a_restore_loads(tmp_path: Path) -> None:
    with holdfast.Checkpointer(dir=tmp_path) as ckpt:
        assert ckpt.peek() is None
        assert ckpt.restore(state_of()) is None
        ckpt.save(2, state_of(7)).wait(timeout=HANG_SECONDS)
    with holdfast.Checkpointer(dir=tmp_path) as ckpt:
        expect_step_2(ckpt.peek())
        state = state_of()
        assert ckpt.restore(state) == 2
        assert state["trainer"].seen == 7
        expect_step_2(ckpt.peek())


def test_a_sidecar_shows_what_a_restore_loads(
    sidecar: WatchedSidecar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with holdfast.Checkpointer() as ckpt:
        assert ckpt.peek() is None
        ckpt.allocate(state_of())
        ckpt.save(2, state_of(7)).wait(timeout=HANG_SECONDS)
        with pytest.raises(ConfigError, match="end the process"):
            ckpt.peek()
    sidecar.stop()
    sidecar.start()
    monkeypatch.setenv("HOLDFAST_ROUND", str(sidecar.round))
    state = state_of()
    with holdfast.Checkpointer() as ckpt, caplog.at_level(logging.INFO, "holdfast"):
        expect_step_2(ckpt.peek())
        assert ckpt.restore(state) == 2
    assert state["trainer"].seen == 7
    # The slots still hold the shard, although the objects were read into a slot meanwhile.
    assert "rank 0 restored step 2 from memory" in caplog.text


def test_the_slot_of_a_look_is_removed(tmp_path: Path) -> None:
    slots = tmp_path / "slots"
    slots.mkdir()
    with holdfast.Checkpointer(holdfast.Folder(tmp_path / "ckpt", slots_dir=slots)) as ckpt:
        ckpt.save(2, state_of(7)).wait(timeout=HANG_SECONDS)
    with holdfast.Checkpointer(holdfast.Folder(tmp_path / "ckpt", slots_dir=slots)) as ckpt:
        expect_step_2(ckpt.peek())
        assert list(slots.rglob("*.slot")) == []


def test_a_state_without_entries(tmp_path: Path) -> None:
    with holdfast.Checkpointer(dir=tmp_path) as ckpt:
        ckpt.save(1, {}).wait(timeout=HANG_SECONDS)
        assert ckpt.peek() == holdfast.RestorePoint(1, {}, {})


@pytest.mark.fault("A newer checkpoint is committed between peek and restore")
def test_a_restore_loads_the_step_that_was_looked_at(tmp_path: Path) -> None:
    training, other = Training(), Training()
    with holdfast.Checkpointer(holdfast.Folder(tmp_path, keep_last=9)) as trains:
        trains.save(1, training.state).wait(timeout=HANG_SECONDS)
        with holdfast.Checkpointer(dir=tmp_path) as looks:
            found = looks.peek()
            assert found.step == 1
            trains.save(2, training.state).wait(timeout=HANG_SECONDS)
            assert looks.restore(other.state) == 1


def test_after_a_save_the_newest_checkpoint_is_shown_and_restored(tmp_path: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(dir=tmp_path) as ckpt:
        for step in (1, 2):
            training.step()
            ckpt.save(step, training.state)
            found = ckpt.peek()
            assert found.step == step
            assert ckpt.restore(training.state) == step


def damage(folder: Path, step: int, where: bytes) -> None:
    (shard,) = folder.rglob(f"s{step:012d}-*/*.shard")
    data = bytearray(shard.read_bytes())
    data[data.rindex(where)] ^= 1
    shard.write_bytes(data)


def two_steps(folder: Path) -> dict[str, Any]:
    """Save steps 1 and 2 of a tensor that fills several chunks."""
    state = {"t": torch.zeros(1 << 20, dtype=torch.uint8), "text": "the objects"}
    with holdfast.Checkpointer(dir=folder, when_busy="wait") as ckpt:
        for step in (1, 2):
            state["t"][1000:1004] = torch.tensor([7, 77, step, 7])
            ckpt.save(step, state).wait(timeout=HANG_SECONDS)
    return state


@pytest.mark.fault("A tensor of the checkpoint that a script looked at is damaged")
def test_no_tensor_is_read(tmp_path: Path) -> None:
    """A damaged tensor is found by the restore, and all ranks then restore an older step."""
    state = two_steps(tmp_path)
    damage(tmp_path, 2, bytes([7, 77, 2, 7]))
    with holdfast.Checkpointer(dir=tmp_path) as ckpt:
        found = ckpt.peek()
        assert found.step == 2
        assert ckpt.restore(state) == 1
        found = ckpt.peek()
        assert found.step == 1


@pytest.mark.fault("The objects of a checkpoint are damaged when a script looks at it")
def test_damaged_objects_are_not_shown(tmp_path: Path) -> None:
    state = two_steps(tmp_path)
    damage(tmp_path, 2, b"the objects")
    with holdfast.Checkpointer(dir=tmp_path) as ckpt:
        found = ckpt.peek()
        assert found.step == 1
        assert ckpt.restore(state) == 1
    damage(tmp_path, 1, b"the objects")
    with (
        holdfast.Checkpointer(dir=tmp_path) as ckpt,
        pytest.raises(CorruptionError, match="none that can be restored"),
    ):
        ckpt.peek()


PROGRAM = """
import pathlib, sys
import torch, holdfast
from torch import distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

class Data:
    position = 0
    def state_dict(self):
        return {"position": self.position, "order": torch.arange(2)}
    def load_state_dict(self, state):
        self.position = state["position"]

def agreed(value):
    values = [None] * world
    dist.all_gather_object(values, value)
    assert values.count(values[0]) == world, values
    return values[0]

state = {"w": torch.zeros(1 << 20, dtype=torch.uint8), "data": Data(), "n": 0}

def expect(found, step):
    assert found.tensors == {"w": holdfast.TensorInfo("uint8", (1 << 20,))}, found
    assert found.objects["n"] == found.step == step, found
    order = holdfast.TensorInfo("int64", (2,))
    assert found.objects["data"] == {"position": 10 * step, "order": order}, found

def shard_of(step, number):
    return next(pathlib.Path(sys.argv[1]).rglob(f"s{step:012d}-*/rank{number:06d}-*.shard"))

def damage(step, number, text):
    if rank == 0:
        data = bytearray(shard_of(step, number).read_bytes())
        data[data.index(text)] ^= 1
        shard_of(step, number).write_bytes(data)
    dist.barrier()

with holdfast.Checkpointer(holdfast.Folder(sys.argv[1], keep_last=9), when_busy="wait") as ckpt:
    for step in (1, 2, 3):
        state["n"] = step
        state["data"].position = 10 * step + rank
        ckpt.save(step, state)

with holdfast.Checkpointer(dir=sys.argv[1]) as ckpt:
    for _ in range(2):
        expect(agreed(ckpt.peek()), 3)
    assert agreed(ckpt.restore(state)) == 3 == state["n"]
    assert state["data"].position == 30 + rank
    damage(3, 1, b'"position",31')
    assert agreed(ckpt.restore(state)) == 2, "the verdict of the first restore was read again"
    damage(2, 0, b'"position",20')
    expect(agreed(ckpt.peek()), 1)
    assert agreed(ckpt.restore(state)) == 1
"""


@pytest.mark.fault("Ranks find a damaged checkpoint in the second restore of one start")
def test_ranks_see_the_same_and_agree_on_an_older_step_if_it_is_damaged(tmp_path: Path) -> None:
    run_two_ranks(PROGRAM, tmp_path)
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:  # one rank looks at what two saved
        found = ckpt.peek()
    assert found.objects["data"]["position"] == 10


WITHOUT_A_LAYOUT = """
import pathlib, sys
import torch, holdfast
from torch import distributed as dist
from holdfast_core.errors import CorruptionError

dist.init_process_group("gloo")
rank = dist.get_rank()
state = {"w": torch.zeros(8), "rng": holdfast.RNG()}
with holdfast.Checkpointer(dir=sys.argv[1]) as ckpt:
    ckpt.save(1, state)
if rank == 0:
    layouts = (pathlib.Path(sys.argv[1]) / "tier" / "layouts").rglob("*.json")
    (own,) = [path for path in layouts if b"@rank0" in path.read_bytes()]
    own.write_bytes(b"{}")
dist.barrier()
with holdfast.Checkpointer(dir=sys.argv[1]) as ckpt:
    try:
        ckpt.peek()
    except CorruptionError:
        print("refused", flush=True)
    else:
        raise AssertionError("a checkpoint without the layout of rank 0 was shown")
"""


@pytest.mark.fault("The layout of rank 0 is damaged when a gang looks at a checkpoint")
def test_no_rank_waits_if_the_layout_of_rank_0_is_damaged(tmp_path: Path) -> None:
    """Rank 0 fails before it has anything to hand over."""
    run_two_ranks(WITHOUT_A_LAYOUT, tmp_path)
