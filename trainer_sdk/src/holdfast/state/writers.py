"""Determines whether only an optimizer's step writes a tensor of a state, or whether that is unknown.

An optimizer writes its own state and the parameters in its groups. The writer of all other parameters (for
example an average of weights) and of all buffers is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.state.tensors import Leaf, local_part

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
