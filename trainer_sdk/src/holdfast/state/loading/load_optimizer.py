"""Loads a saved state into an optimizer, so that it has the bits that were saved.

`Optimizer.load_state_dict` of torch casts every tensor of a parameter's state except `step` to the dtype of
the parameter, and rebuilds every other value from its items. It would round moments of fp32 to the bf16 of
their weights, let counters overflow, and replace a str by the text of a generator. `past_the_cast` keeps the
state from that cast. Everything else that torch or the optimizer's own code does runs as usual: checks,
hooks, `__setstate__`.

Where loading a module or an optimizer only copies into its existing tensors (`only_copies`), the bytes may be
written before `load_state_dict` is called. Other code may read the old values, refuse the new ones, or leave
some of them out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from holdfast.state.kinds import tuple_like
from holdfast.state.tensors import copy_all_in, is_alike, is_distributed, is_tensor, local_part

if TYPE_CHECKING:  # torch is needed only where the state holds tensors
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
    import torch

    return (
        type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
        and type(optimizer).state_dict is torch.optim.Optimizer.state_dict
        and not any(getattr(optimizer, name, None) for name in _OPTIMIZER_HOOKS)
    )


def _is_stock(module: torch.nn.Module) -> bool:
    import torch

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


Own = Callable[[Any], Any]
"""Returns a saved value, or its copy, that may be kept after the load."""

_HOOKS = "_optimizer_load_state_dict_pre_hooks"
"""Attribute of an optimizer whose constructor of torch has run. That of a wrapper may not have."""


def load_optimizer(optimizer: Any, saved: dict[str, Any], own: Own) -> None:
    """Load `saved`, which fits the optimizer, into it. Raises what its `load_state_dict` raises."""
    state = _own_state(optimizer, saved, own)
    with past_the_cast(optimizer):
        optimizer.load_state_dict(state)


@contextmanager
def past_the_cast(optimizer: Any) -> Iterator[None]:
    """Let `load_state_dict` of this optimizer, and of those that it wraps, keep the dtypes of its argument.

    Tensors come to the devices that torch chooses. The optimizers keep the tensors that are there already.
    """
    with ExitStack() as stack:
        for one in _with_wrapped(optimizer):
            if _HOOKS in vars(one):
                stack.enter_context(_kept_from_cast(one))
        yield


@contextmanager
def _kept_from_cast(optimizer: Any) -> Iterator[None]:
    """Hand the state to `__setstate__` directly, which torch calls with what it has cast."""
    given: list[dict[str, Any]] = []
    set_state = optimizer.__setstate__

    def take(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        given.append(saved)
        return {**saved, "state": {}}

    def put(loaded: dict[str, Any]) -> None:
        if given:
            loaded["state"].update(_by_parameter(given.pop(), loaded["param_groups"]))
        set_state(loaded)

    hook = optimizer.register_load_state_dict_pre_hook(take)  # behind all others
    optimizer.__setstate__ = put
    try:
        yield
    finally:
        del optimizer.__setstate__
        hook.remove()


def _with_wrapped(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer, and those that it holds, as wrappers and containers do."""
    import torch

    found = [optimizer]
    for one in found:
        yield one
        for value in vars(one).values():
            for item in value if isinstance(value, list | tuple) else (value,):
                is_new = all(item is not known for known in found)
                if isinstance(item, torch.optim.Optimizer) and is_new:
                    found.append(item)


def _by_parameter(saved: dict[str, Any], groups: Iterable[dict[str, Any]]) -> dict[Any, Any]:
    """Return the saved state with parameters as keys instead of their numbers."""
    known = {
        number: (parameter, group)
        for old, group in zip(saved["param_groups"], groups, strict=True)
        for number, parameter in zip(old["params"], group["params"], strict=True)
    }
    state: dict[Any, Any] = {}
    for number, entries in saved["state"].items():
        if number in known:
            parameter, group = known[number]
            state[parameter] = _placed(entries, parameter.device, group)
        else:
            state[number] = entries
    return state


def _placed(value: Any, device: Any, group: dict[str, Any], key: object = None) -> Any:
    """Return a value with its tensors on the device where torch keeps them."""
    if is_tensor(value):
        # `step` of an optimizer is read by Python code, unless its kernels on the device read it.
        stays = key == "step" and not (group.get("capturable") or group.get("fused"))
        return value if stays else value.to(device)
    if isinstance(value, dict):
        placed = copy.copy(value)
        for name, item in value.items():
            placed[name] = _placed(item, device, group, name)
        return placed
    if isinstance(value, list):
        return [_placed(item, device, group) for item in value]
    if isinstance(value, tuple):
        return tuple_like(value, (_placed(item, device, group) for item in value))
    return value


def _own_state(optimizer: Any, saved: dict[str, Any], own: Own) -> dict[str, Any]:
    """Return `saved` with tensors that the optimizer may keep. Tensors that it has are reused if they fit."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[Any, Any] = {}
    reused: list[tuple[Any, Any]] = []
    for index, entries in saved["state"].items():
        known = isinstance(index, int) and index < len(parameters)
        parameter = parameters[index] if known else None
        have = optimizer.state.get(parameter, {}) if parameter is not None else {}
        state[index] = {
            k: _keep(have.get(k), v, parameter, own, reused) for k, v in entries.items()
        }
    copy_all_in(reused)
    return {**{k: own(v) for k, v in saved.items() if k != "state"}, "state": state}


def _keep(have: Any, saved: Any, parameter: Any, own: Own, reused: list[tuple[Any, Any]]) -> Any:
    """Return the tensor to load, and append it to `reused` if the optimizer has it already."""
    if not is_tensor(saved):
        return own(saved)
    if is_tensor(have) and is_alike(local_part(have), saved):
        reused.append((have, saved))
        return have
    if is_distributed(parameter) and saved.shape == parameter.to_local().shape:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            own(saved).to(parameter.to_local().device),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return own(saved)
