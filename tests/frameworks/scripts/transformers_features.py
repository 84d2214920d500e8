"""Trainings with Hugging Face's Trainer, tiny and on the CPU: `transformers_features.py CASE`.

Each prints `step <n>` after each optimizer step, and at its end `digest <hex>` of the model, the optimizer,
the best metric and the callbacks.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from tests.support.frameworks.digest import digest_of
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

import holdfast
from holdfast.data import indexed, keyed
from holdfast.integrations.transformers import HoldfastTrainerMixin

ROWS, LENGTH, WORDS = 40, 12, 64


def rows() -> list[dict[str, torch.Tensor]]:
    """Return a dataset of sequences."""
    ids = (torch.arange(LENGTH)[None] * (torch.arange(ROWS)[:, None] + 3)) % (WORDS - 4)
    return [{"input_ids": one, "labels": one} for one in ids]


def model() -> Any:
    """Return a model with dropout."""
    config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2)
    return GPT2LMHeadModel(config)


class Stream(IterableDataset[Any]):
    """The dataset, shuffled by the global generator when a pass begins."""

    def __init__(self, *, has_length: bool) -> None:
        self.has_length = has_length

    def __len__(self) -> int:
        if not self.has_length:
            raise TypeError
        return ROWS

    def __iter__(self) -> Iterator[Any]:
        data = rows()
        return (data[i] for i in torch.randperm(ROWS).tolist())


class Steps(TrainerCallback):
    """Prints the steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print("step", state.global_step, flush=True)


class Patience(TrainerCallback, ExportableState):
    """Ends the training after a number of evaluations. Its count is a state."""

    def __init__(self, evaluations: int = 3) -> None:
        self.evaluations = evaluations
        self.done = 0

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.done += 1
        if self.done >= self.evaluations:
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        return {"args": {"evaluations": self.evaluations}, "attributes": {"done": self.done}}


def masked(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Collate with random masks."""
    ids = torch.stack([one["input_ids"] for one in samples])
    masks = torch.rand(ids.shape) < 0.3
    return {"input_ids": torch.where(masks, WORDS - 1, ids), "labels": ids}


def digest_of_trainer(trainer: Any) -> str:
    """Return a digest of everything that a training ends with."""
    states = trainer.optimizer.state_dict()["state"].values()
    moments = [one.reshape(-1) for state in states for one in state.values()]
    others = (
        trainer.state.global_step,
        trainer.state.best_metric,
        trainer.lr_scheduler.get_last_lr(),
        [vars(one) for one in trainer.callback_handler.callbacks if isinstance(one, Patience)],
    )
    tensors = digest_of([*trainer.model.parameters(), *moments])
    return hashlib.sha256(f"{tensors} {others}".encode()).hexdigest()


def arguments_of(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of TrainingArguments and of the Trainer."""
    match case:
        case "plain":
            return {"max_steps": 18}, {}
        case "evaluated-passes":  # two whole passes, and a part of a third
            return (
                {"num_train_epochs": 5, "eval_strategy": "epoch", "metric_for_best_model": "loss"},
                {"callbacks": [Patience(3)]},
            )
        case "best-model":
            best = {
                "save_strategy": "best",
                "save_only_model": True,
                "load_best_model_at_end": True,
            }
            return {"max_steps": 12, "eval_strategy": "steps", "eval_steps": 2, **best}, {}
        case "grouped":
            return {"max_steps": 12, "train_sampling_strategy": "group_by_length"}, {}
        case "global-sampler":
            return {"max_steps": 12, "accelerator_config": {"use_seedable_sampler": False}}, {}
        case "stream":
            return {"max_steps": 12}, {"train_dataset": Stream(has_length=True)}
        case "keyed":
            data = {"train_dataset": indexed(rows()), "data_collator": keyed(masked, 7)}
            return {"max_steps": 12, "dataloader_num_workers": 2}, data
        case "masked":
            return {"max_steps": 12}, {"data_collator": masked}
        case _:
            raise ValueError(case)


class MixedTrainer(HoldfastTrainerMixin, Trainer):
    """A subclass like those of other libraries."""


def main(case: str, *options: str) -> None:
    transformers.set_seed(7)
    arguments, others = arguments_of(case)
    args = TrainingArguments(
        **{
            "output_dir": "output",
            "save_strategy": "no",
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "logging_steps": 3,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "seed": 7,
            **arguments,
        }
    )
    others = {"train_dataset": rows(), "eval_dataset": rows()[:8], **others}
    others["callbacks"] = [Steps(), *others.get("callbacks", [])]
    with holdfast.Checkpointer("ckpt", interval_steps=2, when_busy="wait") as ckpt:
        trainer = MixedTrainer(model(), args, ckpt=ckpt, **others)
        trainer.train()
        if "again" in options:
            trainer.train()
    print("digest", digest_of_trainer(trainer))


if __name__ == "__main__":
    holdfast.pin_threads(1)
    main(*sys.argv[1:])
