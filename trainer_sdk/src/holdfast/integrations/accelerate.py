"""Saves and restores a training with Hugging Face's accelerate.

The state is that of an Accelerator: what it has prepared and what is registered with it. accelerate itself
does not save the position in the data of every kind of loader, nor the order of the samples after a restart.
`AcceleratorRun.batches` therefore iterates over a loader and knows both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import skip_first_batches
from accelerate.utils import DistributedType

import holdfast
from holdfast.integrations.epochs import DrawWatch, EpochStart
from holdfast.integrations.versions import warn_if_untested
from holdfast_core.errors import ConfigError

logger = logging.getLogger(__name__)


class AcceleratorRun:
    """Makes a training with an Accelerator save and restore with a Checkpointer.

    accelerator: everything that is trained was prepared by it, and other objects of the state are registered
      with `register_for_checkpointing`.
    ckpt: the open Checkpointer of this training.

    Raises ConfigError for DeepSpeed and FSDP 1, and makes `accelerator.save_state` raise it.
    """

    def __init__(self, accelerator: Accelerator, ckpt: holdfast.Checkpointer) -> None:
        warn_if_untested("accelerate")
        _require_supported(accelerator)
        accelerator.register_save_state_pre_hook(_refuse_save_state)
        self._accelerator = accelerator
        self._ckpt = ckpt
        self._positions: list[_Position] = []
        self._draws = DrawWatch()
        self._rng_is_left = False
        """The random number generators are to be loaded when the first batch was fetched."""
        self._has_saved = False

    def restore(self) -> int:
        """Load the newest checkpoint. Return its number of optimizer steps, 0 if there is none.

        Call it once on every rank, after everything was prepared and registered.
        """
        step = self._ckpt.restore(self.state(), rng="later")
        self._rng_is_left = True
        return step or 0

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of one pass over a prepared loader, after a restore those that are left of it.

        A pass whose last batch was trained before the restore yields nothing. `loader.iteration` is the
        number of passes that have ended.

        Raises ConfigError for a loader that the Accelerator has not prepared.
        """
        position = self._position_of(loader)
        self._forget_left()
        self._draws.pass_begins()
        if position.is_finished:
            self._load_rng()
            position.end()
            return
        is_rest = position.batches > 0
        if not is_rest:
            self._load_rng()  # in this process, too, the pass draws its order from them
        now = holdfast.RNG().state_dict()
        batches = iter(position.begin())
        batch = self._next(batches)
        if is_rest:
            # The first fetch has repeated what the interrupted training drew at the beginning of the pass.
            holdfast.RNG().load_state_dict(now)
            self._load_rng()
        try:
            while batch is not _END:
                self._forget_left()
                position.batches += 1
                yield batch
                batch = self._next(batches)
        except GeneratorExit:
            position.leave()
            raise
        position.end()

    def after_step(self, step: int, total: int) -> bool:
        """Save if it is time to. Return whether the training ends with this step.

        step: number of optimizer steps that are done. Call it after each of them, on every rank; with
          gradient accumulation only where `accelerator.sync_gradients` is set.
        total: number of optimizer steps of the whole training, whose last one is always saved.
        """
        self._forget_left()
        is_due = self._ckpt.should_save(step)
        if is_due or step >= total:
            if not self._has_saved and self._draws.has_drawn:
                logger.warning(
                    "a restart of this training cannot be exact: the dataset or the collate function draws "
                    "from the global random number generators while a batch is fetched; use "
                    "holdfast.data.indexed and holdfast.data.keyed (docs/training.md, section 3)"
                )
            self._has_saved = True
            self._draws.end()
            self._ckpt.save(step, self.state(), is_last=step >= total)
        return self._ckpt.stopping or step >= total

    def state(self) -> dict[str, Any]:
        """Return the state of the Accelerator."""
        accelerator = self._accelerator
        for loader in accelerator._dataloaders[len(self._positions) :]:
            self._positions.append(_Position(loader))
        parts = {
            "model": [accelerator.unwrap_model(one) for one in accelerator._models],
            "optimizer": [one.optimizer for one in accelerator._optimizers],
            "scheduler": [one.scheduler for one in accelerator._schedulers],
            "loader": self._positions,
            "object": accelerator._custom_objects,
            "scaler": [] if accelerator.scaler is None else [accelerator.scaler],
        }
        named = {f"{name}{i}": one for name, ones in parts.items() for i, one in enumerate(ones)}
        return {**named, "rng": holdfast.RNG()}

    def _position_of(self, loader: Any) -> _Position:
        self.state()  # loaders may have been prepared since
        for position in self._positions:
            if position.loader is loader:
                return position
        raise ConfigError(
            f"AcceleratorRun.batches: the accelerator has not prepared this {type(loader).__name__}: pass "
            "what accelerator.prepare(loader) returns"
        )

    def _forget_left(self) -> None:
        for position in self._positions:
            position.forget_left()

    def _load_rng(self) -> None:
        if self._rng_is_left:
            self._rng_is_left = False
            self._ckpt.restore_rng()

    def _next(self, batches: Iterator[Any]) -> Any:
        with self._draws.watched():
            return next(batches, _END)


