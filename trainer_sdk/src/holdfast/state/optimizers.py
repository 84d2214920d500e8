"""What optimizers write, and whether a saved optimizer state fits an optimizer.

An optimizer writes its own state and the parameters in its groups. The writer of all other parameters (for
example an average of weights) and of all buffers is unknown.

Before any part of a state is loaded, the saved state is compared with the optimizer. torch checks only the
number of parameters. It would accept the state of another class (AdamW's for SGD), and the next `step()`
would fail after the old state was replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.state.tensors import Leaf, describe, is_alike, is_tensor, local_part

_Place = tuple[Any, int, int]


class Writers:
    """Writers of the parameters at their current addresses. Do not keep it: a parameter may move."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._by_id = {id(optimizer): optimizer for optimizer in optimizers}
        self._parameters: dict[_Place, Any] = {}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    place = _place(local_part(parameter))
                    if place is not None:
                        self._parameters[place] = optimizer

    def of(self, leaf: Leaf) -> Any | None:
        """Return the optimizer that writes `leaf`, or None if that is unknown or torch counts no writes."""
        if leaf.source.is_inference():
            return None
        if leaf.owner is not None:
            return self._by_id.get(id(leaf.owner))
        place = _place(leaf.source)
        return None if place is None else self._parameters.get(place)


def _place(tensor: Any) -> _Place | None:
    """Return device, address and byte count, because a state_dict has other objects over the same memory."""
    try:
        return tensor.device, tensor.data_ptr(), tensor.numel() * tensor.element_size()
    except RuntimeError:  # a tensor without memory of its own
        return None


_LIKE_PARAMETER = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
        "prev",
        "step_size",
    }
)
"""Names of entries in torch's own optimizers that have the shape of their parameter."""


class SavedOptimizer(dict[str, Any]):
    """Result of an optimizer's state_dict, with the name of the optimizer's class."""

    kind: str = ""


def kind_of(optimizer: Any) -> str:
    """Return the name of the class without its module, because a class may move to another module."""
    return type(optimizer).__qualname__


def misfit(optimizer: Any, saved: Any) -> tuple[str, str] | None:
    """Return what was expected and what was found, or None where `optimizer` can load `saved`."""
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    state = saved.get("state") if isinstance(saved, dict) else None
    if not isinstance(groups, list) or not isinstance(state, dict):
        return "an optimizer's state_dict", type(saved).__name__
    if isinstance(saved, SavedOptimizer) and saved.kind != kind_of(optimizer):
        return f"the state of {kind_of(optimizer)}", f"the state of {saved.kind}"
    try:
        found = [len(group["params"]) for group in groups]
    except (KeyError, TypeError):
        return "parameter groups with params", "groups without params"
    expected = [len(group["params"]) for group in optimizer.param_groups]
    if expected != found:
        return (
            f"{expected} parameters per group",
            f"{found} (ckpt.peek().objects has the saved groups: add them before the restore)",
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, entries in state.items():
        if not isinstance(index, int) or not isinstance(entries, dict):
            continue  # the keys are names, which only the optimizer's own code can check
        if not 0 <= index < len(parameters):
            return f"the state of {len(parameters)} parameters", f"a state of parameter {index}"
        reason = _entries_misfit(optimizer, parameters[index], index, entries)
        if reason is not None:
            return reason
    return None


def _entries_misfit(
    optimizer: Any, parameter: Any, index: int, entries: dict[Any, Any]
) -> tuple[str, str] | None:
    have = optimizer.state.get(parameter, {})
    # Other optimizers keep tensors of other shapes under these names, for example one number for each row.
    is_of_torch = type(optimizer).step.__module__.startswith("torch.optim.")
    for name, value in entries.items():
        if not is_tensor(value):
            continue
        now = have.get(name)
        if is_tensor(now) and now.numel() > 1:
            local = local_part(now)
            if not is_alike(local, value):
                return f"{name} of parameter {index} as {describe(local)}", describe(value)
        elif is_of_torch and name in _LIKE_PARAMETER and value.numel() > 1:
            shape = local_part(parameter).shape
            if shape != value.shape:
                expected = f"{name} of parameter {index} as {list(shape)}"
                return expected, str(list(value.shape))
    return None
