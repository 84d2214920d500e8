"""`Checkpointer.restore_tensors`: tensors by name, and the saved values that are no tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.hang import HANG_SECONDS

import holdfast
from holdfast_core.errors import StateMismatchError


class Position:
    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = values


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a checkpoint of step 3."""
    state = {
        "model": torch.nn.Linear(3, 2),
        "ema": {"weight": torch.arange(6.0).reshape(2, 3)},
        "phases": torch.tensor([1 + 2j], dtype=torch.complex128),
        "epoch": 4,
        "data": Position(order=np.arange(3), done=7),
    }
    with holdfast.Checkpointer(tmp_path / "ckpt", on_save_error="raise") as ckpt:
        ckpt.save(3, state).wait(timeout=HANG_SECONDS)
    return tmp_path / "ckpt"


def test_tensors_are_loaded_by_name_and_cast_to_the_dtype_of_the_target(folder: Path) -> None:
    half = torch.zeros(2, 3, dtype=torch.bfloat16)
    phases = torch.zeros(1, dtype=torch.complex128)
    with holdfast.Checkpointer(folder) as ckpt:
        found = ckpt.restore_tensors({"ema.weight": half, "phases": phases})
    assert found is not None and found.step == 3
    assert half.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert phases.tolist() == [1 + 2j]


def test_without_names_it_shows_what_the_checkpoint_holds(folder: Path) -> None:
    with holdfast.Checkpointer(folder) as ckpt:
        found = ckpt.restore_tensors({})
    shapes = {name: (one.dtype, one.shape) for name, one in found.tensors.items()}
    assert shapes == {
        "model.weight": ("float32", (2, 3)),
        "model.bias": ("float32", (2,)),
        "ema.weight": ("float32", (2, 3)),
        "phases": ("complex128", (1,)),
    }
    assert found.objects["epoch"] == 4
    assert found.objects["ema"] == {"weight": found.tensors["ema.weight"]}
    assert found.objects["data"]["done"] == 7
    assert found.objects["data"]["order"].tolist() == [0, 1, 2]


def test_a_missing_name_and_another_shape_are_named_and_nothing_is_loaded(folder: Path) -> None:
    good, wrong = torch.zeros(2, 3), torch.zeros(3, 3)
    with (
        holdfast.Checkpointer(folder) as ckpt,
        pytest.raises(StateMismatchError) as caught,
    ):
        ckpt.restore_tensors({"ema.weight": good, "model.weight": wrong, "ema.bias": good})
    message = str(caught.value)
    assert "model.weight: expected F32 [3, 3], found F32 [2, 3]" in message
    assert "ema.bias: the checkpoint has no tensor of this name" in message
    assert not good.any()


def test_an_empty_folder_has_nothing_to_restore(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path / "ckpt") as ckpt:
        assert ckpt.restore_tensors({}) is None


def test_it_rolls_back_to_the_step_that_is_asked_for(tmp_path: Path) -> None:
    weight = torch.zeros(2)
    with holdfast.Checkpointer(
        holdfast.Folder(tmp_path, keep_last=9), on_save_error="raise"
    ) as ckpt:
        for step in (1, 2, 3):
            weight += 1
            ckpt.save(step, {"weight": weight}).wait(timeout=HANG_SECONDS)
        found = ckpt.restore_tensors({"weight": weight}, step=2)
        assert found is not None and found.step == 2
        assert weight.tolist() == [2, 2]
        ckpt.save(3, {"weight": weight * 10}).wait(timeout=HANG_SECONDS)
    with holdfast.Checkpointer(tmp_path) as ckpt:
        ckpt.restore_tensors({"weight": weight})
    assert weight.tolist() == [20, 20]


def test_training_saves_whole_states_after_a_restore_of_some_tensors(folder: Path) -> None:
    state = {"model": torch.nn.Linear(300, 200), "epoch": 1}
    with holdfast.Checkpointer(folder, on_save_error="raise") as ckpt:
        ckpt.restore_tensors({"ema.weight": torch.zeros(2, 3)})
        ckpt.save(4, state).wait(timeout=HANG_SECONDS)
    with holdfast.Checkpointer(folder) as ckpt:
        assert ckpt.restore(state) == 4
