"""Classes with the attributes of megatron-core 0.19's sharded state dicts, which needs a newer Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class ShardedTensor:
    key: str
    data: torch.Tensor | None
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int | tuple[int, ...] = 0
    prepend_axis_num: int = 0
    flattened_range: slice | None = None


@dataclass
class ShardedObject:
    key: str
    data: object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int | tuple[int, ...] = 0


@dataclass
class ShardedTensorFactory:
    key: str
    data: torch.Tensor
    build_fn: Callable[..., Any]
    merge_fn: Callable[[Any], Any]
    replica_id: int | tuple[int, ...] = 0
    flattened_range: slice | None = None

    def build(self) -> Any:
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)


@dataclass
class LocalNonpersistentObject:
    obj: object = field(default=None)

    def unwrap(self) -> object:
        return self.obj


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
        key, data, data.dtype, tuple(data.shape), global_shape, offset, 0, prepended
    )
