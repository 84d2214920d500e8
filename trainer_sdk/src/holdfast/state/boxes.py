"""Plain tensors that say which box of a larger tensor they hold.

They have the four attributes of torch's CheckpointableTensor protocol (torch.distributed.checkpoint). The
attributes count and not the class, which older releases of torch do not have. A tensor may hold padding
around its box, which is neither saved nor loaded.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

from holdfast_core.errors import UnsupportedStateError

ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


@dataclass(frozen=True, slots=True)
class HeldBox:
    """The box that a tensor holds."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Start of the box in the whole tensor. Zeros for an empty box."""
    local_offsets: tuple[int, ...]
    """Start of the box in the tensor that holds it."""
    lengths: tuple[int, ...]

    def within(self, tensor: Any) -> Any:
        """Return the box as a view of the tensor that holds it, or that tensor if it holds nothing else."""
        if self.lengths == tuple(tensor.shape):
            return tensor
        where = zip(self.local_offsets, self.lengths, strict=True)
        return tensor[tuple(slice(start, start + length) for start, length in where)]


def box_attributes(tensor: Any) -> tuple[Any, ...] | None:
    """Return the values of the four attributes, or None for a tensor without them."""
    if getattr(tensor, ATTRIBUTES[0], None) is None:
        return None
    found = tuple(getattr(tensor, name, None) for name in ATTRIBUTES)
    return None if None in found else found


def held_box(tensor: Any, path: str) -> HeldBox | None:
    """Return the box that a tensor says it holds, or None if it has no such attributes.

    Raises UnsupportedStateError that names the path of a tensor whose attributes do not describe one box
    within the whole tensor and within the tensor itself.
    """
    found = box_attributes(tensor)
    if found is None:
        return None
    shape, *parts = found
    try:
        counts = {len(part) for part in parts}
        if counts != {1}:
            raise UnsupportedStateError(
                f"{path}: global_offsets, local_offsets and local_sizes describe {sorted(counts)} boxes, "
                "expected 1 each: put each box into the state as a tensor of its own, and an empty part as "
                "one box with a size of 0"
            )
        whole, start, held, lengths = (_numbers(one) for one in (shape, *(p[0] for p in parts)))
    except TypeError as error:
        raise UnsupportedStateError(
            f"{path}: {', '.join(ATTRIBUTES)} are {found}: expected a tuple of whole numbers, and tuples "
            f"with one tuple of whole numbers each ({error})"
        ) from error
    _expect_within(start, lengths, whole, f"{path}: the box of global_offsets", "global_shape")
    _expect_within(
        held,
        lengths,
        tuple(tensor.shape),
        f"{path}: the box of local_offsets",
        "the tensor's shape",
    )
    return HeldBox(whole, start if math.prod(lengths) else (0,) * len(whole), held, lengths)


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(map(operator.index, value))


def _expect_within(
    start: tuple[int, ...], lengths: tuple[int, ...], outer: tuple[int, ...], what: str, of: str
) -> None:
    fits = len(start) == len(lengths) == len(outer) and all(
        low >= 0 and length >= 0 and low + length <= size
        for low, length, size in zip(start, lengths, outer, strict=True)
    )
    if not fits:
        raise UnsupportedStateError(
            f"{what} starts at {list(start)} and has the sizes {list(lengths)}: expected a box within "
            f"{of} {list(outer)}"
        )
