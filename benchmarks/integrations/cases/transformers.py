"""Hugging Face's Trainer, beside the checkpoints that it saves itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.integrations.case import SCRIPTS, Blocked, Case

SAVES = 8


def _blocked(folder: Path) -> Blocked:
    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from benchmarks.integrations.timed import TimedCheckpointer, timed
    from holdfast.integrations.transformers import HoldfastTrainer

    theirs: list[float] = []

    class Both(TrainerCallback):  # type: ignore[misc]
        """Saves with the Trainer's own code, before Holdfast saves the same step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            with timed(theirs):
                Trainer._save_checkpoint(trainer, trainer.model, None)

    torch.manual_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=1000, n_positions=16, n_embd=384, n_layer=6, n_head=6)
    )
    rows = torch.randint(0, 1000, (SAVES + 1, 16))
    args = TrainingArguments(
        str(folder / "theirs"),
        max_steps=SAVES + 1,
        per_device_train_batch_size=1,
        save_strategy="no",
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    with TimedCheckpointer(folder / "ours", interval_steps=1) as ckpt:
        trainer = HoldfastTrainer(model, args, train_dataset=data, callbacks=[Both()], ckpt=ckpt)
        trainer.train()
    bytes_ = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    return Blocked(
        ckpt.seconds[1:], theirs[1:], bytes_
    )  # without the first of each, which warms up


CASE = Case(
    name="transformers",
    distribution="transformers",
    lines=5,
    script=SCRIPTS / "transformers_features.py",
    arguments=("plain",),
    preload=(
        "holdfast.integrations.transformers",
        "transformers.models.gpt2.modeling_gpt2",
        "deepspeed",
    ),
    theirs="Trainer._save_checkpoint",
    blocked=_blocked,
)