_END = object()


class _Position:
    """The position in a loader that accelerate has prepared. It is a part of the saved state."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.batches = 0
        """Batches of this pass that were yielded."""
        self.is_finished = False
        """The restored step was the last one of its pass."""
        self._is_left = False
        """The loop has left this pass before its end."""
        self._start = EpochStart()
        self._source = loader
        if _is_stateful(loader):
            # accelerate has made the iterator of the first pass, and no later one, ahead of the pass. What
            # that iterator has drawn could not be drawn again after a restart.
            loader.base_dataloader.load_state_dict({})

    def begin(self) -> Any:
        """Return what yields the rest of this pass."""
        loader = self._source = self.loader
        loader.set_epoch(loader.iteration)
        if self.batches == 0:
            self._start.record(loader)
            return loader
        self._start.repeat(loader)
        if not _is_stateful(loader):
            self._source = skip_first_batches(loader, self.batches)
        return self._source

    def leave(self) -> None:
        """Record that the loop has left the pass. It keeps its position until training continues."""
        if self._is_at_end():
            self.loader.iteration += 1  # accelerate counts it when it is asked for another batch
            self.batches = 0
        else:
            self._is_left = True

    def forget_left(self) -> None:
        """Let a pass that the loop has left begin again."""
        if self._is_left:
            self._is_left = False
            self.batches = 0

    def end(self) -> None:
        """Record that the pass has ended."""
        if self.is_finished or self._source is not self.loader:
            # accelerate has counted it for the source that skips batches only, or not at all.
            self.loader.iteration += 1
        self.batches = 0
        self.is_finished = False

    def state_dict(self) -> dict[str, Any]:
        is_finished = self._is_at_end()
        state = {
            "pass": int(self.loader.iteration),
            "batches": self.batches,
            "is_finished": is_finished,
            "start": self._start.state_dict(),
        }
        if _is_stateful(self.loader) and self.batches > 0 and not is_finished:
            state["loader"] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.iteration = state["pass"]
        self.batches = state["batches"]
        self.is_finished = state["is_finished"]
        self._start.load_state_dict(state["start"])
        if "loader" in state:
            self.loader.load_state_dict(state["loader"])

    def _is_at_end(self) -> bool:
        """Return whether the last batch of the pass was yielded."""
        return self.batches > 0 and bool(self._source.end_of_dataloader)


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


def _refuse_save_state(*_: Any) -> None:
    raise ConfigError(
        "accelerator.save_state: Holdfast saves this training: call AcceleratorRun.after_step instead, and "
        "accelerator.save_model to write the weights alone"
    )


def _require_supported(accelerator: Any) -> None:
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ConfigError(
            f"AcceleratorRun: {accelerator.distributed_type.value} keeps its state outside of the "
            "Accelerator: see docs/integrations/README.md for the adapters"
        )
    if plugin is not None and getattr(plugin, "fsdp_version", 1) != 2:
        raise ConfigError(
            "AcceleratorRun: the parameters of FSDP 1 do not say which part of a tensor they hold: set "
            "FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
