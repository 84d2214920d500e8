"""The adapter for Megatron-core, by contract: objects with the attributes of its classes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.frameworks.kills import launched
from tests.support.frameworks.megatron_classes import ShardedObject, ShardedTensor, part
from tests.support.shards.shard_files import flip_bit

import holdfast
from holdfast.integrations import megatron
from holdfast_core.errors import CorruptionError, StateMismatchError, UnsupportedStateError

pytestmark = pytest.mark.timeout(600)

STAGES = Path(__file__).with_name("scripts") / "megatron_stages.py"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[holdfast.Checkpointer]:
    with holdfast.Checkpointer(tmp_path / "ckpt", on_save_error="raise") as opened:
        yield opened


def whole(value: float = 1.0) -> ShardedTensor:
    return part("weight", torch.full((2, 3), value), (2, 3), (0, 0))


def run(folder: Path, ranks: int, *arguments: str) -> str:
    command = ["env", f"PYTHONPATH={ROOT}", *launched(STAGES, *arguments, ranks=ranks)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_pipeline_stages_and_cut_tensors_load_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    assert run(tmp_path, 2, "no", "1").count("saved") == 2
    alone = run(tmp_path, 1, "1", "2")
    assert "loaded" in alone and "saved" in alone
    assert run(tmp_path, 2, "2", "no").count("loaded") == 2


def test_a_tensor_without_data_is_made_at_the_load(ckpt: holdfast.Checkpointer) -> None:
    megatron.save(1, {"w": whole(5.0)}, ckpt).wait(timeout=60)
    loaded = megatron.load({"w": replace(whole(), data=None)}, ckpt)
    assert loaded is not None
    assert loaded["w"].tolist() == [[5.0] * 3] * 2


def test_an_object_of_another_replica_is_not_saved(ckpt: holdfast.Checkpointer) -> None:
    state = {"w": whole(), "o": ShardedObject("o", 3, (1,), (0,), (0, 1))}
    megatron.save(1, state, ckpt).wait(timeout=60)
    with pytest.raises(StateMismatchError, match="the checkpoint has no megatron:object/o/0"):
        megatron.load(state, ckpt)


def test_a_missing_tensor_is_named(ckpt: holdfast.Checkpointer) -> None:
    megatron.save(1, {"w": whole()}, ckpt).wait(timeout=60)
    with pytest.raises(StateMismatchError, match="bias: the checkpoint has no tensor"):
        megatron.load({"b": replace(whole(), key="bias")}, ckpt)


def test_a_damaged_tensor_does_not_mix_two_steps(
    ckpt: holdfast.Checkpointer, tmp_path: Path
) -> None:
    def saved(value: int) -> dict[str, object]:
        large = part("weight", torch.full((300_000,), float(value)), (300_000,), (0,))
        return {"w": large, "iteration": value}

    for step in (1, 2):
        megatron.save(step, saved(step), ckpt).wait(timeout=60)
    ckpt.close()
    flip_bit(next(tmp_path.rglob("s000000000002-*/*.shard")), 700_000)
    with holdfast.Checkpointer(tmp_path / "ckpt") as again:
        with pytest.raises(CorruptionError, match="step 2 is damaged"):
            megatron.load(saved(0), again)
        loaded = megatron.load(saved(0), again)
    assert loaded is not None
    assert (float(loaded["w"][0]), loaded["iteration"]) == (1.0, 1)


def test_a_flattened_range_is_refused_with_its_key(tmp_path: Path) -> None:
    flat = replace(whole(), key="optimizer.exp_avg", flattened_range=slice(0, 3))
    ckpt = holdfast.Checkpointer(tmp_path / "ckpt")
    with pytest.raises(UnsupportedStateError, match=r"optimizer\.exp_avg: its flattened_range"):
        megatron.save(1, {"w": flat}, ckpt)


def test_there_may_be_nothing_to_load(ckpt: holdfast.Checkpointer) -> None:
    assert megatron.load({"w": whole()}, ckpt) is None
