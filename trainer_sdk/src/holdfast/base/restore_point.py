"""What a script may know about a checkpoint before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type and size of a saved tensor or array.

    dtype: name of the type in torch and numpy, such as "float32".
    shape: shape of the whole tensor, of which each rank may have saved a part.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The checkpoint that `Checkpointer.restore` loads, without the bytes of its tensors.

    step: number of optimizer steps.
    tensors: the tensors that belong to all ranks together, by name, such as "model.weight".
    objects: the state that rank 0 saved, with a TensorInfo in the place of each tensor and array, the value
      in the place of an enum member, and a plain tuple in the place of a named tuple.
    """

    step: int
    tensors: Mapping[str, TensorInfo]
    objects: Mapping[str, Any]
