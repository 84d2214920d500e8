"""A1-many: how long a save blocks the training of a module of many parameters with AdamW.

A state of a few large tensors does not show the cost of each tensor. This state has 723 parameters, as a
language model of 60 layers has, and 2,892 tensors in total with those of AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.datapath.state import MIB

PARAMETERS = 723
_MEMBERS = 3
"""A parameter and the two moments of AdamW have the same size."""


@dataclass(frozen=True, slots=True)
class Many:
    model: Any
    optim: Any

    @classmethod
    def make(cls, mib: int) -> Many:
        """Return a module and an optimizer that together hold at most `mib` MiB, after one step."""
        import torch

        count = mib * MIB // 4 // _MEMBERS // PARAMETERS
        model = torch.nn.Module()
        for number in range(PARAMETERS):
            layer = torch.nn.Module()
            layer.weight = torch.nn.Parameter(torch.full((count,), float(number)))
            model.add_module(f"layer{number}", layer)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optim.step()
        return cls(model, optim)

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optim}

    def train_a_little(self) -> None:
        """Change a few bytes of every tensor, and the learning rate."""
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter[:16].add_(1)
                for tensor in self.optim.state[parameter].values():
                    tensor.view(-1)[:16].add_(1)
        self.optim.param_groups[0]["lr"] *= 0.99

    @property
    def size_bytes(self) -> int:
        return sum(_MEMBERS * parameter.nbytes for parameter in self.model.parameters())
