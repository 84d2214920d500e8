"""Optimizers of frameworks have their saved bits after a restore, whatever the dtype of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.optimization import Adafactor

import holdfast

WEIGHTS = [torch.bfloat16, torch.float16, torch.float32]


class Net:
    """A matrix, whose second moments Adafactor factors, and a vector, whose moments it does not."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(3)
        self.weights = [torch.randn(4, 3).to(dtype), torch.randn(5).to(dtype)]
        self.optimizer = Adafactor(self.weights, beta1=0.9, lr=0.01, relative_step=False)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for weight in self.weights:
                weight.grad = torch.randn(weight.shape).to(weight.dtype)
            self.optimizer.step()

    @property
    def tensors(self) -> list[torch.Tensor]:
        states = [self.optimizer.state[weight] for weight in self.weights]
        return [
            *self.weights,
            *(x for state in states for x in state.values() if isinstance(x, torch.Tensor)),
        ]

    @property
    def state(self) -> dict[str, object]:
        return {"weights": self.weights, "optim": self.optimizer}


@pytest.mark.parametrize("dtype", WEIGHTS, ids=str)
def test_adafactor_of_transformers_continues_with_its_bits(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    undisturbed = Net(dtype)
    undisturbed.train(3)
    with holdfast.Checkpointer(tmp_path, on_save_error="raise") as ckpt:
        ckpt.save(3, undisturbed.state).wait("local", timeout=300)
    resumed = Net(dtype)
    with holdfast.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(resumed.state) == 3
    for steps in (0, 2):
        for net in (undisturbed, resumed):
            torch.manual_seed(steps)
            net.train(steps)
        for saved, found in zip(undisturbed.tensors, resumed.tensors, strict=True):
            assert found.dtype == saved.dtype
            assert torch.equal(found, saved)
