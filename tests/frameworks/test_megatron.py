"""The adapter for Megatron-core: kills, other parallel sizes, and sharded state dicts that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from tests.support.frameworks.devices import train_page
from tests.support.frameworks.forked import Training, train_forked
from tests.support.frameworks.megatron_parts import part
from tests.support.frameworks.pages import script_of
from tests.support.gpu import needs_gpu
from tests.support.hang import HANG_SECONDS
from tests.support.shards.shard_files import flip_bit

import holdfast
from holdfast.integrations import megatron
from holdfast_core.errors import CorruptionError, StateMismatchError, UnsupportedStateError

pytestmark = pytest.mark.timeout(600)

SCRIPTS = Path(__file__).with_name("scripts")


PRELOAD = ["tests.support.frameworks.megatron_cpu", "holdfast.integrations.megatron"]


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[holdfast.Checkpointer]:
    with holdfast.Checkpointer(tmp_path / "ckpt", on_save_error="raise") as opened:
        yield opened


def whole(value: float = 1.0) -> ShardedTensor:
    return part("weight", torch.full((2, 3), value), (2, 3), (0, 0))


def tensors_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the whole tensors of the model and its optimizer, without values of the script."""
    with holdfast.open(folder) as checkpoints:
        found = checkpoints.at(step).tensors()
        return {name: one.read() for name, one in found.items() if not name.startswith("megatron:")}


def test_pipeline_stages_and_cut_tensors_load_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    plan = [
        Training(tmp_path, ("no", "1"), ranks=2),
        Training(tmp_path, ("1", "2"), ranks=1),
        Training(tmp_path, ("2", "no"), ranks=2),
    ]
    train_forked(SCRIPTS / "megatron_stages.py", plan, preload=PRELOAD)


@pytest.mark.parametrize("parallel", ["tensor", "data"])
def test_two_killed_ranks_end_in_the_same_bits(parallel: str, tmp_path: Path) -> None:
    page, size = script_of("megatron.md"), "torch.distributed.get_world_size()"
    assert size in page
    script = tmp_path / "train.py"
    script.write_text(page if parallel == "tensor" else page.replace(size, "1"))
    kills = Training(tmp_path / "killed", (), 3, 1, least_steps=4, most_steps=6, ranks=2)
    plan = [Training(tmp_path / "whole", ranks=2), kills]
    whole, killed = train_forked(script, plan, preload=PRELOAD)
    assert killed.digest == whole.digest
    assert len(set(killed.starts)) == killed.kills + 1  # every start continued from a later step


@needs_gpu
def test_a_killed_training_on_a_gpu_ends_in_the_same_bits(tmp_path: Path) -> None:
    options = {"kills": 2, "least_steps": 4, "most_steps": 6}
    whole, killed = train_page("megatron.md", "cuda", tmp_path, **options)
    assert killed.digest == whole.digest
    assert killed.starts[-1] > 1


def test_a_model_with_its_optimizer_loads_with_other_parallel_sizes(tmp_path: Path) -> None:
    """Data, tensor and pipeline parallel, and one rank: each loads what the one before has saved."""
    sizes = [(2, "1", "1"), (2, "2", "1"), (2, "1", "2"), (1, "1", "1")]
    plan = [
        Training(tmp_path, (*parallel, str(step)), ranks=ranks)
        for step, (ranks, *parallel) in enumerate(sizes, start=1)
    ]
    train_forked(SCRIPTS / "megatron_sizes.py", plan, preload=PRELOAD)
    first, *others = [tensors_of(tmp_path / "ckpt", step) for step in (1, 2, 3, 4)]
    assert sum("exp_avg_sq" in name for name in first) > 20
    for other in others:
        assert other.keys() == first.keys()
        assert [name for name in first if not torch.equal(other[name], first[name])] == []


def test_a_tensor_without_data_is_made_at_the_load(ckpt: holdfast.Checkpointer) -> None:
    megatron.save(1, {"w": whole(5.0)}, ckpt).wait(timeout=HANG_SECONDS)
    loaded = megatron.load({"w": replace(whole(), data=None)}, ckpt)
    assert loaded is not None
    assert loaded["w"].tolist() == [[5.0] * 3] * 2


def test_an_object_of_another_replica_is_not_saved(ckpt: holdfast.Checkpointer) -> None:
    state = {"w": whole(), "o": ShardedObject("o", 3, (1,), (0,), (0, 1))}
    megatron.save(1, state, ckpt).wait(timeout=HANG_SECONDS)
    with pytest.raises(StateMismatchError, match="the checkpoint has no megatron:object/o/0"):
        megatron.load(state, ckpt)


def test_a_missing_tensor_is_named(ckpt: holdfast.Checkpointer) -> None:
    megatron.save(1, {"w": whole()}, ckpt).wait(timeout=HANG_SECONDS)
    with pytest.raises(StateMismatchError, match="bias: the checkpoint has no tensor"):
        megatron.load({"b": replace(whole(), key="bias")}, ckpt)


@pytest.mark.fault("A tensor is damaged that a load of Megatron needs")
def test_a_damaged_tensor_does_not_mix_two_steps(
    ckpt: holdfast.Checkpointer, tmp_path: Path
) -> None:
    def saved(value: int) -> dict[str, object]:
        large = part("weight", torch.full((300_000,), float(value)), (300_000,), (0,))
        return {"w": large, "iteration": value}

    for step in (1, 2):
        megatron.save(step, saved(step), ckpt).wait(timeout=HANG_SECONDS)
    ckpt.close()
    flip_bit(next(tmp_path.rglob("s000000000002-*/*.shard")), 700_000)
    with holdfast.Checkpointer(tmp_path / "ckpt") as again:
        with pytest.raises(CorruptionError, match="step 2 is damaged"):
            megatron.load(saved(0), again)
        loaded = megatron.load(saved(0), again)
    assert loaded is not None
    assert (float(loaded["w"][0]), loaded["iteration"]) == (1.0, 1)


def test_a_flattened_range_is_refused_with_its_key(tmp_path: Path) -> None:
    flat = replace(whole(), key="optimizer.exp_avg")
    flat.flattened_range = slice(0, 3)  # newer releases of Megatron refuse it in the constructor
    ckpt = holdfast.Checkpointer(tmp_path / "ckpt")
    with pytest.raises(UnsupportedStateError, match=r"optimizer\.exp_avg: its flattened_range"):
        megatron.save(1, {"w": flat}, ckpt)


def test_there_may_be_nothing_to_load(ckpt: holdfast.Checkpointer) -> None:
    assert megatron.load({"w": whole()}, ckpt) is None
