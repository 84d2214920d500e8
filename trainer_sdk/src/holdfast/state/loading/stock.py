"""Determines whether loading a module or an optimizer only copies into its existing tensors.

In that case the bytes may be written before `load_state_dict` is called. Other code may read the old
values, refuse the new ones, or leave some of them out.
"""

from __future__ import annotations

from typing import Any

import torch

_MODULE_HOOKS = ("_load_state_dict_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")
_MODULE_METHODS = (
    "load_state_dict",
    "state_dict",
    "_load_from_state_dict",
    "_save_to_state_dict",
)
"""Scripts replace these in an instance, too, for example to save adapters only."""
_OPTIMIZER_HOOKS = (
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
)


def is_stock_module(module: torch.nn.Module) -> bool:
    """Return whether only torch's own code loads the module and its submodules."""
    return all(_is_stock(one) for one in module.modules())


def only_copies(module: torch.nn.Module) -> bool:
    """Return whether `load_state_dict` may be called without the tensors that were copied before it.

    Hooks that run after it receive the names of the missing tensors, and may refuse or initialize them.
    """
    return not any(one._load_state_dict_post_hooks for one in module.modules()) and is_stock_module(
        module
    )


def is_stock_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether only torch's own code loads the optimizer."""
    return (
        type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
        and type(optimizer).state_dict is torch.optim.Optimizer.state_dict
        and not any(getattr(optimizer, name, None) for name in _OPTIMIZER_HOOKS)
    )


def _is_stock(module: torch.nn.Module) -> bool:
    kind = type(module)
    return (
        kind.load_state_dict is torch.nn.Module.load_state_dict
        and kind.state_dict is torch.nn.Module.state_dict
        and _is_of_torch(kind._load_from_state_dict)
        and _is_of_torch(kind._save_to_state_dict)
        and not any(getattr(module, name, None) for name in _MODULE_HOOKS)
        and not any(name in vars(module) for name in _MODULE_METHODS)
    )


def _is_of_torch(method: Any) -> bool:
    """Return whether torch defines the method. Overrides in torch (batch norm) only fill missing entries."""
    return str(method.__module__).startswith("torch.nn.")
