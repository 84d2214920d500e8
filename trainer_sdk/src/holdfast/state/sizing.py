"""Estimates the size of a slot before the optimizers have created their state.

Optimizers create their tensors in the first step, and slots are allocated before it. If the estimate is
too small, the first save allocates the slots again. If it is too large, it wastes memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.state.snapshot import SavePlan
from holdfast.state.tensors import local_part, torch_module

_HEADER_BYTES_PER_TENSOR = 256
_SCALAR_BYTES = 8
_MINIMUM_HEADROOM_BYTES = 1 << 20
_HEADROOM_DIVISOR = 64


def slot_bytes(state: Mapping[str, Any], plan: SavePlan) -> int:
    """Return the payload bytes to allocate for `state`, including optimizer tensors that do not exist yet."""
    expected = plan.payload_bytes + sum(_growth(value) for value in state.values())
    return expected + max(_MINIMUM_HEADROOM_BYTES, expected // _HEADROOM_DIVISOR)


def _growth(value: Any) -> int:
    torch = torch_module()
    if torch is None or not isinstance(value, torch.optim.Optimizer) or value.state:
        return 0
    total = 0
    for group in value.param_groups:
        count = _tensors_a_parameter(group)
        for parameter in group["params"]:
            local = local_part(parameter)
            total += count * (local.numel() * local.element_size() + _HEADER_BYTES_PER_TENSOR)
            total += _SCALAR_BYTES + _HEADER_BYTES_PER_TENSOR
    return total


def _tensors_a_parameter(group: Mapping[str, Any]) -> int:
    if "betas" in group:
        return 3 if group.get("amsgrad") else 2
    if "momentum" in group and "alpha" not in group:
        return 1 if group["momentum"] else 0
    return 2
