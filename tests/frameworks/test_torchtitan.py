"""The manager for torchtitan: the script of its page with kills, and the policies of its Config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.frameworks.devices import train_page
from tests.support.frameworks.digest import digest_of
from tests.support.frameworks.forked import Training, train_forked
from tests.support.frameworks.pages import script_of
from tests.support.gpu import DEVICES
from torch.distributed.checkpoint.state_dict_saver import save as save_as_dcp
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from holdfast.integrations.torchtitan import HoldfastCheckpointManager
from holdfast_core.errors import ConfigError

pytestmark = pytest.mark.timeout(600)

PRELOAD = ["torchtitan.components.optimizer", "holdfast.integrations.torchtitan"]


@pytest.mark.fault("A torchtitan training is killed three times")
@pytest.mark.parametrize("device", DEVICES)
def test_a_killed_training_ends_in_the_same_bits(device: str, tmp_path: Path) -> None:
    """Its model has dropout, and the iterator of its data draws a seed at each start."""
    options = {"kills": 3, "least_steps": 3, "most_steps": 5, "ranks": 1}
    whole, killed = train_page("torchtitan.md", device, tmp_path, preload=PRELOAD, **options)
    assert killed.digest == whole.digest
    assert killed.starts[-1] > killed.starts[0] == 1


def test_a_training_of_two_ranks_continues_on_one(tmp_path: Path) -> None:
    script, stepless = tmp_path / "train.py", tmp_path / "stepless.py"
    script.write_text(script_of("torchtitan.md"))
    stepless.write_text(script_of("torchtitan.md").replace("in data:", "in []:"))
    (both,) = train_forked(script, [Training(tmp_path / "two", ranks=2)], preload=PRELOAD)
    (alone,) = train_forked(stepless, [Training(tmp_path / "two", ranks=1)], preload=PRELOAD)
    assert alone.digest == both.digest
    assert alone.starts == ()


class Position:
    """Stands for torchtitan's trainer and its data loader."""

    def __init__(self, done: int = 0) -> None:
        self.done = done

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Titan:
    """What torchtitan's Trainer builds, for a tiny model."""

    def __init__(self, folder: Path, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(3, 2)
        adamw = default_adamw(lr=1e-2)
        adamw.implementation = "for-loop"
        self.optimizers = adamw.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.data, self.train = Position(), Position()
        config = HoldfastCheckpointManager.Config(enable=True, interval=2, **options)
        self.manager = config.build(
            dataloader=self.data,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=schedule.build(optimizers=self.optimizers, training_steps=20),
            states={"train_state": self.train},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def step(self, last: bool = False) -> bool:
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizers.step()
        self.optimizers.zero_grad()
        self.train.done += 1
        self.data.done += 1
        return bool(self.manager.save(self.train.done, last_step=last))

    @property
    def digest(self) -> str:
        return digest_of(self.model.parameters())

    def close(self) -> None:
        self.manager.maybe_wait_for_saving()
        self.manager.close()


def trained(folder: Path, steps: int, **options: Any) -> Titan:
    one = Titan(folder, 0, **options)
    assert not one.manager.load()
    for _ in range(steps):
        one.step()
    one.close()
    return one


def test_steps_are_saved_at_the_interval_at_the_first_and_at_the_last(tmp_path: Path) -> None:
    one = Titan(tmp_path, 0, enable_first_step_checkpoint=True)
    one.manager.load()
    assert [one.step(last=n == 5) for n in (1, 2, 3, 4, 5)] == [True, True, False, True, True]
    one.close()


def test_an_excluded_part_keeps_its_value(tmp_path: Path) -> None:
    before = trained(tmp_path, 2)
    after = Titan(tmp_path, 1, exclude_from_loading=["dataloader", "optimizer"])
    assert after.manager.load()
    assert (after.digest, after.train.done, after.data.done) == (before.digest, 2, 0)
    moments = after.optimizers.state_dict()
    assert not moments["state.weight.exp_avg"].any()
    after.close()


def test_moments_of_another_dtype_than_their_weights_are_loaded_as_saved(tmp_path: Path) -> None:
    def widen(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for entries in optimizer.state.values():
            entries["exp_avg"] = entries["exp_avg"].double() / 3

    def titan(seed: int) -> Titan:
        one = Titan(tmp_path, seed)
        one.optimizers.optimizers[0].register_step_post_hook(widen)
        return one

    before = titan(0)
    before.manager.load()
    before.step(last=True)
    before.close()
    after = titan(1)
    assert after.manager.load()
    saved = before.optimizers.state_dict()["state.weight.exp_avg"]
    found = after.optimizers.state_dict()["state.weight.exp_avg"]
    assert found.dtype == torch.float64
    assert torch.equal(found, saved)
    after.close()


def test_a_wrong_name_of_an_excluded_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="exclude_from_loading: 'data', expected some of optimizer"
    ):
        Titan(tmp_path, 0, exclude_from_loading=["data"])


def test_load_step_loads_that_step(tmp_path: Path) -> None:
    trained(tmp_path, 4)
    after = Titan(tmp_path, 1, load_step=2)
    assert after.manager.load(step=2)
    assert after.train.done == 2
    after.close()


def test_nothing_is_saved_with_load_only(tmp_path: Path) -> None:
    one = Titan(tmp_path, 0, load_only=True)
    one.manager.load()
    assert [one.step() for _ in range(4)] == [False] * 4
    one.close()


def test_the_model_of_another_folder_is_the_start(tmp_path: Path) -> None:
    before = trained(tmp_path / "old", 2)
    path = str(tmp_path / "old" / "checkpoint")
    after = Titan(tmp_path / "new", 1, initial_load_path=path)
    assert after.manager.load()
    assert (after.digest, after.train.done) == (before.digest, 0)
    after.close()


def test_a_checkpoint_of_dcp_is_the_start(tmp_path: Path) -> None:
    before = trained(tmp_path / "old", 1)
    save_as_dcp(dict(before.model.state_dict()), checkpoint_id=tmp_path / "dcp", no_dist=True)
    after = Titan(tmp_path / "new", 1, initial_load_path=str(tmp_path / "dcp"))
    assert after.manager.load()
    assert after.digest == before.digest
    after.close()


def test_an_initial_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    one = Titan(tmp_path, 0, initial_load_path=str(tmp_path / "empty"))
    with pytest.raises(
        ConfigError, match="expected a folder with a checkpoint of Holdfast or of DCP"
    ):
        one.manager.load()
    one.close()


def test_an_export_without_an_adapter_of_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this model has no state_dict_adapter"):
        Titan(tmp_path, 0, last_save_in_hf=True)


def test_a_manager_that_is_not_enabled_does_nothing(tmp_path: Path) -> None:
    manager = HoldfastCheckpointManager.Config(enable=False).build(
        dataloader=None,
        model_parts=[],
        optimizers=None,
        lr_schedulers=None,
        states={},
        sd_adapter=None,
    )
    assert not manager.load()
    assert not manager.save(1)
    manager.close()
    assert not dist.is_initialized()
