"""Saves and resumes a training of Lightning's Trainer by one callback.

Lightning's own checkpoints hold no random number generators, and its CheckpointIO is called on rank 0 only.
The callback therefore uses hooks that run on every rank:

 1. `on_fit_start`: the strategy has set up modules and optimizers, and the loops have not begun. The state
    is restored, the progress of the loops included. Lightning restores callbacks before optimizers. A restore
    of Holdfast compares optimizers before it loads anything, so that parameter groups that a callback has
    added must exist before it.
 2. `on_train_start`: the iterators of the loaders exist now, and making them may have drawn random numbers.
    Just before the next batch is fetched, the generators are set to where they were then. If that batch
    begins an epoch, `on_train_epoch_start` sets them and makes the iterators again, as an undisturbed run
    does there.
 3. `on_train_batch_end`, as the last callback: after a batch that did an optimizer step, all ranks decide
    whether they save it. A callback before may have stopped the training at this step, or changed its state.
 4. `on_train_batch_start`: a step after which a validation runs, or an epoch ends, is saved here, after them,
    because Lightning resumes as if they had been done.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Checkpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.modules.batchnorm import _BatchNorm

import holdfast
from holdfast.base.settings import RankSettings
from holdfast.integrations.epochs import generators_of
from holdfast.integrations.versions import warn_if_untested
from holdfast.training.inexact_data import inexact_loader
from holdfast_core.errors import ConfigError

logger = logging.getLogger(__name__)

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


_FINISHED = "_iterator_finished"
"""Key in the state of a StatefulDataLoader: its next iterator begins the next epoch (torchdata 0.11)."""


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


class HoldfastCallback(pl.Callback):  # type: ignore[misc]  # the class is Any without Lightning
    """Restores when `Trainer.fit` starts, and saves the optimizer steps that the Checkpointer chooses.

    ckpt: the Checkpointer of this rank.
    generators: torch.Generator and numpy.random.Generator objects that the training draws from, besides the
      global ones and those of its data loaders, always in the same order.

    A step is a batch in which at least one optimizer stepped.

    `fit` raises ConfigError before the first step for a trainer that cannot be resumed exactly.
    """

    def __init__(self, ckpt: holdfast.Checkpointer, *, generators: Iterable[Any] = ()) -> None:
        warn_if_untested("lightning")
        self._ckpt = ckpt
        self._generators = tuple(generators)
        self._rest: _Rest | None = None
        self._added: AddedEntries | None = None
        self._file: dict[str, Any] | None = None
        """What Lightning has read from `fit(ckpt_path=...)`."""
        self._on_sigterm: Any = None
        self._step = 0
        self._global_step = 0
        """Newest `trainer.global_step`, which counts the steps of all optimizers."""
        self._is_due = False
        """Whether the newest step is saved when the validation or the epoch after it has ended."""
        self._saved = 0
        """Newest step that was saved or restored."""
        self._has_looked_at_data = False
        self._validation = contextlib.ExitStack()
        """Open while a validation runs."""

    # ------------------------------------------------------------------ restore

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._file = checkpoint

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        file, self._file = self._file, None
        if trainer.fast_dev_run or (self._rest is not None and self._rest.trainer is trainer):
            return  # a second call of fit continues with what is in memory
        _require_supported(trainer)
        self._rest = _Rest(trainer, self, self._generators)
        self._added = AddedEntries(trainer, self)
        self._rest.finetuning.add_groups(self._ckpt)
        trainer.callbacks = [_TrainEnd(self), *trainer.callbacks, _BatchEnd(self)]
        found = self._ckpt.restore(self._state(self._rest))
        self._step = self._saved = found or 0
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        if found is not None and trainer.ckpt_path is not None:
            _leave_out(file, trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._rest is None:
            return
        if self._step == 0:
            self._step = trainer.global_step  # of the file of `ckpt_path`
        self._global_step = trainer.global_step
        # Lightning's handler broadcasts to all ranks inside the signal handler, and raises at the end of this
        # batch. The Checkpointer's handler lets all ranks save and stop after the same step.
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and callable(self._on_sigterm):
            signal.signal(signal.SIGTERM, self._on_sigterm)
        self._ckpt.allocate(self._state(self._rest))
        loop = trainer.fit_loop
        progress = loop.epoch_loop.batch_progress
        if loop.restarted_mid_epoch and progress.is_last_batch:
            # Lightning has counted the epoch as done. It would begin the next one without its hooks, and
            # without counting that it began, so that a second restart would resume in a wrong place.
            loop.reset_restart_stage()
        fetcher = loop._data_fetcher
        states = self._rest.take_loader_states()
        if states:
            # Lightning has made the iterators before it sets the epoch of a DistributedSampler. They would
            # continue in the order of the first epoch.
            for loader in loop._combined_loader.flattened:
                _set_sampler_epoch(loader, loop.epoch_progress.current.processed)
            loop._combined_loader._load_state_dicts(states)
            iter(fetcher)
        fetcher.iterator = _FirstFetch(fetcher, self._rest)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._rest is None:
            return
        if self._rest.is_held:
            self._rest.hold_generators()
        if self._rest.set_generators():
            # Lightning makes no iterators in the first epoch after a restore. Those of its start have drawn
            # from generators that were not set yet.
            fetcher = trainer.fit_loop._data_fetcher
            iter(fetcher)
            self._rest.keep_generators()
            fetcher.iterator = _FirstFetch(fetcher, self._rest)

    # ------------------------------------------------------------------ save

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._rest is None:
            return
        if self._rest.forget_restored():
            # Lightning would leave out schedules by a metric at the end of the first epoch after a restore.
            trainer.fit_loop.restarting = False
        if self._is_due:
            self._save(self._rest)
            self._stop_if_asked(trainer)
        self._rest.release()

    def batch_ended(self, trainer: pl.Trainer) -> None:
        """Decide about a save. Called after what all other callbacks do at the end of a batch."""
        if self._rest is None or trainer.global_step == self._global_step:
            return  # gradients are accumulated
        self._global_step = trainer.global_step
        self._step += 1
        saves = self._ckpt.should_save(self._step)
        if _ends_something(trainer):
            self._is_due = saves
            self._rest.hold()
            return
        if saves:
            self._save(self._rest)
        self._stop_if_asked(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation.enter_context(self._ckpt.paused("a validation of Lightning"))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation.close()
        if self._rest is not None and self._rest.is_held:
            self._rest.hold_generators()

    def training_ended(self) -> None:
        """Save the last step. Called before other callbacks replace the weights by their averages."""
        if self._rest is not None and self._rest.is_held and self._step > self._saved:
            self._save(self._rest)
            self._rest.release()

    def _save(self, rest: _Rest) -> None:
        if not self._has_looked_at_data:
            self._has_looked_at_data = True
            _warn_about_data(rest.trainer)
        self._ckpt.save(self._step, self._state(rest))
        self._saved = self._step
        self._is_due = False

    def _stop_if_asked(self, trainer: pl.Trainer) -> None:
        if not self._ckpt.stopping:
            return
        trainer.should_stop = True
        # The state is saved. Neither minimum lengths nor a validation may use up the time to stop in.
        trainer.fit_loop.min_epochs = 0
        trainer.fit_loop.epoch_loop.min_steps = None
        trainer.limit_val_batches = 0

    def _state(self, rest: _Rest) -> dict[str, Any]:
        trainer = rest.trainer
        schedulers = (config.scheduler for config in trainer.lr_scheduler_configs)
        return {
            "module": trainer.lightning_module,
            "optimizers": {str(i): one for i, one in enumerate(trainer.optimizers)},
            "schedulers": {str(i): one for i, one in enumerate(schedulers)},
            # Lightning calls these hooks before it loads the states of callbacks, and keeps those of rank 0.
            "added": holdfast.Shared(self._added),
            "trainer": rest,
        }


class _TrainEnd(pl.Callback):  # type: ignore[misc]
    """Calls the HoldfastCallback at the end of a training. It stands before all other callbacks."""

    def __init__(self, owner: HoldfastCallback) -> None:
        self._owner = owner

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._owner.training_ended()


class _BatchEnd(pl.Callback):  # type: ignore[misc]
    """Calls the HoldfastCallback at the end of a batch. It stands behind all other callbacks of a trainer."""

    def __init__(self, owner: HoldfastCallback) -> None:
        self._owner = owner

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._owner.batch_ended(trainer)


class _Rest:
    """Everything of a training except modules, optimizers and schedulers. Each rank has its own."""

    def __init__(
        self, trainer: pl.Trainer, own: HoldfastCallback, generators: tuple[Any, ...]
    ) -> None:
        self.trainer = trainer
        self._callbacks = {one.state_key: one for one in trainer.callbacks if one is not own}
        self.finetuning = Finetuning(trainer)
        self._generators = generators
        self._loops: dict[str, Any] | None = None
        """Progress of the loops after a step that is saved later."""
        self._held_draws: dict[str, Any] | None = None
        self._loader_states: list[dict[str, Any]] = []
        """Restored states of the training data loaders, until their iterators are made."""
        self._restored: dict[str, Any] | None = None
        """States of the generators before the first batch after a restore is fetched."""

    @property
    def is_held(self) -> bool:
        return self._loops is not None

    def state_dict(self) -> dict[str, Any]:
        trainer = self.trainer
        datamodule = trainer.datamodule
        return {
            "loops": self._loops if self.is_held else trainer.fit_loop.state_dict(),
            "callbacks": {key: one.state_dict() for key, one in self._callbacks.items()},
            "precision": trainer.precision_plugin.state_dict(),
            "datamodule": {} if datamodule is None else datamodule.state_dict(),
            "finetuning": self.finetuning.state_dict(),
            "module": self._extra(),
            "generators": self._held_draws if self.is_held else self._draws(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned. The module is already loaded."""
        trainer = self.trainer
        trainer.fit_loop.load_state_dict(state["loops"])
        for key, one in self._callbacks.items():
            if state["callbacks"].get(key):
                one.load_state_dict(state["callbacks"][key])
        self.finetuning.load_state_dict(state["finetuning"])
        trainer.precision_plugin.load_state_dict(state["precision"])
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state["datamodule"])
        module = trainer.lightning_module
        if is_overridden("on_load_checkpoint", module):
            module.on_load_checkpoint({"state_dict": module.state_dict(), **state["module"]})
        self._loader_states = state["loops"]["state_dict"].get("combined_loader", [])
        self._restored = state["generators"]

    def take_loader_states(self) -> list[dict[str, Any]]:
        """Return the restored states of the training data loaders, once."""
        states, self._loader_states = self._loader_states, []
        return states

    def hold(self) -> None:
        """Keep the progress of the loops as it is after the newest step, to save that step later."""
        loops = copy.deepcopy(self.trainer.fit_loop.state_dict())
        if self.trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            # Lightning leaves the last iterator of an epoch before it ends.
            for one in loops["state_dict"].get("combined_loader", ()):
                if _FINISHED in one:
                    one[_FINISHED] = True
        self._loops = loops
        self.hold_generators()

    def hold_generators(self) -> None:
        """Keep the states of the generators, from which the next batch is fetched."""
        self._held_draws = self._draws()

    def release(self) -> None:
        self._loops = self._held_draws = None

    def set_generators(self) -> bool:
        """Set all generators to their restored states. Return False if there are none."""
        if self._restored is None:
            return False
        self._rng().load_state_dict(self._restored)
        return True

    def keep_generators(self) -> None:
        """Let the next call of `set_generators` set the states that the generators have now."""
        self._restored = self._draws()

    def forget_restored(self) -> bool:
        """Return whether this is the first call after a restore."""
        is_first, self._restored = self._restored is not None, None
        return is_first

    def _draws(self) -> dict[str, Any]:
        return self._rng().state_dict()

    def _rng(self) -> holdfast.RNG:
        return holdfast.RNG(*self._generators, *_generators_of(self.trainer))

    def _extra(self) -> dict[str, Any]:
        """Return what the module's own hook adds to a checkpoint of Lightning."""
        module = self.trainer.lightning_module
        if not is_overridden("on_save_checkpoint", module):
            return {}
        checkpoint: dict[str, Any] = {"state_dict": module.state_dict()}
        module.on_save_checkpoint(checkpoint)
        return {key: value for key, value in checkpoint.items() if key != "state_dict"}


