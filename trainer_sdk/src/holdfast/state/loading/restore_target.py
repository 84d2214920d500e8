"""The layout of the payload that a rank needs from a checkpoint, derived from its current state.

A checkpoint of another number of ranks, or of ranks with other placements, holds the same tensors, cut in
other ways. The current state determines which box of each tensor this rank has now. Optimizers create
their tensors in the first step, so that most do not exist yet at a restore. They are cut like their
parameter. A tensor that the state does not contain is read completely.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from holdfast.state.kinds import Classes, Shared, without_class
from holdfast.state.loading.load import fits
from holdfast.state.sizing import estimated_bytes, slot_bytes
from holdfast.state.snapshot import Snapshot, Snapshots, read_payload
from holdfast.state.tensors import Leaf, is_in_host_memory, local_part, placement, torch_module
from holdfast.state.tree import is_stateful, unwrap
from holdfast_core.errors import StateMismatchError
from holdfast_core.format.payload import plan_payload
from holdfast_core.format.rank_layout import RankLayout, TensorSlice, owner_of
from holdfast_core.reshard.boxes import Box, SavedState


class RestoreTarget:
    """What a rank needs from a checkpoint for one state. The state is read once, at the first use."""

    def __init__(self, state: Mapping[str, Any], snapshots: Snapshots, *, strict: bool) -> None:
        self._state = state
        self._snapshots = snapshots
        self.strict = strict
        self._placements: dict[int, tuple[tuple[int, ...], Box]] = {}
        """The whole shape and this rank's box of a parameter. Its optimizer holds several tensors like it."""

    def needed_bytes(self) -> int:
        """Return about the payload bytes that a slot for this state needs.

        Raises UnsupportedStateError, StateDictError.
        """
        return slot_bytes(self._state, estimated_bytes(self._snapshot))

    def is_read_in_place(self) -> bool:
        """Return whether a restore may write into the state's tensors before it loads the objects.

        This requires tensors in host memory, and modules and optimizers that only torch's own code loads.
        The answer is the same on ranks with the same model.
        """
        snapshot = self._snapshot
        if not is_in_host_memory(snapshot.leaves):
            return False
        if not snapshot.modules and not snapshot.optimizers:
            return True
        from holdfast.state.loading.load_optimizer import is_stock_module, is_stock_optimizer

        return all(is_stock_module(module) for _, module in snapshot.modules) and all(
            is_stock_optimizer(optimizer) for optimizer in snapshot.optimizers
        )

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Tensors of the current state. Raises UnsupportedStateError, StateDictError."""
        return self._snapshot.leaves

    @property
    def classes(self) -> Classes:
        """Enums and named tuples of the current state."""
        return Classes(self._snapshot.classes, self.strict)

    def read(self, payload: np.ndarray[Any, Any]) -> dict[str, Any]:
        """Return the saved state, with views into `payload`.

        Raises FormatError for an invalid payload, and StateMismatchError; see `Classes`.
        """
        return read_payload(payload, self.classes)

    def fits(self, saved: dict[str, Any]) -> bool:
        """Return whether `saved` can be loaded completely and nothing is missing in it."""
        return fits(self._state, saved)

    def is_as_saved(self, saved: RankLayout) -> bool:
        """Return whether this rank's boxes are the same as when it saved.

        A tensor of another shape or dtype is not checked here. The load of the state reports it.
        """
        for fqn, item in saved.tensors.items():
            box = self._box(fqn, item.dtype, item.shape)
            if box is not None and box != (item.offsets, item.lengths):
                return False
        return True

    def layout(self, source: SavedState) -> RankLayout:
        """Return the layout of the payload that this rank needs from the checkpoint `source`.

        Raises StateMismatchError that names every tensor that does not fit. With strict=False it raises
        only where it cannot determine which saved part belongs to this rank.
        """
        problems = self._impossible(source)
        if self.strict:
            problems += self._mismatches(source)
        if problems:
            lines = "\n  ".join(problems)
            raise StateMismatchError(
                f"the checkpoint of {source.world_size} ranks does not fit this state in "
                f"{len(problems)} places:\n  {lines}\nnothing was loaded. Build the same model and "
                "optimizer; they may be sharded in any way"
            )
        kinds = {
            fqn: (tensor.dtype, tensor.shape)
            for fqn, tensor in source.tensors.items()
            if fqn in self._leaves or self._parameter(fqn)[0]
        }
        # The saved objects of the home may refer to tensors that the state does not have.
        kinds |= {fqn: (item.dtype, item.shape) for fqn, item in source.home.tensors.items()}
        boxes = {
            fqn: self._box(fqn, dtype, shape) or Box((0,) * len(shape), shape)
            for fqn, (dtype, shape) in kinds.items()
        }
        places = source.home.objects
        room = max((place.length_bytes for place in places.values()), default=0)
        planned = plan_payload(
            ((fqn, kinds[fqn][0], box.lengths) for fqn, box in boxes.items()), room
        )
        ranges = {tensor.fqn: tensor.byte_range for tensor in planned.tensors}
        return RankLayout(
            rank=self._snapshots.rank,
            tensors={
                fqn: TensorSlice(*kinds[fqn], box.offsets, box.lengths, ranges[fqn])
                for fqn, box in boxes.items()
            },
            objects=dict.fromkeys(places, planned.objects),
            payload_bytes=planned.total_bytes,
        )

    # ------------------------------------------------------------------ inside

    @cached_property
    def _snapshot(self) -> Snapshot:
        return self._snapshots.take(self._state)

    @cached_property
    def _leaves(self) -> dict[str, Leaf]:
        """Tensors of the gang by name, without those that belong to this rank only."""
        leaves = self._snapshot.leaves
        return {leaf.name: leaf for leaf in leaves if owner_of(leaf.name) is None}

    @cached_property
    def _parts(self) -> _Parts:
        found = _Parts()
        for key, value in self._state.items():
            _find(value, key, found)
        return found

    def _parameter(self, fqn: str) -> tuple[bool, Any]:
        """Return whether `fqn` belongs to an optimizer's state, and its parameter if that is known."""
        for prefix, parameters in self._parts.optimizers:
            if fqn.startswith(prefix):
                number = fqn[len(prefix) :].partition(".")[0]
                known = number.isdecimal() and int(number) < len(parameters)
                return True, parameters[int(number)] if known else None
        return False, None

    def _box(self, fqn: str, dtype: str, shape: tuple[int, ...]) -> Box | None:
        """Return this rank's part of a saved tensor, or None where the current state does not define it."""
        leaf = self._leaves.get(fqn)
        if leaf is not None and (leaf.dtype, leaf.global_shape) == (dtype, shape):
            return Box(leaf.offsets, leaf.shape)
        _, parameter = self._parameter(fqn)
        if parameter is None:
            return None
        found = self._placements.get(id(parameter))
        if found is None:
            whole, offsets = placement(parameter, fqn)
            found = whole, Box(offsets, tuple(local_part(parameter).shape))
            self._placements[id(parameter)] = found  # `_parts` keeps the parameter alive
        return found[1] if found[0] == shape else None

    def _mismatches(self, source: SavedState) -> list[str]:
        problems: list[str] = []
        for fqn, leaf in sorted(self._leaves.items()):
            if self._parameter(fqn)[0]:
                continue  # loading an optimizer replaces its tensors, whatever their shape
            expected = f"{fqn}: expected {leaf.dtype} {list(leaf.global_shape)}"
            found = source.tensors.get(fqn)
            if found is None:
                problems.append(f"{expected}, found nothing in the checkpoint")
            elif (found.dtype, found.shape) != (leaf.dtype, leaf.global_shape):
                problems.append(f"{expected}, found {found.dtype} {list(found.shape)}")
        return problems

    def _impossible(self, source: SavedState) -> list[str]:
        """Return the tensors that would be restored wrongly without an error."""
        problems: list[str] = []
        modules, shared = tuple(self._parts.modules), tuple(self._parts.shared)
        for fqn, tensor in sorted(source.tensors.items()):
            is_module = fqn in self._leaves and fqn.startswith(modules)
            if is_module and tensor.holders < source.world_size:
                problems.append(
                    f"{fqn}: only {tensor.holders} of {source.world_size} old ranks have it: ranks "
                    "with different models (pipeline stages) use the same names for their "
                    "optimizers' tensors"
                )
            if tensor.is_cut and fqn.startswith(shared) and fqn not in self._leaves:
                problems.append(
                    f"{fqn}: {tensor.dtype} {list(tensor.shape)} is sharded, and the state_dict of the "
                    "Shared object does not contain it before the restore, so the part of this rank is "
                    "unknown: create the object's tensors before the restore"
                )
            is_state, _ = self._parameter(fqn)
            if is_state and tensor.is_cut and self._box(fqn, tensor.dtype, tensor.shape) is None:
                problems.append(
                    f"{fqn}: {tensor.dtype} {list(tensor.shape)} is sharded, but has another shape "
                    "than its parameter, so the part of this rank is unknown"
                )
        return problems


@dataclass(slots=True)
class _Parts:
    """Where the tensors of the state's objects are."""

    modules: list[str] = field(default_factory=list)
    """Prefixes of the names of modules' tensors."""
    optimizers: list[tuple[str, list[Any]]] = field(default_factory=list)
    """Prefixes of the names of optimizers' state, with the parameters in order."""
    shared: list[str] = field(default_factory=list)
    """Prefixes of the names of tensors in Shared objects with loading code of their own."""


def _find(value: Any, path: str, found: _Parts) -> None:
    torch = torch_module()
    if is_stateful(value):
        is_shared, value = isinstance(value, Shared), unwrap(value)
        if torch is not None and isinstance(value, torch.nn.Module):
            found.modules.append(f"{path}.")
        elif torch is not None and isinstance(value, torch.optim.Optimizer):
            parameters = [p for group in value.param_groups for p in group["params"]]
            found.optimizers.append((f"{path}.state.", parameters))
        elif is_shared:
            found.shared.append(f"{path}.")
    elif isinstance(value, dict):
        for key, item in value.items():
            _find(item, f"{path}.{without_class(key)}", found)
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            _find(item, f"{path}.{position}", found)
