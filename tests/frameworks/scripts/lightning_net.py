"""A small training with Lightning, for kills: `lightning_net.py [every=N] [OPTION ...]`."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EMAWeightAveraging,
    WeightAveraging,
)
from tests.support.frameworks.digest import digest_of
from tests.support.hang import HANG_SECONDS
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.data import GangSampler
from holdfast.integrations.lightning import HoldfastCallback

SAMPLES, BATCH, EPOCHS = 40, 4, 5
OPTIONS = set(sys.argv[1:])
(EVERY,) = [int(one.partition("=")[2]) for one in OPTIONS if one.startswith("every=")] or [2]
RANKS = 2 if "ranks" in OPTIONS else 1


class Durable(holdfast.Checkpointer):
    """Waits for each save, so that a kill after a step finds the checkpoints of all steps before it."""

    def save(self, step: int, state: Mapping[str, Any]) -> holdfast.SaveHandle:
        handle = super().save(step, state)
        handle.wait("local", timeout=HANG_SECONDS)
        return handle


class Waves(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        wave = torch.sin(torch.arange(8.0) * (index + 1))
        return wave + torch.rand(8) if "augment" in OPTIONS else wave


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
        self.last = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
        self.automatic_optimization = "manual" not in OPTIONS
        self.hook_calls = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(batch)).square().mean()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self(batch)
        if not self.automatic_optimization:
            for number, one in enumerate(self.optimizers()):
                one.zero_grad()
                self.manual_backward(loss, retain_graph=number == 0)
            for one in self.optimizers():
                one.step()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.is_global_zero:
            # `global_step` counts the steps of all optimizers.
            print("step", self.trainer.global_step // len(self.trainer.optimizers), flush=True)

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        # A module in evaluation draws no random numbers; many metrics do.
        self.log("validation", self(batch) + 0.01 * torch.rand(()), sync_dist=RANKS > 1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hook_calls"] = self.hook_calls = self.trainer.global_step

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.hook_calls = checkpoint["hook_calls"]
        assert self.hook_calls > 0

    @property
    def backbone(self) -> torch.nn.Module:
        return self.first

    def configure_optimizers(self) -> Any:
        if OPTIONS & {"finetune", "own-finetune"}:
            return torch.optim.AdamW(self.last.parameters(), 1e-2)
        if "manual" in OPTIONS:
            return [torch.optim.AdamW(one.parameters(), 1e-2) for one in (self.first, self.last)]
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        if "plateau" in OPTIONS:
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.9)
            config = {"scheduler": schedule, "monitor": "validation", "strict": False}
            return {"optimizer": optimizer, "lr_scheduler": config}
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=50)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class OwnFinetuning(BaseFinetuning):
    """Trains the backbone from the third epoch on, with a batch norm that is frozen before."""

    def freeze_before_training(self, module: pl.LightningModule) -> None:
        self.freeze(module.backbone, train_bn=False)

    def finetune_function(self, module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 2:
            self.unfreeze_and_add_param_group(module.backbone, optimizer, lr=3e-3)


class Best(pl.Callback):
    """Keeps a copy of the weights in the checkpoints of Lightning, and changes the model by it."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step % 7 == 3:
            self.kept = {name: one.detach().clone() for name, one in module.named_parameters()}
        elif self.kept and trainer.global_step % 7 == 5:
            for name, one in module.named_parameters():
                one.data.lerp_(self.kept[name], 0.5)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = self.kept

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint["kept"]


CALLBACKS: dict[str, Any] = {
    "finetune": lambda: BackboneFinetuning(2),
    "own-finetune": OwnFinetuning,
    "average": WeightAveraging,
    "ema": lambda: EMAWeightAveraging(decay=0.8, update_every_n_steps=2),
    "best": Best,
}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    holdfast.pin_threads(1)
    pl.seed_everything(5, verbose=False)
    net = Net()
    generator = torch.Generator().manual_seed(3) if "generator" in OPTIONS else None
    workers = 2 if "workers" in OPTIONS else 0
    order: dict[str, Any] = {"sampler": GangSampler(Waves())} if RANKS > 1 else {"shuffle": True}
    train = StatefulDataLoader(Waves(), BATCH, generator=generator, num_workers=workers, **order)
    validate = DataLoader(Waves(), 8, shuffle=True) if "validate" in OPTIONS else None
    start = Path("start.ckpt") if "start" in OPTIONS else None
    callbacks = [make() for name, make in CALLBACKS.items() if name in OPTIONS]
    callbacks_behind: list[Any] = []
    if "behind" in OPTIONS:
        callbacks, callbacks_behind = [], callbacks
    with Durable("ckpt", interval_steps=EVERY, when_busy="wait", on_save_error="raise") as ckpt:
        trainer = pl.Trainer(
            max_epochs=EPOCHS,
            accelerator="cpu",
            devices=RANKS,
            strategy="ddp" if RANKS > 1 else "auto",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accumulate_grad_batches=3 if "accumulate" in OPTIONS else 1,
            val_check_interval=5 if validate is not None else None,
            callbacks=[*callbacks, HoldfastCallback(ckpt), *callbacks_behind],
        )
        trainer.fit(net, train, validate, ckpt_path=start)
    if trainer.is_global_zero and not ckpt.stopping:
        print("digest", digest_of(net.state_dict().values()), flush=True)


if __name__ == "__main__":
    main()
