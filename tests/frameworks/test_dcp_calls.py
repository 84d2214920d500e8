"""Calls of torch.distributed.checkpoint with a Holdfast Checkpointer, in one process without a gang."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from tests.support.hang import HANG_SECONDS
from tests.support.shards.shard_files import flip_bit
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import holdfast
from holdfast.integrations import dcp
from holdfast_core.errors import ConfigError, CorruptionError, NotFoundError, UnsupportedStateError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[holdfast.Checkpointer]:
    options: Any = {"when_busy": "wait", "on_save_error": "raise"}
    with holdfast.Checkpointer(
        holdfast.Folder(tmp_path / "ckpt", keep_last=9), **options
    ) as opened:
        yield opened


@pytest.fixture
def unopened(tmp_path: Path) -> holdfast.Checkpointer:
    """Return a Checkpointer for calls that are refused before they use it."""
    return holdfast.Checkpointer(tmp_path / "ckpt")


def state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"layer.weight": torch.full((2, 3), value), "layer.bias": torch.ones(2)},
        "optim": {
            "param_groups": [{"lr": 0.1, "params": ["layer.weight"]}],
            "parts": [torch.ones(1)],
        },
        "epoch": 3,
    }


def test_a_state_comes_back_as_it_was_saved(ckpt: holdfast.Checkpointer) -> None:
    dcp.save(state(5.0), storage_writer=dcp.StorageWriter(ckpt, 7))
    loaded = state(0.0)
    loaded["epoch"] = 0
    loaded["optim"]["param_groups"][0]["lr"] = 9.9
    dcp.load(loaded, storage_reader=dcp.StorageReader(ckpt))
    assert loaded["model"]["layer.weight"].tolist() == [[5.0] * 3] * 2
    assert loaded["epoch"] == 3
    assert loaded["optim"]["param_groups"] == [{"lr": 0.1, "params": ["layer.weight"]}]


@pytest.mark.fault("A tensor is damaged that a load of DCP needs")
def test_a_damaged_tensor_does_not_mix_two_steps(
    ckpt: holdfast.Checkpointer, tmp_path: Path
) -> None:
    def saved(step: int) -> dict[str, Any]:
        return {"weight": torch.full((300_000,), float(step)), "epoch": step}

    for step in (1, 2):
        dcp.save(saved(step), storage_writer=dcp.StorageWriter(ckpt, step))
    ckpt.close()
    flip_bit(next(tmp_path.rglob("s000000000002-*/*.shard")), 700_000)
    with holdfast.Checkpointer(tmp_path / "ckpt") as again:
        loaded = saved(0)
        with pytest.raises(
            CorruptionError, match="step 2 is damaged, and the tensors are those of"
        ):
            dcp.load(loaded, storage_reader=dcp.StorageReader(again))
        dcp.load(loaded, storage_reader=dcp.StorageReader(again))
    assert (float(loaded["weight"][0]), loaded["epoch"]) == (1.0, 1)


def test_a_stateful_object_is_loaded_by_its_own_method(ckpt: holdfast.Checkpointer) -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    dcp.save({"app": model}, storage_writer=dcp.StorageWriter(ckpt, 1))
    dcp.load({"app": other}, storage_reader=dcp.StorageReader(ckpt))
    assert torch.equal(model.weight, other.weight)


def test_torchs_own_functions_take_the_classes(ckpt: holdfast.Checkpointer) -> None:
    torch_dcp.save(state(1.0), storage_writer=dcp.StorageWriter(ckpt, 1))
    writer = dcp.StorageWriter(ckpt, 2)
    current = state(2.0)
    future = torch_dcp.async_save(current, storage_writer=writer, no_dist=True)
    current["model"]["layer.weight"].zero_()  # the copy was made before async_save returned
    future.result(timeout=HANG_SECONDS)
    for step, value in ((1, 1.0), (2, 2.0)):
        loaded = state(0.0)
        torch_dcp.load(loaded, storage_reader=dcp.StorageReader(ckpt, step))
        assert loaded["model"]["layer.weight"].eq(value).all()


def test_async_save_ends_when_the_step_is_durable(ckpt: holdfast.Checkpointer) -> None:
    current = state(2.0)
    future = dcp.async_save(current, storage_writer=dcp.StorageWriter(ckpt, 4))
    current["model"]["layer.weight"].zero_()
    assert future.result(timeout=HANG_SECONDS).durable
    dcp.load(current, storage_reader=dcp.StorageReader(ckpt))
    assert current["model"]["layer.weight"].eq(2.0).all()


def test_a_part_of_the_state_is_loaded_alone(ckpt: holdfast.Checkpointer) -> None:
    dcp.save(state(5.0), storage_writer=dcp.StorageWriter(ckpt, 1))
    part = {"model": {"layer.bias": torch.zeros(2)}}
    dcp.load(part, storage_reader=dcp.StorageReader(ckpt))
    assert part["model"]["layer.bias"].tolist() == [1, 1]
    assert list(part["model"]) == ["layer.bias"]


def test_values_are_cast_to_the_dtype_of_the_state(ckpt: holdfast.Checkpointer) -> None:
    dcp.save(state(5.0), storage_writer=dcp.StorageWriter(ckpt, 1))
    part = {"model": {"layer.weight": torch.zeros(2, 3, dtype=torch.bfloat16)}}
    dcp.load(part, storage_reader=dcp.StorageReader(ckpt))
    assert part["model"]["layer.weight"].dtype is torch.bfloat16
    assert part["model"]["layer.weight"].eq(5.0).all()


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"model": {"layer.weight": torch.zeros(3, 3)}}, "Size mismatch"),
        ({"model": {"other": torch.zeros(3)}}, "Missing key in checkpoint state_dict: model.other"),
    ],
)
def test_another_shape_and_a_missing_key_raise_as_in_dcp(
    ckpt: holdfast.Checkpointer, wrong: dict[str, Any], message: str
) -> None:
    dcp.save(state(), storage_writer=dcp.StorageWriter(ckpt, 1))
    with pytest.raises(CheckpointException, match=message):
        dcp.load(wrong, storage_reader=dcp.StorageReader(ckpt))


def test_a_load_planner_of_the_user_is_honoured(ckpt: holdfast.Checkpointer) -> None:
    dcp.save(state(5.0), storage_writer=dcp.StorageWriter(ckpt, 1))
    partly = {"model": {"layer.bias": torch.zeros(2), "new": torch.zeros(3)}}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(partly, storage_reader=dcp.StorageReader(ckpt), planner=planner)
    assert partly["model"]["layer.bias"].tolist() == [1, 1]
    assert not partly["model"]["new"].any()


class Doubling(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        if isinstance(object, torch.Tensor):
            return object * 2
        return super().transform_object(write_item, object)


def test_a_save_planner_of_the_user_is_honoured(ckpt: holdfast.Checkpointer) -> None:
    dcp.save(state(5.0), storage_writer=dcp.StorageWriter(ckpt, 1), planner=Doubling())
    torch_dcp.save(state(6.0), storage_writer=dcp.StorageWriter(ckpt, 2), planner=Doubling())
    for step, value in ((1, 10.0), (2, 12.0)):
        loaded = state()
        dcp.load(loaded, storage_reader=dcp.StorageReader(ckpt, step))
        assert loaded["model"]["layer.weight"].eq(value).all()


def test_a_planner_that_torch_would_not_use_is_refused(ckpt: holdfast.Checkpointer) -> None:
    writer = dcp.StorageWriter(ckpt, 1)
    future = torch_dcp.async_save(state(), storage_writer=writer, planner=Doubling(), no_dist=True)
    with pytest.raises(CheckpointException, match="without the planner Doubling"):
        future.result(timeout=HANG_SECONDS)


def test_nothing_is_pickled_into_the_checkpoint(
    ckpt: holdfast.Checkpointer, tmp_path: Path
) -> None:
    dcp.save({**state(), "words": ["a"]}, storage_writer=dcp.StorageWriter(ckpt, 1))
    files = [path for path in (tmp_path / "ckpt").rglob("*") if path.is_file()]
    data = b"".join(path.read_bytes() for path in files)
    assert b'["words",["a"]]' in data
    assert pickle.dumps(["a"])[:2] not in data
    assert b"PK\x03\x04" not in data  # the archive of torch.save


def test_what_json_cannot_hold_is_refused_by_its_name(ckpt: holdfast.Checkpointer) -> None:
    with pytest.raises(UnsupportedStateError, match=r"dcp:objects.*extra.*builtins\.object"):
        dcp.save({**state(), "extra": object()}, storage_writer=dcp.StorageWriter(ckpt, 1))


def test_a_save_in_another_process_is_refused(unopened: holdfast.Checkpointer) -> None:
    writer = dcp.StorageWriter(unopened, 1)
    with pytest.raises(ConfigError, match="leave async_checkpointer_type out"):
        dcp.async_save(
            state(),
            storage_writer=writer,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
    with pytest.raises(ConfigError, match="leave async_checkpointer_type out"):
        pickle.dumps(writer)  # what torch's own async_save does with it


def test_a_stager_of_the_user_is_refused(unopened: holdfast.Checkpointer) -> None:
    stager = BlockingAsyncStager()
    with pytest.raises(ConfigError, match="async_stager=BlockingAsyncStager has no use"):
        dcp.async_save(state(), storage_writer=dcp.StorageWriter(unopened, 1), async_stager=stager)


def test_a_planner_that_caches_plans_is_refused(ckpt: holdfast.Checkpointer) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(state(), storage_writer=dcp.StorageWriter(ckpt, 1), planner=planner)
    planner.finish_plan(planner.plan)
    with pytest.raises(ConfigError, match="leave enable_plan_caching out"):
        dcp.save(state(), storage_writer=dcp.StorageWriter(ckpt, 2), planner=planner)


def test_a_load_without_a_checkpoint_says_so(ckpt: holdfast.Checkpointer) -> None:
    with pytest.raises(NotFoundError, match="there is no checkpoint to load"):
        dcp.load(state(), storage_reader=dcp.StorageReader(ckpt))


@pytest.mark.parametrize("name", ["latest", "epoch-3-loss-25", "step-3a", "step"])
def test_a_checkpoint_id_without_one_number_at_its_end_is_refused(
    unopened: holdfast.Checkpointer, name: str
) -> None:
    with pytest.raises(ConfigError, match="expected the number of optimizer steps"):
        dcp.save(state(), checkpoint_id=f"out/{name}", storage_writer=dcp.StorageWriter(unopened))


def test_a_checkpoint_id_that_contradicts_the_writer_is_refused(
    unopened: holdfast.Checkpointer,
) -> None:
    with pytest.raises(ConfigError, match="it is for step 3, and checkpoint_id='step-4'"):
        dcp.save(state(), checkpoint_id="step-4", storage_writer=dcp.StorageWriter(unopened, 3))


def test_a_checkpoint_id_names_the_step_to_load(ckpt: holdfast.Checkpointer) -> None:
    for step in (1, 2):
        dcp.save(state(step), checkpoint_id=step, storage_writer=dcp.StorageWriter(ckpt))
    loaded = state()
    dcp.load(loaded, checkpoint_id="anywhere/step_1", storage_reader=dcp.StorageReader(ckpt))
    assert loaded["model"]["layer.weight"].eq(1.0).all()


def test_other_writers_and_readers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="storage_writer is a FileSystemWriter"):
        dcp.save(state(), storage_writer=torch_dcp.FileSystemWriter(tmp_path))
    with pytest.raises(ConfigError, match="storage_reader is a FileSystemReader"):
        dcp.load(state(), storage_reader=torch_dcp.FileSystemReader(tmp_path))
