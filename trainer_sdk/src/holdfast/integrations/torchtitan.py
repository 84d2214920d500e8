"""A checkpoint manager of torchtitan over Holdfast.

torchtitan chooses it by the type of its Config:

    config.checkpoint = HoldfastCheckpointManager.Config(enable=True, interval=50)

A save makes no collective. It also holds the random number generators, which torchtitan does not save.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.config import TORCH_DTYPE_MAP

from holdfast.base.options import Folder
from holdfast.checkpointer import Checkpointer
from holdfast.integrations.futures import future_of
from holdfast.integrations.versions import warn_if_untested
from holdfast.state.loading.load_optimizer import past_the_cast
from holdfast.state.rng import RNG
from holdfast_core.contract import PodContract
from holdfast_core.errors import ConfigError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from holdfast.base.handle import SaveHandle

logger = logging.getLogger(__name__)

_RNG = "rng"
_KEEP_ALL = 1 << 30


class HoldfastCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]  # not installed for mypy
    """Saves and restores a torchtitan training.

    Every save holds the whole state, that of the last step too, so that a training can be continued with
    more steps. In a worker pod the job decides folder, interval and retention.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]  # as above
        """The policies of all managers of torchtitan.

        Some have another meaning here:

        keep_latest_k: 0 keeps all checkpoints.
        last_save_model_only, export_dtype: what `last_save_in_hf` writes, and nothing else.
        initial_load_path: a folder of Holdfast, of DCP, or with `initial_load_in_hf` of Hugging Face.
        """

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: Future[SaveHandle] | None = None
        if not self.enable:
            return
        warn_if_untested("torchtitan")
        if config.last_save_in_hf and sd_adapter is None:
            raise ConfigError(
                "checkpoint.last_save_in_hf: this model has no state_dict_adapter, which names the "
                "tensors as Hugging Face does: leave it out, and use `holdfast export`"
            )
        self._config = config
        self._folder = Path(base_folder) / config.folder
        self._parts = model_parts
        self._model = ModelWrapper(model_parts)
        self._optimizers = optimizers
        self._adapter = sd_adapter
        self._rest = {
            **states,
            DATALOADER: dataloader,
            LR_SCHEDULER: lr_schedulers,
            _RNG: RNG(),
        }
        for key in config.exclude_from_loading:
            if key not in self._rest and key != OPTIMIZER:
                raise ConfigError(
                    f"checkpoint.exclude_from_loading: {key!r}, expected some of "
                    f"{', '.join([OPTIMIZER, *self._rest])}"
                )
        self._checkpointer = Checkpointer(
            None
            if PodContract.from_env() is not None
            else Folder(self._folder, keep_last=config.keep_latest_k or _KEEP_ALL),
            interval_steps=config.interval,
            when_busy="wait",
        )

    # ------------------------------------------------------------------ load

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        ckpt = self._checkpointer
        point = ckpt.peek()
        if step != -1 and (point is None or point.step != step):
            point = ckpt.restore_tensors({}, step=step)  # rolls back, in a folder
        if point is None:
            return self._load_initial()
        if point.step == 0:  # a seed checkpoint, which one process has made
            ckpt.restore_tensors(_named(self._model.state_dict()))
            return True
        state = self._state()  # the optimizers make the tensors that a restore fills
        for key in self._config.exclude_from_loading:
            state[key] = _left_out(state[key])
        ckpt.restore(state)
        self._model.load_state_dict(state[MODEL])
        if OPTIMIZER not in self._config.exclude_from_loading:
            self._load_optimizers(state[OPTIMIZER])
        self._load_rng_before_forward()
        return True

    def _load_optimizers(self, state: dict[str, Any]) -> None:
        with past_the_cast(self._optimizers):
            self._optimizers.load_state_dict(state)

    def _load_rng_before_forward(self) -> None:
        """Load the random number generators again before the first forward pass.

        torchtitan makes the iterator of its data after the restore, and an iterator draws a seed.
        """
        rng: RNG = self._rest[_RNG]
        numbers = rng.state_dict()

        def load(*args: Any) -> None:
            for hook in hooks:
                hook.remove()
            rng.load_state_dict(numbers)

        hooks = [part.register_forward_pre_hook(load) for part in self._parts]

    def _load_initial(self) -> bool:
        path = self._config.initial_load_path
        if self._config.initial_load_in_hf:
            self._load_hugging_face(path)
        elif path is None:
            return False
        elif (Path(path) / ".metadata").exists():
            self._load_dcp(path)
        else:
            self._load_folder(path)
        return True

    def _load_hugging_face(self, path: str | None) -> None:
        if self._adapter is None:
            raise ConfigError(
                "checkpoint.initial_load_in_hf: this model has no state_dict_adapter, which knows the "
                "names of Hugging Face: leave it out"
            )
        source = path or self._adapter.hf_assets_path
        reader = self._adapter.get_hf_storage_reader(
            source, self._config.initial_load_in_hf_quantized
        )
        named = self._adapter.to_hf(self._model.state_dict())
        state_dict_loader.load(named, storage_reader=reader)
        self._model.load_state_dict(self._adapter.from_hf(named))
        logger.info("loaded the model from Hugging Face's files in %s", source)

    def _load_dcp(self, path: str) -> None:
        # torchtitan's own manager puts the model's tensors at the top of the state.
        state = dict(self._model.state_dict())
        if not self._config.initial_load_model_only:
            state |= {OPTIMIZER: self._optimizers, **self._rest}
            del state[_RNG]
            state = {k: v for k, v in state.items() if k not in self._config.exclude_from_loading}
        state_dict_loader.load(state, checkpoint_id=path)
        self._model.load_state_dict(state)
        logger.info("loaded the checkpoint of DCP in %s", path)

    def _load_folder(self, path: str) -> None:
        model = self._model.state_dict()
        with Checkpointer(path, interval_steps=0) as source:
            if self._config.initial_load_model_only:
                found = source.restore_tensors(_named(model)) is not None
            else:
                state = self._state()
                found = source.restore(state) is not None
                self._load_optimizers(state[OPTIMIZER])
                model = state[MODEL]
        if not found:
            raise ConfigError(
                f"checkpoint.initial_load_path={path!r}: expected a folder with a checkpoint of Holdfast "
                "or of DCP, found none"
            )
        self._model.load_state_dict(model)

    # ------------------------------------------------------------------ save

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config, ckpt = self._config, self._checkpointer
        if config.load_only:
            return False
        is_due = ckpt.should_save(curr_step)  # asked after every step, on every rank
        is_first = curr_step == 1 and config.enable_first_step_checkpoint
        if not (is_due or is_first or last_step):
            return False
        self.save_future = future_of(ckpt.save(curr_step, self._state()))
        if last_step and config.last_save_in_hf:
            self._save_hugging_face(curr_step)
        if ckpt.stopping:
            # torchtitan's loop cannot be asked to end. All ranks get here after the same step.
            logger.warning("training stops after step %d, as it was asked to", curr_step)
            ckpt.close()
            raise SystemExit(0)
        return True

    def _save_hugging_face(self, step: int) -> None:
        """Write the model as torchtitan's own manager does, beside the folder of the checkpoints."""
        dtype = TORCH_DTYPE_MAP[self._config.export_dtype]
        named = self._adapter.to_hf(
            {
                name: one.to(dtype) if one.is_floating_point() else one
                for name, one in self._model.state_dict().items()
            }
        )
        target = self._folder.with_name(f"{self._folder.name}-hf") / f"step-{step}"
        files = self._adapter.fqn_to_index_mapping
        parts = target / "sharded" if files else target
        writer = HuggingFaceStorageWriter(
            path=str(parts),
            save_distributed=True,
            fqn_to_index_mapping=files,
            enable_consolidation=not files,
        )
        state_dict_saver.save(named, storage_writer=writer)
        if files:
            consolidate_safetensors_files_on_every_rank(str(parts), str(target), files, 5)
        logger.info("saved the model as Hugging Face's files in %s", target)

    def _wait_for_saving(self) -> None:
        if self.save_future is not None:
            self.save_future.result()
            self.save_future = None

    def _maybe_wait_for_staging(self) -> None:
        self._checkpointer.wait_staged()

    def _close(self) -> None:
        if hasattr(self, "_checkpointer"):  # torchtitan also closes a manager that was not built
            self._checkpointer.close()

    def _state(self) -> dict[str, Any]:
        """Return the state. Tensors of model and optimizers belong to the gang, the rest to the rank."""
        return {
            MODEL: dict(self._model.state_dict()),
            OPTIMIZER: self._optimizers.state_dict(),
            **self._rest,
        }


def _named(model: dict[str, Any]) -> dict[str, Any]:
    return {f"{MODEL}.{name}": one for name, one in model.items()}


class _LeftOut:
    """Stands for an object that is not loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _left_out(part: Any) -> Any:
    """Return what the saved part is loaded into instead, so that `part` keeps its values."""
    if not isinstance(part, dict):
        return _LeftOut()
    return {
        key: torch.empty_like(one) if isinstance(one, torch.Tensor) else one
        for key, one in part.items()
    }
