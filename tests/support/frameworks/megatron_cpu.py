"""Lets Megatron-core train on the CPU. Import this module before Megatron is used.

Megatron-core makes its tensors on the device "cuda" and draws dropout from the generators of a GPU. Here the
CPU takes their place. The fused Adam of Apex, which needs a GPU too, is replaced by `_Adam`. Megatron cannot
load its distributed optimizer with torch's own Adam (KeyError: 'step' in 0.16 and 0.19). Nothing else of
Megatron is changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import megatron.core.tensor_parallel.random as megatron_random
import torch
from megatron.core.optimizer import distrib_optimizer
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU that a caller wants on a GPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        changed = dict(kwargs or {})
        if str(changed.get("device")).startswith("cuda"):
            changed["device"] = _CPU
        if func is torch.Tensor.cuda:
            return args[0]
        found = func(*args, **changed)
        if func is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")  # the distributed optimizer insists on it
        return found


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


def _get_state(*_args: object, **_options: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(state: torch.Tensor, *_args: object, **_options: object) -> None:
    torch.set_rng_state(state)


def _install() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.get_rng_state = _get_state
    cuda.set_rng_state = _set_state
    cuda.manual_seed = torch.manual_seed
    cuda.synchronize = lambda *_args: None
    cuda.current_stream = lambda *_args: None
    cuda.empty_cache = lambda: None
    generators: Any = megatron_random
    generators._get_cuda_rng_state = _get_state
    generators._set_cuda_rng_state = _set_state
    # It warns of each change of the CPU's generator.
    logging.getLogger(generators.__name__).setLevel(logging.ERROR)
    optimizer: Any = megatron_optimizer
    optimizer.Adam = _Adam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed: Any = distrib_optimizer
    distributed.Adam = _Adam
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True
    everywhere: Any = _OnCpu()
    everywhere.__enter__()


_install()
