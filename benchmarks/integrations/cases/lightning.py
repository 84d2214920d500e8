"""Lightning, beside `Trainer.save_checkpoint`, which ModelCheckpoint calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.integrations.case import SCRIPTS, Blocked, Case

SAVES = 8


def _blocked(folder: Path) -> Blocked:
    import warnings

    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import Callback

    from benchmarks.integrations.timed import TimedCheckpointer, timed
    from holdfast.integrations.lightning import HoldfastCallback

    theirs: list[float] = []

    class Net(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(10)))

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layers(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class Theirs(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            with timed(theirs):
                trainer.save_checkpoint(folder / "theirs.ckpt")

    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    rows: Any = torch.rand(2 * SAVES + 4, 1024)
    net = Net()
    with TimedCheckpointer(folder / "ours", interval_steps=1) as ckpt:
        trainer = pl.Trainer(
            max_steps=SAVES + 1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Theirs(), HoldfastCallback(ckpt)],
        )
        trainer.fit(net, torch.utils.data.DataLoader(rows, 2))
    bytes_ = 3 * sum(p.numel() * p.element_size() for p in net.parameters())
    return Blocked(ckpt.seconds[1:], theirs[1:], bytes_)


CASE = Case(
    name="lightning",
    distribution="lightning",
    lines=6,
    script=SCRIPTS / "lightning_net.py",
    arguments=("every=2",),
    preload=("torchdata.stateful_dataloader", "holdfast.integrations.lightning"),
    theirs="Trainer.save_checkpoint",
    blocked=_blocked,
)