class _FirstFetch:
    """Stands for the iterator of a data fetcher until the first batch is fetched, and sets generators then.

    No hook of Lightning runs there: after `on_train_start` it may make an iterator for a validation that it
    leaves out.
    """

    def __init__(self, fetcher: Any, rest: _Rest) -> None:
        self._fetcher = fetcher
        self._iterator = fetcher.iterator
        self._rest = rest

    def __next__(self) -> Any:
        self._fetcher.iterator = self._iterator
        self._rest.set_generators()
        return next(self._iterator)


def _generators_of(trainer: pl.Trainer) -> Iterator[Any]:
    """Return the generators of the training data loaders, from which later epochs draw."""
    combined = trainer.fit_loop._combined_loader
    return generators_of(*(() if combined is None else combined.flattened))


def _warn_about_data(trainer: pl.Trainer) -> None:
    """Name the training data loaders that cannot continue exactly."""
    if not trainer.is_global_zero:
        return
    path = "trainer.train_dataloader"
    generators = list(_generators_of(trainer))
    for loader in trainer.fit_loop._combined_loader.flattened:
        for line in inexact_loader(path, loader, generators):
            logger.warning(line)
        if isinstance(
            getattr(getattr(loader, "batch_sampler", None), "sampler", None),
            DistributedSamplerWrapper,
        ):
            logger.warning(
                "%s: Lightning has wrapped the sampler of this loader to divide it among the ranks, and its "
                "order is saved nowhere: pass sampler=holdfast.data.GangSampler(dataset) to the loader",
                path,
            )
    if trainer.fit_loop._data_fetcher.length is None:
        logger.warning(
            "%s has no length, so Lightning fetches one batch ahead of the training, and a restart loses "
            "that batch: define __len__ on the loader or on its dataset",
            path,
        )


