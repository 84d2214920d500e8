"""Options of a Trainer that are refused, and those that make a resume inexact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers.trainer_utils import SaveStrategy

from holdfast_core.errors import ConfigError

_EXACT_WITHOUT_WARM_UP = 2
"""Ranks whose sums do not depend on the order of the gradients: a + b equals b + a."""


def require_supported(trainer: Any) -> None:
    """Raise ConfigError, with the option to set, for an option that HoldfastTrainer does not support."""
    for reason in _refusals(trainer):
        raise ConfigError(f"HoldfastTrainer: {reason}")


def _refusals(trainer: Any) -> Iterator[str]:
    args = trainer.args
    saves_best = args.save_strategy == SaveStrategy.BEST and args.save_only_model
    if args.save_strategy != SaveStrategy.NO and not saves_best:
        yield (
            f'save_strategy="{args.save_strategy.value}" lets the Trainer save the training as well: set '
            'TrainingArguments(save_strategy="no"), or, for load_best_model_at_end, '
            'TrainingArguments(save_strategy="best", save_only_model=True)'
        )
    if args.enable_jit_checkpoint:
        yield (
            "enable_jit_checkpoint=True lets the Trainer handle SIGTERM and save as well: set "
            "TrainingArguments(enable_jit_checkpoint=False); Holdfast saves at SIGTERM"
        )
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size=True starts the training again from its first step after each attempt: "
            "set TrainingArguments(auto_find_batch_size=False, per_device_train_batch_size=...)"
        )
    if trainer.is_deepspeed_enabled:
        yield (
            "the Trainer's DeepSpeed engine keeps its state outside of the Trainer: train without "
            "deepspeed=..., for example with fsdp, or see docs/integrations/README.md for DeepSpeed"
        )
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and getattr(plugin, "fsdp_version", 1) != 2:
        yield (
            "the parameters of FSDP 1 do not say which part of a tensor they hold: set "
            'fsdp_config={"fsdp_version": 2}'
        )


def inexact(trainer: Any, *, has_drawn: bool) -> Iterator[str]:
    """Yield one line for each part of the state that cannot be exact after a restart."""
    args = trainer.args
    if has_drawn:
        yield (
            "train_dataset, data_collator: they draw from the global random number generators while a "
            "batch is fetched, so that batches differ after a restart; wrap them with "
            "holdfast.data.indexed and holdfast.data.keyed (docs/training.md, section 3)"
        )
    if args.ignore_data_skip:
        yield (
            "args.ignore_data_skip: the data begins again at a restart; set it to False to continue "
            "where the training was"
        )
    wrapped = trainer.model_wrapped
    rebuilds = getattr(wrapped, "find_unused_parameters", True) is False
    if args.world_size > _EXACT_WITHOUT_WARM_UP and rebuilds and not wrapped.static_graph:
        yield (
            "args.ddp_find_unused_parameters: DistributedDataParallel orders its buckets anew after the "
            "first step of each process, so that the first step after a restart adds gradients in "
            "another order; set ddp_find_unused_parameters=True"
        )
