"""Parts of Megatron-core's sharded state dicts, as a layer of a model makes them."""

from __future__ import annotations

import torch
from megatron.core.dist_checkpointing import ShardedTensor


def part(
    key: str,
    data: torch.Tensor,
    global_shape: tuple[int, ...],
    offset: tuple[int, ...],
    *,
    prepended: int = 0,
) -> ShardedTensor:
    """Return a ShardedTensor. `global_shape` and `offset` include the prepended dimensions."""
    return ShardedTensor(
        key=key,
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=global_shape,
        global_offset=offset,
        axis_fragmentations=None,
        prepend_axis_num=prepended,
    )
