"""The training that is measured: a module with AdamW, and a blocking copy of its state to compare with."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

_WIDTH = 2048
_BYTES_PER_PARAMETER = 12
"""A float32 parameter and the two moments of AdamW."""
_BATCH = 256


@dataclass(slots=True)
class Training:
    device: Any
    model: Any
    optimizer: Any
    batch: Any
    passes_per_step: int = 1
    """Forward and backward passes before one step of the optimizer."""

    @classmethod
    def make(cls, device_name: str, mib: int, width: int = _WIDTH) -> Training:
        """Return a training whose parameters and moments take about `mib` MiB, after one step."""
        import torch

        torch.manual_seed(1)
        device = torch.device(device_name)
        layers = max(1, (mib << 20) // (_BYTES_PER_PARAMETER * width * width))
        members = [
            member
            for _ in range(layers)
            for member in (torch.nn.Linear(width, width, bias=False), torch.nn.ReLU())
        ]
        model = torch.nn.Sequential(*members).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        training = cls(device, model, optimizer, torch.randn(_BATCH, width, device=device))
        training.step()
        training.synchronize()
        return training

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer}

    def tensors(self) -> list[Any]:
        """Return all tensors of the state, without copying them."""
        moments = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return [*(p.detach() for p in self.model.parameters()), *moments]

    @property
    def size_bytes(self) -> int:
        return sum(int(tensor.nbytes) for tensor in self.tensors())

    def step(self) -> None:
        for _ in range(self.passes_per_step):
            self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)

    def lengthen(self, seconds: float) -> None:
        """Use so many passes that a step takes at least `seconds`."""
        while (taken := self.time_of_step()) < seconds:
            self.passes_per_step = max(
                self.passes_per_step + 1, round(self.passes_per_step * seconds / taken)
            )

    def time_of_step(self) -> float:
        self.step()
        self.synchronize()
        began = time.perf_counter()
        for _ in range(3):
            self.step()
        self.synchronize()
        return (time.perf_counter() - began) / 3


class BlockingCopy:
    """The simplest way to save memory from a device: all tensors into page-locked memory, then wait."""

    def __init__(self, training: Training) -> None:
        import torch

        pin = training.device.type == "cuda"
        self._training = training
        self._copies = [
            torch.empty(t.shape, dtype=t.dtype, pin_memory=pin) for t in training.tensors()
        ]

    def seconds(self) -> float:
        """Copy once and return the time."""
        self._training.synchronize()
        began = time.perf_counter()
        for copy, tensor in zip(self._copies, self._training.tensors(), strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._training.synchronize()
        return time.perf_counter() - began
