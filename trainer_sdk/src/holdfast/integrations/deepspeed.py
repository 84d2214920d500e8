"""Saves and resumes a training of DeepSpeed's engine with ZeRO stage 1 or 2.

DeepSpeed hands its state over as files of each rank: `mp_rank_00_model_states.pt` with the module and its
counters, and one `..._optim_states.pt` with the rank's part of the optimizer. `HoldfastEngine` is a
CheckpointEngine that keeps these files as values instead of writing them:

 1. `step_done` asks on every rank whether the step is saved. If so, `engine.save_checkpoint` gives the files
    to `save`, and `commit` saves them, with the module as a tensor of the gang, by the Checkpointer.
 2. `restore` loads them first and then calls `engine.load_checkpoint`. DeepSpeed lists the files of a folder
    before it loads them. So it gets a temporary folder with empty files of these names.

A rank's part of the optimizer is a piece of flat, padded groups. It fits the same number of ranks only.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from deepspeed.runtime.pipe.module import PipelineModule

import holdfast
from holdfast.base.notices import show_notice
from holdfast.base.settings import RankSettings
from holdfast.integrations.versions import warn_if_untested
from holdfast_core.errors import ConfigError, StateMismatchError

logger = logging.getLogger(__name__)

_MODULE = "module"
_SLICES = "param_slice_mappings"
"""Only DeepSpeed's offline tools read it, from files that do not exist here."""
_SCALER = "$loss_scaler"
_TAG = "holdfast"
"""The name of the folder in which DeepSpeed looks for its files."""


class HoldfastEngine(CheckpointEngine):  # type: ignore[misc]  # the class is Any without DeepSpeed
    """Makes an engine of `deepspeed.initialize` save by a Checkpointer.

    engine: its ZeRO stage is 1 or 2.
    ckpt: the Checkpointer of this rank.
    state: further parts of the training, such as a data loader and `holdfast.RNG()`.

    A restart needs the same number of ranks. Rank 0 logs that at once.

    Raises ConfigError for an engine whose state cannot be saved.
    """

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        ckpt: holdfast.Checkpointer,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        warn_if_untested("deepspeed")
        _require_supported(engine, state or {})
        self.name = "HoldfastEngine"
        self._engine = engine
        self._ckpt = ckpt
        self._files = _Files(engine)
        self._state: dict[str, Any] = {
            **(state or {}),
            _MODULE: engine.module,
            "deepspeed": self._files,
        }
        self._last = engine.global_steps
        self._is_called = False
        """Whether this object called DeepSpeed to save or load, and not the script."""
        engine.checkpoint_engine = self
        # DeepSpeed decided with its own engine which ranks write the file of the module.
        engine.save_non_zero_checkpoint = True
        if RankSettings.from_env().rank == 0:
            show_notice(
                logger,
                "DeepSpeed ZeRO stage %d: a restart of this training needs the same number of ranks (%d)",
                engine.zero_optimization_stage(),
                RankSettings.from_env().world_size,
            )

    # ------------------------------------------------------------------ for a training loop

    def restore(self) -> int | None:
        """Load the restore point and return its number of optimizer steps, or None if there is none.

        Raises StateMismatchError if another number of ranks saved it, and what `Checkpointer.restore`
        raises.
        """
        return self._ckpt.restore(self._state, before_rng=self._load)

    def _load(self) -> None:
        """Let DeepSpeed load the files, before the random number generators get their states."""
        if not self._files.of_rank:
            return  # there was nothing to restore
        with self._called() as folder:
            for name in self._files.of_rank:
                stub = Path(folder, _TAG, name)
                stub.parent.mkdir(exist_ok=True)
                stub.touch()
            path, _ = self._engine.load_checkpoint(folder, tag=_TAG)
        if path is None:
            raise StateMismatchError(
                "DeepSpeed: engine.load_checkpoint did not accept the restored state, whose files are "
                f"{sorted(self._files.of_rank)}: use the model and the configuration that saved it"
            )
        self._files.of_rank = {}
        self._last = self._engine.global_steps

    def step_done(self, *, is_last: bool = False) -> bool:
        """Save if a save is due. Return whether the gang was asked to stop: leave the loop then.

        Call it on every rank after each `engine.step()`. It does nothing while gradients are accumulated.

        is_last: save this step in any case.
        """
        step = self._engine.global_steps
        if step != self._last:
            self._last = step
            if self._ckpt.should_save(step) or is_last:
                self._save()
        return self._ckpt.stopping

    def _save(self) -> None:
        with self._called() as folder:
            self._engine.save_checkpoint(folder, tag=_TAG, save_latest=False)

    @contextmanager
    def _called(self) -> Iterator[str]:
        """Let this object call DeepSpeed within the context, with the folder that it yields."""
        with tempfile.TemporaryDirectory(prefix="holdfast-deepspeed-") as folder:
            self._is_called = True
            try:
                yield folder
            finally:
                self._is_called = False

    # ------------------------------------------------------------------ called by DeepSpeed

    def create(self, info: CheckpointCommitInfo) -> None:
        if not self._is_called:
            raise ConfigError(
                f"engine.save_checkpoint({info.save_dir!r}): this engine saves by holdfast, and nothing "
                "would be written there: call HoldfastEngine.step_done instead"
            )
        self._files.of_rank = {}

    def save(self, state_dict: MutableMapping[str, Any], path: str) -> None:
        self._files.of_rank[Path(path).name] = state_dict

    def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
        if not self._is_called:
            raise ConfigError(
                f"engine.load_checkpoint: {path} was not loaded, because this engine restores by holdfast: "
                "call HoldfastEngine.restore instead, or load the file before you create the HoldfastEngine"
            )
        file: dict[str, Any] = self._files.of_rank[Path(path).name]
        return file

    def commit(self, info: CheckpointCommitInfo) -> bool:
        self._ckpt.save(self._last, self._state)
        self._files.of_rank = {}
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return True  # every rank hands its files to the Checkpointer

    def preserves_storage_sharing(self) -> bool:
        return False


