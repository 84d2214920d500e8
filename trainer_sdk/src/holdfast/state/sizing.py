"""Estimates the size of a slot before the optimizers have created their state.

Optimizers create their tensors in the first step, and slots are allocated before it. If the estimate is
too small, the first save allocates the slots again. If it is too large, it wastes memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.state.snapshot import Snapshot
from holdfast.state.tensors import local_part, torch_module
from holdfast.state.tree import unwrap

_HEADER_BYTES_PER_TENSOR = 256
_HEADER_BYTES = 16384
"""Room for the fixed parts of a header and of the objects, which are padded."""
_ENTRY_BYTES = 96
_DIMENSION_BYTES = 8
_SCALAR_BYTES = 8
_MINIMUM_HEADROOM_BYTES = 1 << 20
_HEADROOM_DIVISOR = 64


def estimated_bytes(snapshot: Snapshot) -> int:
    """Return about the payload bytes of a snapshot, and rarely too few. A plan takes far longer.

    The header names each tensor with its dtype, its shape and two positions.
    """
    leaves = snapshot.leaves
    return (
        _HEADER_BYTES
        + sum(x.byte_count + len(x.name) + _DIMENSION_BYTES * len(x.shape) for x in leaves)
        + _ENTRY_BYTES * len(leaves)
        + len(snapshot.objects)
        + len(snapshot.objects) // 4
    )


def slot_bytes(state: Mapping[str, Any], payload_bytes: int) -> int:
    """Return the payload bytes to allocate for `state`, including optimizer tensors that do not exist yet.

    Args:
        state: The state.
        payload_bytes: Payload bytes of the tensors that exist.
    """
    expected = payload_bytes + sum(_growth(value) for value in state.values())
    return expected + max(_MINIMUM_HEADROOM_BYTES, expected // _HEADROOM_DIVISOR)


def _growth(value: Any) -> int:
    torch, value = torch_module(), unwrap(value)
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
