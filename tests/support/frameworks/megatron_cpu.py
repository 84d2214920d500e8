"""Lets Megatron-core train on the CPU. Import this module before Megatron is used.

Megatron-core makes its tensors on the device "cuda" and draws dropout from the generators of a GPU. Here the
CPU takes their place. The fused Adam of Apex, which needs a GPU too, is replaced (`megatron_adam`). Nothing
else of Megatron is changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import torch
from tests.support.frameworks import megatron_adam
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
    megatron_adam.install()
    everywhere: Any = _OnCpu()
    everywhere.__enter__()


_install()