def _ends_something(trainer: pl.Trainer) -> bool:
    """Return whether a validation runs after this batch, or the epoch ends with it."""
    loop = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    ends = loop._is_training_done or trainer.should_stop
    return bool(ends or loop._should_check_val_fx(fetcher))


def _leave_out(file: dict[str, Any] | None, trainer: pl.Trainer) -> None:
    """Keep Lightning from loading the file of `ckpt_path` over the restored state.

    Lightning has loaded the module before `on_fit_start`, and loads the rest of the file after it.
    """
    if file is None or trainer.strategy.restore_checkpoint_after_setup:
        raise ConfigError(
            f"Trainer.fit(ckpt_path={str(trainer.ckpt_path)!r}): Lightning would load this file over the "
            "step that Holdfast restored. Pass ckpt_path=None if ckpt.peek() else path"
        )
    file.pop("loops", None)
    file.pop(type(trainer.precision_plugin).__qualname__, None)
    file["optimizer_states"] = []
    file["lr_schedulers"] = []


def _require_supported(trainer: pl.Trainer) -> None:
    """Raise ConfigError for a trainer whose training cannot be saved, or has a second saver."""
    ranks = RankSettings.from_env().world_size
    if trainer.world_size != ranks:
        raise ConfigError(
            f"Trainer: expected {ranks} ranks, which started this script, found a trainer of "
            f"{trainer.world_size}: start every rank with `holdfast run --nproc-per-node N` or torchrun, "
            "and pass the same numbers as devices= and num_nodes= to the Trainer"
        )
    for kind, instead in (
        (FSDPStrategy, "ModelParallelStrategy with torch's fully_shard"),
        (DeepSpeedStrategy, "ModelParallelStrategy with torch's fully_shard"),
    ):
        if isinstance(trainer.strategy, kind):
            raise ConfigError(
                f"Trainer(strategy={kind.__name__}): its parameters are flat pieces whose place in the "
                f"model is unknown, so they cannot be saved here: use {instead}"
            )
    for one in trainer.callbacks:
        if isinstance(one, Checkpoint) and getattr(one, "monitor", None) is None:
            raise ConfigError(
                f"Trainer: {type(one).__name__} saves the training a second time: pass "
                "Trainer(enable_checkpointing=False). A ModelCheckpoint with monitor= is accepted, "
                "because it keeps the best models and not the training"
            )
        require_resumable(one)
