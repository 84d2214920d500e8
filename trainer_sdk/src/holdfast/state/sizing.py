"""How large a slot must be before the optimizer has made its state.

Optimizers create their tensors in the first step; slots are allocated before it. An estimate that is
too small costs one reallocation at the first save, one that is too large costs memory.
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
    """Payload bytes to allocate for a state that was planned now and will grow by its optimizers."""
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
