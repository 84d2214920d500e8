"""Tensors of a checkpoint that a caller asks for by name, each into a tensor of its own.

A restore of a state compares the whole structure of the state with the saved one. A caller that names
tensors gets those tensors and nothing else, from whichever ranks hold them: ranks may name different
tensors, and other dtypes than the saved ones, and read a checkpoint of other pipeline stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from holdfast.state.snapshot import paused_collector
from holdfast.state.tensors import RAW, Leaf, clone, copy_in, make_leaf, own_name, view_stored
from holdfast.state.tree import STATE, Decoder
from holdfast_core.errors import FormatError, StateMismatchError
from holdfast_core.format.payload import (
    LENGTH_BYTES,
    PayloadTensor,
    header_bytes,
    parse_payload,
    plan_payload,
    unpack_objects,
)
from holdfast_core.format.rank_layout import RankLayout, TensorSlice, owner_of
from holdfast_core.ids import Rank
from holdfast_core.reshard.boxes import Box, SavedState


class NamedTensors:
    """What a rank needs from a checkpoint if it asks for tensors by name.

    The shard of a rank holds other tensors too, so that the payload is always assembled.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        rank: Rank,
        describe: Callable[[str, tuple[int, ...]], Any],
    ) -> None:
        """Check the tensors. Raises UnsupportedStateError for one that nothing can be loaded into.

        Args:
            tensors: Tensors to load into, by name.
            rank: This rank.
            describe: Returns what stands for a saved tensor that is not loaded, from its dtype and shape.
        """
        self._describe = describe
        self._rank = rank
        self._tensors = dict(tensors)
        self._leaves = {name: make_leaf(name, one, name)[0] for name, one in tensors.items()}
        self.found: dict[str, Any] = {}
        """All tensors of the gang in the checkpoint, described. They are known after `read`."""
        self._shapes: dict[str, tuple[int, ...]] = {}

    def needed_bytes(self) -> int:
        return 0  # the layout that is requested has the size

    @property
    def count(self) -> int:
        return len(self._tensors)

    def layout(self, source: SavedState) -> RankLayout:
        """Return the layout of a payload of the named tensors.

        Raises StateMismatchError that names every tensor that is missing or has another shape.
        """
        self._require(source)
        self._shapes = {name: one.shape for name, one in source.tensors.items()}
        self.found = {
            name: self._describe(own_name(one.dtype), one.shape)
            for name, one in source.tensors.items()
        }
        wanted = {
            name: (source.tensors[name].dtype, leaf.global_shape, Box(leaf.offsets, leaf.shape))
            for name, leaf in self._leaves.items()
        }
        for name, item in source.home.tensors.items():
            if owner_of(name) is not None:  # the saved objects refer to it
                wanted[name] = item.dtype, item.shape, Box(item.offsets, item.lengths)
        places = source.home.objects
        room = max((place.length_bytes for place in places.values()), default=0)
        planned = plan_payload(
            ((name, dtype, box.lengths) for name, (dtype, _, box) in wanted.items()), room
        )
        ranges = {tensor.fqn: tensor.byte_range for tensor in planned.tensors}
        return RankLayout(
            rank=self._rank,
            tensors={
                name: TensorSlice(dtype, shape, box.offsets, box.lengths, ranges[name])
                for name, (dtype, shape, box) in wanted.items()
            },
            objects=dict.fromkeys(places, planned.objects),
            payload_bytes=planned.total_bytes,
        )

    @paused_collector()
    def read(self, payload: np.ndarray[Any, Any]) -> dict[str, Any]:
        """Copy the payload's tensors into those of the caller, and return the saved objects.

        Raises FormatError for an invalid payload.
        """
        size = header_bytes(payload[:LENGTH_BYTES].tobytes(), payload.size)
        plan = parse_payload(payload[:size].tobytes(), payload.size)
        stored = {tensor.fqn: tensor for tensor in plan.tensors}
        for name, leaf in self._leaves.items():
            copy_in(self._tensors[name], _saved(payload, stored[name], leaf))
        shapes, found = self._shapes, self.found

        def resolve(reference: dict[str, Any]) -> Any:
            name, dtype = reference["$tensor"], reference.get("dtype")
            if name in found:
                if dtype is not None:  # stored as bytes, which are one more dimension
                    found[name] = self._describe(dtype, shapes[name][:-1])
                return found[name]
            one = stored.get(name)
            if one is None:
                raise FormatError(
                    f"payload: the state refers to tensor {name!r}, which does not exist"
                )
            shape = one.shape if dtype is None else one.shape[:-1]
            place = payload[one.byte_range.start : one.byte_range.stop]
            array = bool(reference.get("array"))
            return clone(view_stored(place, dtype or own_name(one.dtype), shape, array=array))

        root = unpack_objects(payload[plan.objects.start : plan.objects.stop].tobytes())
        if not isinstance(root, dict) or not isinstance(root.get(STATE), dict):
            raise FormatError("payload: the objects contain no state")
        decoded: dict[str, Any] = Decoder(resolve).decode(root[STATE])
        return decoded

    def _require(self, source: SavedState) -> None:
        problems = []
        for name, leaf in sorted(self._leaves.items()):
            found = source.tensors.get(name)
            if found is None:
                problems.append(f"{name}: the checkpoint has no tensor of this name")
            elif found.shape != leaf.global_shape or (leaf.is_raw and found.dtype != RAW):
                problems.append(
                    f"{name}: expected {leaf.dtype} {list(leaf.global_shape)}, found "
                    f"{found.dtype} {list(found.shape)}"
                )
        if problems:
            lines = "\n  ".join(problems[:_SHOWN])
            more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise StateMismatchError(
                f"the checkpoint does not hold {len(problems)} of the named tensors:\n  {lines}{more}\n"
                "nothing was loaded"
            )


_SHOWN = 10


def _saved(payload: np.ndarray[Any, Any], stored: PayloadTensor, leaf: Leaf) -> Any:
    place = payload[stored.byte_range.start : stored.byte_range.stop]
    if leaf.is_raw:
        kind = str(leaf.source.dtype).removeprefix("torch.")
        return view_stored(place, kind, stored.shape[:-1], array=False)
    return view_stored(place, own_name(stored.dtype), stored.shape, array=False)
