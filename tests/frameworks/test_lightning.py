"""The callback for Lightning: trainings that are killed and stopped, and trainers that are refused."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.demos.boring_classes import BoringModel
from tests.support.frameworks.devices import train_page
from tests.support.frameworks.forked import Training, train_forked
from tests.support.gpu import DEVICES

import holdfast
from holdfast.integrations.lightning import HoldfastCallback

SCRIPT = Path(__file__).with_name("scripts") / "lightning_net.py"
PRELOAD = ["torchdata.stateful_dataloader", "holdfast.integrations.lightning"]

pytestmark = pytest.mark.timeout(600)


@pytest.mark.fault("A training with Lightning is killed after a validation or at an epoch's end")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("every=10", "augment", "generator"), id="after the last batch of an epoch"),
        pytest.param(("every=5", "augment", "validate", "plateau"), id="after a validation"),
        pytest.param(("every=2", "manual"), id="two optimizers"),
    ],
)
def test_a_killed_training_ends_in_the_same_bits(options: tuple[str, ...], tmp_path: Path) -> None:
    whole, killed = train_forked(
        SCRIPT,
        [
            Training(tmp_path / "whole", options),
            Training(tmp_path / "killed", options, 2, least_steps=11, most_steps=14),
        ],
        preload=PRELOAD,
    )
    assert killed.digest == whole.digest
    assert len(set(killed.starts)) == 3  # every start continued from a later step


@pytest.mark.parametrize("name", ["finetune", "own-finetune", "average", "ema", "best"])
def test_killed_trainings_with_a_callback_end_in_the_same_bits(name: str, tmp_path: Path) -> None:
    """Kills fall into the middle of epochs, before and after the callback changes what is trained."""
    options = "every=3", "validate", name
    done = train_forked(
        SCRIPT,
        [
            Training(tmp_path / "whole", options),
            Training(tmp_path / "killed", options, 3, 11, 9, 13),
            Training(tmp_path / "behind", (*options, "behind"), 3, 12, 9, 13),
        ],
        preload=PRELOAD,
    )
    assert [one.digest for one in done] == [done[0].digest] * 3
    assert all(len(set(one.starts)) >= 3 for one in done[1:])


def test_accumulated_gradients_are_complete_when_a_step_is_saved(tmp_path: Path) -> None:
    options = "every=1", "accumulate"
    whole, killed = train_forked(
        SCRIPT,
        [
            Training(tmp_path / "whole", options),
            Training(tmp_path / "killed", options, 2, least_steps=3, most_steps=4),
        ],
        preload=PRELOAD,
    )
    assert killed.digest == whole.digest
    assert len(set(killed.starts)) == 3


@pytest.mark.fault("A training with Lightning gets SIGTERM")
def test_a_training_that_is_asked_to_stop_continues_after_the_step_that_it_saved(
    tmp_path: Path,
) -> None:
    """Nothing is saved by the interval, so the second start shows that the stop saved a step."""
    options = "every=1000", "validate"
    stops = Training(tmp_path / "stopped", options, 3, most_steps=9, signal=signal.SIGTERM)
    whole, stopped = train_forked(
        SCRIPT, [Training(tmp_path / "whole", options), stops], preload=PRELOAD
    )
    assert stopped.digest == whole.digest
    assert list(stopped.starts) == sorted(set(stopped.starts))


def test_two_killed_ranks_end_in_the_same_bits(tmp_path: Path) -> None:
    options = "ranks", "every=2", "validate"
    # An epoch has 5 batches: the second start continues in the middle of a later one.
    plan = [
        Training(tmp_path / "whole", options, ranks=2),
        Training(tmp_path / "killed", options, 2, 0, 8, 9, kept_steps=6, ranks=2),
    ]
    whole, killed = train_forked(SCRIPT, plan, preload=PRELOAD)
    assert killed.digest == whole.digest
    assert max(killed.starts) > 6


@pytest.mark.parametrize("device", DEVICES)
def test_the_script_of_the_page_ends_in_the_same_bits_after_kills(
    device: str, tmp_path: Path
) -> None:
    whole, killed = train_page(
        "lightning.md", device, tmp_path, preload=PRELOAD, kills=2, least_steps=9, most_steps=12
    )
    assert killed.digest == whole.digest
    assert max(killed.starts) > 1


# ---------------------------------------------------------------------- in this process


def fit(
    folder: Path, net: pl.LightningModule, *, steps: int, every: int = 1, **options: Any
) -> pl.Trainer:
    """Train `net` up to a number of steps."""
    callbacks, later = options.pop("callbacks", []), options.pop("later", [])
    path = options.pop("ckpt_path", None)
    defaults: dict[str, Any] = {"enable_checkpointing": False, "limit_val_batches": 0}
    with holdfast.Checkpointer(
        folder / "ckpt", interval_steps=every, when_busy="wait", on_save_error="raise"
    ) as ckpt:
        trainer = pl.Trainer(
            default_root_dir=folder,
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[*callbacks, HoldfastCallback(ckpt), *later],
            **{**defaults, **options},
        )
        trainer.fit(net, ckpt_path=path)
    return trainer


def test_a_second_saver_is_refused_before_the_first_step(tmp_path: Path) -> None:
    for callbacks, name in (
        ([], "ModelCheckpoint"),
        ([OnExceptionCheckpoint(tmp_path)], "OnExceptionCheckpoint"),
    ):
        with pytest.raises(holdfast.ConfigError, match=f"{name}.*enable_checkpointing=False"):
            fit(tmp_path, BoringModel(), steps=2, enable_checkpointing=True, callbacks=callbacks)


def test_a_keeper_of_the_best_models_is_accepted(tmp_path: Path) -> None:
    class Measured(BoringModel):
        def validation_step(self, batch: Any, index: int) -> None:
            self.log("loss", self.step(batch))

    best = ModelCheckpoint(dirpath=tmp_path / "best", monitor="loss")
    options = {"enable_checkpointing": True, "callbacks": [best], "val_check_interval": 2}
    fit(tmp_path, Measured(), steps=4, limit_val_batches=1, **options)
    again = ModelCheckpoint(dirpath=tmp_path / "best", monitor="loss")
    trainer = fit(
        tmp_path, Measured(), steps=4, limit_val_batches=1, **options | {"callbacks": [again]}
    )
    assert trainer.global_step == 4
    assert again.best_model_path == best.best_model_path != ""


def test_a_trainer_that_starts_ranks_itself_is_refused(tmp_path: Path) -> None:
    callback = HoldfastCallback(holdfast.Checkpointer(tmp_path / "ckpt"))
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
    with pytest.raises(holdfast.ConfigError, match="holdfast run --nproc"):
        callback.on_fit_start(trainer, BoringModel())


def test_a_file_is_the_start_of_the_first_run_only(tmp_path: Path) -> None:
    start = tmp_path / "start"
    start.mkdir()
    fit(start, BoringModel(), steps=3).save_checkpoint(tmp_path / "start.ckpt")

    first = fit(tmp_path, BoringModel(), steps=5, ckpt_path=tmp_path / "start.ckpt")
    assert first.global_step == 5
    net = BoringModel()
    second = fit(tmp_path, net, steps=5, ckpt_path=tmp_path / "start.ckpt")
    assert second.global_step == 5
    assert torch.equal(net.layer.weight, first.lightning_module.layer.weight)


class CountsAndStops(Callback):
    """Counts the batches, and stops the training after one of them."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.batches = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.batches += 1
        trainer.should_stop = self.batches == self.last

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


