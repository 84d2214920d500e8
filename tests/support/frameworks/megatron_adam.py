"""Takes the place of the fused Adam of Apex or Transformer Engine, where neither is installed.

Megatron can neither save nor load its distributed optimizer with torch's own Adam before its first step
(AssertionError and KeyError: 'step' in 0.16, KeyError: 'step' in 0.19).
"""

from __future__ import annotations

from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer import distrib_optimizer


class _Adam(torch.optim.Optimizer):
    """Adam with the state of Apex's FusedAdam: two moments a parameter, and the step in each group."""

    def __init__(
        self, params: Any, *, adam_w_mode: bool, capturable: bool = False, **defaults: Any
    ) -> None:
        assert adam_w_mode and not capturable
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for one in group["params"]:
                if one.grad is None:
                    continue
                state = self.state[one]
                mean = state.setdefault("exp_avg", torch.zeros_like(one))
                square = state.setdefault("exp_avg_sq", torch.zeros_like(one))
                mean.lerp_(one.grad, 1 - first)
                square.lerp_(one.grad.square(), 1 - second)
                size = (square / (1 - second ** group["step"])).sqrt() + group["eps"]
                one.mul_(1 - group["lr"] * group["weight_decay"])
                one.sub_(mean / size * (group["lr"] / (1 - first ** group["step"])))


def install() -> None:
    """Let Megatron's optimizers made from now on use it, unless Apex or Transformer Engine is installed."""
    distributed: Any = distrib_optimizer
    if distributed.HAVE_APEX_OR_TE:
        return
    optimizer: Any = megatron_optimizer
    optimizer.Adam = distributed.Adam = _Adam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True