class _Files:
    """The files of this rank, by name, as DeepSpeed hands them over. The module's tensors are left out."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine) -> None:
        self.of_rank: dict[str, Any] = {}
        self._engine = engine
        self._ranks = RankSettings.from_env().world_size

    def state_dict(self) -> dict[str, Any]:
        files = {name: _plain(one) for name, one in self.of_rank.items()}
        return {"ranks": self._ranks, "files": files}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["ranks"] != self._ranks:
            raise StateMismatchError(
                f"DeepSpeed: the checkpoint was saved by {state['ranks']} ranks, and these are "
                f"{self._ranks}. The parts of ZeRO's optimizer fit the same number of ranks only: start "
                f"{state['ranks']} ranks"
            )
        self.of_rank = {name: self._whole(one) for name, one in state["files"].items()}

    def _whole(self, file: dict[str, Any]) -> dict[str, Any]:
        """Return a file as DeepSpeed handed it over."""
        if _MODULE in file:
            file[_MODULE] = self._engine.module.state_dict()  # it is already loaded
        optimizer = file.get("optimizer_state_dict")
        if optimizer is not None and _SCALER in optimizer:
            scaler = self._engine.optimizer.loss_scaler
            vars(scaler).update(optimizer.pop(_SCALER))
            optimizer["loss_scaler"] = scaler
        return file


def _plain(file: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a file that can be saved. Others are refused by path when they are saved."""
    plain = dict(file)
    if _MODULE in plain:
        plain[_MODULE] = None
    optimizer = plain.get("optimizer_state_dict")
    if optimizer is not None:
        optimizer = {key: value for key, value in optimizer.items() if key != _SLICES}
        scaler = optimizer.get("loss_scaler")
        if isinstance(scaler, LossScalerBase):
            del optimizer["loss_scaler"]
            optimizer[_SCALER] = {
                key: value
                for key, value in vars(scaler).items()
                if isinstance(value, bool | int | float)
            }
        plain["optimizer_state_dict"] = optimizer
    return plain


def _require_supported(engine: deepspeed.DeepSpeedEngine, state: Mapping[str, Any]) -> None:
    """Raise ConfigError for an engine whose state cannot be saved exactly, before the training starts."""
    stage = engine.zero_optimization_stage()
    if stage not in (1, 2):
        raise ConfigError(
            f"HoldfastEngine: expected ZeRO stage 1 or 2, found {int(stage)}: use torch's fully_shard "
            "instead of stage 3, and Checkpointer.save with the model and the optimizer instead of stage 0"
        )
    for is_used, what in (
        (isinstance(engine.module, PipelineModule), "a PipelineModule"),
        (engine.has_moe_layers, "mixture-of-experts layers"),
        (engine.zero_nvme_offload_optimizer(), "an optimizer offloaded to NVMe"),
        (engine.load_universal_checkpoint(), "checkpoint.load_universal"),
    ):
        if is_used:
            raise ConfigError(
                f"HoldfastEngine: found {what}, whose files DeepSpeed writes or reads itself: leave it out, "
                "or use DeepSpeed's own checkpoints"
            )
    taken = sorted({_MODULE, "deepspeed"} & state.keys())
    if taken:
        raise ConfigError(
            f"HoldfastEngine(state=...): the names {', '.join(taken)} are used by the engine itself: choose "
            "others"
        )
