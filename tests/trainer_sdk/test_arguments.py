"""Arguments of the wrong kind are refused by their name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.launched import committed_step

import holdfast
from holdfast_core.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


@pytest.mark.fault("A step is a numpy integer or a 0-d tensor")
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(np.int64(5), id="numpy"),
        pytest.param(torch.tensor(5), id="tensor"),
        pytest.param(np.array(5), id="array"),
        pytest.param(np.uint8(5), id="uint8"),
    ],
)
def test_an_integer_of_every_kind_is_a_step(folder: Path, step: Any) -> None:
    with holdfast.Checkpointer(dir=folder, interval_steps=5) as ckpt:
        assert ckpt.should_save(step)
        handle = ckpt.save(step, {"t": torch.ones(4)})
        handle.wait(timeout=HANG_SECONDS)
        assert type(handle.step) is int
    assert committed_step(folder) == 5


@pytest.mark.fault("A step is no whole number")
@pytest.mark.parametrize(
    "step", [-1, 2.0, 10**13, "5", None, True, torch.tensor(2.0), np.float32(1), torch.ones(2)]
)
def test_a_value_that_is_not_a_step_takes_no_slot(folder: Path, step: Any) -> None:
    with holdfast.Checkpointer(holdfast.Folder(folder, slots=2)) as ckpt:
        for _ in range(3):
            with pytest.raises(ConfigError, match=r"save\(step\): expected"):
                ckpt.save(step, {"t": torch.ones(4)})
        with pytest.raises(ConfigError, match=r"should_save\(step\): expected"):
            ckpt.should_save(step)
        with pytest.raises(ConfigError, match=r"steps\(total=\.\.\.\): expected"):
            next(ckpt.steps(step, {"t": torch.ones(4)}))
        assert ckpt.saves_failed == 0
        ckpt.save(1, {"t": torch.ones(4)}).wait(timeout=HANG_SECONDS)


@pytest.mark.fault("A script gives an option of the wrong kind")
@pytest.mark.parametrize(
    "wrong",
    [
        {"interval_steps": 2.5},
        {"interval_steps": "10"},
        {"interval_steps": True},
        {"on_save_error": "ignore"},
        {"when_busy": "never"},
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_by_its_name(folder: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}=.*expected"):
        holdfast.Checkpointer(dir=folder, **wrong)
    assert not folder.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_last": "3"},
        {"keep_last": None},
        {"slots": 2.0},
        {"store_keep_last": 0},
        {"on_damage": "ignore"},
    ],
    ids=str,
)
def test_a_wrong_value_in_a_folder_is_refused_by_its_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"Folder\({next(iter(wrong))}=.*expected"):
        holdfast.Folder("ckpt", **wrong)


@pytest.mark.fault("A model is passed as the state")
def test_a_model_in_the_place_of_the_state_is_refused(folder: Path) -> None:
    model: Any = torch.nn.Linear(1, 1)
    with holdfast.Checkpointer(dir=folder) as ckpt:
        for call in (
            lambda: list(ckpt.steps(3, model)),
            lambda: ckpt.restore(model),
            lambda: ckpt.save(1, model),
            lambda: ckpt.allocate(model),
        ):
            with pytest.raises(ConfigError, match=r"as a dict of names .* found Linear"):
                call()
    assert committed_step(folder) == 0
