"""Parts of tensors with names of their own, as DCP and Megatron have them, and as Holdfast saves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def as_box(part: torch.Tensor, shape: Sequence[int], offsets: Sequence[int]) -> torch.Tensor:
    """Return a view of `part` that says where it lies in the whole tensor.

    It has the attributes of torch's CheckpointableTensor, which older versions of torch do not define.

    Args:
        part: The part of this rank.
        shape: Shape of the whole tensor.
        offsets: Start of the part in each dimension of the whole tensor.
    """
    view = part.detach()
    if tuple(shape) == tuple(part.shape):
        return view
    box: Any = view
    box.global_shape = tuple(shape)
    box.global_offsets = (tuple(offsets),)
    box.local_offsets = ((0,) * part.dim(),)
    box.local_sizes = (tuple(part.shape),)
    return view


def is_local_part(part: object, whole: object) -> bool:
    """Return whether `part` is the memory of this rank's part of the DTensor `whole`."""
    if not isinstance(whole, DTensor) or not isinstance(part, torch.Tensor):
        return False
    local = whole.to_local()
    return (
        part.dtype == local.dtype
        and part.shape == local.shape
        and part.stride() == local.stride()
        and part.data_ptr() == local.data_ptr()
    )


def by_first_part(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return a dict of dicts in which each tensor has its name as its path.

    The document that describes a rank's payload has one entry for each key at the top.
    """
    state: dict[str, Any] = {}
    for name in sorted(tensors):
        first, _, rest = name.partition(".")
        group = state.setdefault(first, {}) if rest else None
        if isinstance(group, dict):
            group[rest] = tensors[name]
        else:
            state[name] = tensors[name]
    return state
