"""Who writes a tensor of a state: an optimizer's step and nobody else, or somebody unknown.

Known are an optimizer's own state and the parameters in its groups. A parameter in no optimizer of
the state may be anybody's (an average of weights, say), as may every buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.state.tensors import Leaf, local_part

_Place = tuple[Any, int, int]


class Writers:
    """Of the parameters as they lie in memory now: ask at once, a parameter may move."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._parameters: dict[_Place, Any] = {}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    place = _place(local_part(parameter))
                    if place is not None:
                        self._parameters[place] = optimizer

    def of(self, leaf: Leaf) -> Any | None:
        """The optimizer; None for somebody unknown, and where writes are not counted by torch."""
        if leaf.source.is_inference():
            return None
        if leaf.owner is not None:
            return next((o for o in self._optimizers if o is leaf.owner), None)
        place = _place(leaf.source)
        return None if place is None else self._parameters.get(place)


def _place(tensor: Any) -> _Place | None:
    """Device, address and length in bytes: a state_dict gives other objects over the same memory."""
    try:
        return tensor.device, tensor.data_ptr(), tensor.numel() * tensor.element_size()
    except RuntimeError:  # a tensor without memory of its own
        return None
