"""A training whose model counts its optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import holdfast


class Training:
    """A model whose weight counts its optimizer steps."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optimizer}

    def step(self) -> None:
        self.model.weight.grad = torch.full((1, 1), -1.0)
        self.optimizer.step()

    @property
    def done(self) -> int:
        return int(self.model.weight.item())


def restored(directory: Path) -> tuple[int | None, int]:
    training = Training()
    with holdfast.Checkpointer(dir=directory) as ckpt:
        return ckpt.restore(training.state), training.done


def lap(ckpt: holdfast.Checkpointer, training: Training, total: int) -> Iterator[int]:
    for index in ckpt.steps(total, training.state):
        training.step()
        yield index
