"""The state that Holdfast saves for a plan of DCP, and the way back.

Tensors have their names in DCP, so that "model.layers.0.weight" is the same tensor as in a state that holds
the model itself. Everything else belongs to the rank that saved it. Nothing is pickled: a value that is no
tensor is saved as JSON, and a type that JSON cannot hold is refused with its name.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from holdfast.integrations.boxes import as_box, by_first_part, is_local_part
from holdfast_core.errors import ConfigError, UnsupportedStateError
from holdfast_core.reshard.boxes import Box

OBJECTS = "dcp:objects"
"""Key of the values that are no tensors, by their names in DCP."""


class Values:
    """The values of one rank that are no tensors. Arrays and tensors in them belong to that rank too."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def state_dict(self) -> dict[str, Any]:
        return self._values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self._values = values


def state_to_save(plan: SavePlan, planner: SavePlanner) -> dict[str, Any]:
    """Return the state for `Checkpointer.save`, with references to the tensors of `planner`.

    Args:
        plan: The local plan, in which each rank writes its copies.
        planner: The planner that made it.

    Raises:
        ConfigError: The planner hands out pickled objects only.
        UnsupportedStateError: A rank has several parts of one tensor.
    """
    look_up = getattr(planner, "lookup_object", None)
    if look_up is None:
        raise ConfigError(
            f"{type(planner).__qualname__} has no lookup_object, so that other values than tensors are "
            "known as pickles only: derive it from DefaultSavePlanner"
        )
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for item in plan.items:
        name = item.index.fqn
        if item.type is WriteItemType.BYTE_IO:
            values[name] = look_up(item.index)
        elif name in tensors:
            raise UnsupportedStateError(
                f"{name}: this rank has several parts of one tensor, and Holdfast saves one part of each "
                "name and rank: use fully_shard (FSDP2), or give the parts names of their own"
            )
        else:
            tensors[name] = _to_save(item, planner)
    return {**by_first_part(tensors), OBJECTS: Values(values)}


def _to_save(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    data, described = planner.resolve_data(item), item.tensor_data
    if not isinstance(data, torch.Tensor) or described is None:
        raise ConfigError(
            f"{item.index.fqn}: {type(planner).__qualname__}.resolve_data returned a "
            f"{type(data).__name__}, expected the tensor that its plan names"
        )
    whole = getattr(planner, "state_dict", {}).get(item.index.fqn)
    if isinstance(whole, DTensor) and is_local_part(data, whole):
        return whole  # it knows its part better: torch's offsets of uneven strided parts are wrong
    return as_box(data, described.size, described.chunk.offsets)


class Reads:
    """The reads of one plan: the tensors to restore by name, and where they go."""

    def __init__(
        self, plan: LoadPlan, planner: LoadPlanner, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Collect the destinations.

        Args:
            plan: The local plan, made with metadata in which each tensor is one chunk.
            planner: The planner that made it.
            shapes: Shape of each saved tensor by name.
        """
        self._planner = planner
        self._values: list[ReadItem] = []
        self._pieces: dict[str, list[_Piece]] = {}
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                self._values.append(item)
            else:
                piece = _Piece(item, planner.resolve_tensor(item))
                self._pieces.setdefault(item.storage_index.fqn, []).append(piece)
        self.tensors: dict[str, torch.Tensor] = {
            name: self._target(pieces, shapes[name]) for name, pieces in self._pieces.items()
        }
        """Tensors to restore, by name. They are the destinations, or new tensors around several of them."""

    def finish(self, values: Mapping[str, Any]) -> None:
        """Give the planner what was restored. Args: values: the saved values that are no tensors, by name."""
        for name, pieces in self._pieces.items():
            for piece in pieces:
                if len(pieces) > 1:
                    piece.copy_from(self.tensors[name], _hull(pieces).offsets)
                self._planner.commit_tensor(piece.item, piece.target)
        for item in self._values:
            data = io.BytesIO()
            # The planner expects a pickle. It is made from the decoded value and never leaves this process.
            torch.save(values[item.storage_index.fqn], data)
            data.seek(0)
            self._planner.load_bytes(item, data)

    def _target(self, pieces: list[_Piece], shape: tuple[int, ...]) -> torch.Tensor:
        first = pieces[0]
        if len(pieces) > 1:
            hull = _hull(pieces)
            return as_box(first.target.new_empty(hull.lengths), shape, hull.offsets)
        whole = getattr(self._planner, "state_dict", {}).get(first.item.dest_index.fqn)
        if isinstance(whole, DTensor) and is_local_part(first.target, whole):
            return whole
        return as_box(first.target, shape, first.item.storage_offsets)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A destination, and the read that fills it."""

    item: ReadItem
    target: torch.Tensor

    def copy_from(self, source: torch.Tensor, offsets: tuple[int, ...]) -> None:
        """Copy this piece from a part of the saved tensor that starts at `offsets`."""
        starts = zip(self.item.storage_offsets, offsets, self.item.lengths, strict=True)
        box = tuple(slice(start - base, start - base + length) for start, base, length in starts)
        with torch.no_grad():
            self.target.copy_(source[box])


def _hull(pieces: list[_Piece]) -> Box:
    """Return the smallest box that contains all pieces."""
    starts = [piece.item.storage_offsets for piece in pieces]
    lows = tuple(map(min, zip(*starts, strict=True)))
    stops = [
        [
            start + length
            for start, length in zip(piece.item.storage_offsets, piece.item.lengths, strict=True)
        ]
        for piece in pieces
    ]
    highs = tuple(map(max, zip(*stops, strict=True)))
    return Box(lows, tuple(high - low for low, high in zip(lows, highs, strict=True)))