@pytest.mark.fault("Another callback of Lightning stops the training at a step that is not due")
def test_the_step_at_which_a_later_callback_stops_is_saved_with_its_state(tmp_path: Path) -> None:
    fit(tmp_path, BoringModel(), steps=9, every=1000, later=[CountsAndStops(3)])
    with holdfast.Checkpointer(tmp_path / "ckpt") as ckpt:
        assert [one.step for one in ckpt.list()] == [3]
    again = CountsAndStops(5)
    trainer = fit(tmp_path, BoringModel(), steps=9, every=1000, later=[again])
    assert trainer.global_step == 5
    assert again.batches == 5


def test_a_second_fit_continues_with_what_is_in_memory(tmp_path: Path) -> None:
    net = BoringModel()
    with holdfast.Checkpointer(tmp_path, interval_steps=1, when_busy="wait") as ckpt:
        trainer = pl.Trainer(
            max_epochs=1,
            limit_train_batches=3,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            callbacks=[HoldfastCallback(ckpt)],
        )
        trainer.fit(net)
        with torch.no_grad():
            net.layer.weight.fill_(700.0)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(net)
    assert trainer.global_step == 6
    assert net.layer.weight.abs().mean() > 100.0


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (
            lambda: ModelPruning("l1_unstructured", amount=0.3),
            r"ModelPruning .*torch\.nn\.utils\.prune",
        ),
        (
            lambda: StochasticWeightAveraging(0.1, 1),
            r"StochasticWeightAveraging .*use WeightAveraging",
        ),
    ],
    ids=["pruning", "swa"],
)
def test_a_callback_that_could_not_be_resumed_is_refused_before_the_first_step(
    callback: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(holdfast.ConfigError, match=message):
        fit(tmp_path, BoringModel(), steps=1, callbacks=[callback()])
    assert not list((tmp_path / "ckpt").glob("**/*.shard"))


class Adds(Callback):
    """Adds entries, moves one, and changes the module's entry in place."""

    def __init__(self, value: float) -> None:
        self.value = torch.full((2,), value)
        self.loaded: dict[str, Any] = {}

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["value"] = self.value
        checkpoint["step_of_save"] = checkpoint["global_step"]
        checkpoint["state_dict"]["value"] = self.value

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint


@pytest.mark.parametrize("place", ["callbacks", "later"])
def test_what_a_callback_adds_to_a_checkpoint_comes_back_to_it(place: str, tmp_path: Path) -> None:
    first = fit(tmp_path, BoringModel(), steps=3, **{place: [Adds(7.0)]}).lightning_module
    adds = Adds(0.0)
    fit(tmp_path, BoringModel(), steps=3, **{place: [adds]})
    assert adds.loaded["value"].tolist() == [7.0, 7.0]
    assert adds.loaded["step_of_save"] == 3
    assert adds.loaded["state_dict"]["value"].tolist() == [7.0, 7.0]
    assert torch.equal(adds.loaded["state_dict"]["layer.weight"], first.layer.weight)


@pytest.mark.parametrize("place", ["callbacks", "later"])
def test_a_longer_training_continues_with_the_weights_and_not_with_their_average(
    place: str, tmp_path: Path
) -> None:
    def weights(folder: str, *steps: int) -> Any:
        for last in steps:
            pl.seed_everything(3, verbose=False)
            net = BoringModel()
            options: dict[str, Any] = {place: [WeightAveraging()], "limit_train_batches": 4}
            fit(tmp_path / folder, net, steps=last, **options)
        return net.layer.weight

    assert torch.equal(weights("parts", 4, 8), weights("whole", 8))
