"""What other callbacks of Lightning add to a checkpoint, and what they change in the trainer.

Lightning restores callbacks before optimizers. A restore of Holdfast compares optimizers before it loads
anything, so that parameter groups that a callback has added must exist before it.
"""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.modules.batchnorm import _BatchNorm

import holdfast
from holdfast_core.errors import ConfigError

_REFUSED = (
    (
        ModelPruning,
        "it renames parameters of the module in the training, and a restart would begin with the old names: "
        "prune with torch.nn.utils.prune before fit, or in a run of its own",
    ),
    (
        StochasticWeightAveraging,
        "it replaces schedules and lengths of the trainer at the start of an epoch, which a restart in the "
        "middle of that epoch cannot repeat: use WeightAveraging",
    ),
)
_MODULE = "state_dict"
"""Key of the module's state in a checkpoint of Lightning."""


def require_resumable(callback: pl.Callback) -> None:
    """Raise ConfigError for a callback whose training could not be resumed exactly."""
    for kind, reason in _REFUSED:
        if isinstance(callback, kind):
            raise ConfigError(f"Trainer: {type(callback).__name__} cannot be resumed: {reason}")


class AddedEntries:
    """What the hooks `on_save_checkpoint` of callbacks add to a checkpoint, or replace in it.

    The hooks get the entries that `_given` returns. What they leave there is not saved, because the module is
    saved anyway.
    """

    def __init__(self, trainer: pl.Trainer, own: pl.Callback) -> None:
        self._trainer = trainer
        self._callbacks = [one for one in trainer.callbacks if one is not own]

    def state_dict(self) -> dict[str, Any]:
        trainer, module = self._trainer, self._trainer.lightning_module
        savers = [
            one
            for one in self._callbacks
            if is_overridden("on_save_checkpoint", one, parent=pl.Callback)
        ]
        if not savers:
            return {}
        given = self._given()
        tensors = dict(given[_MODULE])
        checkpoint = dict(given)
        for one in savers:
            one.on_save_checkpoint(trainer, module, checkpoint)
        own: dict[str, Any] = {}
        moved: dict[str, str] = {}
        for key, value in checkpoint.items():
            source = next((name for name, one in given.items() if one is value), None)
            if source == _MODULE and not _is_same(given[_MODULE], tensors):
                source = None  # a hook has changed it in place
            if source is None or (source != _MODULE and source != key):
                own[key] = value
            elif source != key:
                moved[key] = source
        return {"own": own, "moved": moved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Call the hooks with the checkpoint as it was saved. The module is already loaded."""
        if not state:
            return
        given = self._given()
        moved = {key: given[source] for key, source in state["moved"].items()}
        checkpoint = {**given, **moved, **state["own"]}
        for one in self._callbacks:
            one.on_load_checkpoint(self._trainer, self._trainer.lightning_module, checkpoint)

    def _given(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": pl.__version__,
            _MODULE: trainer.lightning_module.state_dict(),
        }


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[key] is other[key] for key in one)


class Finetuning:
    """The callbacks of a trainer that freeze parts of the module, and add parameter groups later."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._callbacks = [one for one in trainer.callbacks if isinstance(one, BaseFinetuning)]

    def add_groups(self, ckpt: holdfast.Checkpointer) -> None:
        """Add the parameter groups that the restore point has. Every rank must call it before the restore."""
        if not self._callbacks:
            return
        point = ckpt.peek()
        if point is None:
            return
        # A checkpoint of another script has none. The restore reports what does not fit.
        trainer = point.objects.get("trainer")
        saved = trainer.get("callbacks", {}) if isinstance(trainer, dict) else {}
        for one in self._callbacks:
            if one.state_key in saved:
                one.load_state_dict(copy.deepcopy(saved[one.state_key]))
                one.on_fit_start(self._trainer, self._trainer.lightning_module)

    def state_dict(self) -> dict[str, Any]:
        """Return which parameters are trained and which batch norms keep statistics.

        Lightning's own checkpoints do not have it: a part that was unfrozen is frozen after a restart.
        """
        if not self._callbacks:
            return {}
        module = self._trainer.lightning_module
        return {
            "trained": [name for name, one in module.named_parameters() if one.requires_grad],
            "tracked": [name for name, one in _batch_norms(module) if one.track_running_stats],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for one in self._callbacks:
            # Its groups are there. Lightning may still call its on_fit_start, which would set them back.
            one._restarting = False
        if not state or not self._callbacks:
            return
        module = self._trainer.lightning_module
        for name, one in module.named_parameters():
            one.requires_grad = name in state["trained"]
        for name, one in _batch_norms(module):
            one.track_running_stats = name in state["tracked"]


def _batch_norms(module: pl.LightningModule) -> list[tuple[str, Any]]:
    return [(name, one) for name, one in module.named_modules() if isinstance(one, _BatchNorm)]
