"""The layout of the payload that a rank needs from a checkpoint, derived from its current state.

A checkpoint of another number of ranks, or of ranks with other placements, holds the same tensors, cut in
other ways. The current state determines which box of each tensor this rank has now. Optimizers create
their tensors in the first step, so that most do not exist yet at a restore. They are cut like their
parameter. A tensor that the state does not contain is read completely.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from holdfast.state.load import fits
from holdfast.state.sizing import slot_bytes
from holdfast.state.snapshot import Snapshot, plan_save, take_snapshot
from holdfast.state.tensors import Leaf, is_in_host_memory, local_part, placement, torch_module
from holdfast.state.tree import is_stateful, unwrap
from holdfast_core.errors import StateMismatchError
from holdfast_core.format.payload import plan_payload
from holdfast_core.format.rank_layout import RankLayout, TensorSlice, owner_of
from holdfast_core.ids import Rank
from holdfast_core.reshard.boxes import Box
from holdfast_core.reshard.saved import SavedState


class RestoreTarget:
    """What a rank needs from a checkpoint for one state. The state is read once, at the first use."""

    def __init__(self, state: Mapping[str, Any], rank: Rank, *, strict: bool) -> None:
        self._state = state
        self._rank = rank
        self._strict = strict

    def needed_bytes(self) -> int:
        """Return the payload bytes that a slot for this state needs.

        Raises UnsupportedStateError, StateDictError.
        """
        return slot_bytes(self._state, plan_save(self._snapshot, self._rank))

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
        from holdfast.state.stock import is_stock_module, is_stock_optimizer

        return all(is_stock_module(module) for _, module in snapshot.modules) and all(
            is_stock_optimizer(optimizer) for optimizer in snapshot.optimizers
        )

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Tensors of the current state. Raises UnsupportedStateError, StateDictError."""
        return self._snapshot.leaves

    def fits(self, saved: dict[str, Any]) -> bool:
        """Return whether `saved` can be loaded completely and nothing is missing in it."""
        return fits(self._state, saved)

    def is_as_saved(self, saved: RankLayout) -> bool:
        """Return whether this rank's boxes are the same as when it saved.

        A tensor of another shape or dtype is not checked here. The load of the state reports it.
        """
        for fqn, item in saved.tensors.items():
            box = self._box(fqn, item.dtype, item.shape)
            if box is not None and box != Box(item.offsets, item.lengths):
                return False
        return True

    def layout(self, source: SavedState) -> RankLayout:
        """Return the layout of the payload that this rank needs from the checkpoint `source`.

        Raises StateMismatchError that names every tensor that does not fit. With strict=False it raises
        only where it cannot determine which saved part belongs to this rank.
        """
        problems = self._impossible(source)
        if self._strict:
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
            rank=self._rank,
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
        return take_snapshot(self._state, self._rank)

    @cached_property
    def _leaves(self) -> dict[str, Leaf]:
        """Tensors of the gang by name, without those that belong to this rank only."""
        leaves = self._snapshot.leaves
        return {leaf.name: leaf for leaf in leaves if owner_of(leaf.name) is None}

    @cached_property
    def _parts(self) -> tuple[tuple[str, ...], tuple[tuple[str, list[Any]], ...]]:
        """Name prefixes of modules' tensors, and those of optimizers' state with its parameters in order."""
        modules: list[str] = []
        optimizers: list[tuple[str, list[Any]]] = []
        for key, value in self._state.items():
            _find(value, key, modules, optimizers)
        return tuple(modules), tuple(optimizers)

    def _parameter(self, fqn: str) -> tuple[bool, Any]:
        """Return whether `fqn` belongs to an optimizer's state, and its parameter if that is known."""
        for prefix, parameters in self._parts[1]:
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
        whole, offsets = placement(parameter, fqn)
        return Box(offsets, tuple(local_part(parameter).shape)) if whole == shape else None

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
        modules, _ = self._parts
        for fqn, tensor in sorted(source.tensors.items()):
            is_module = fqn in self._leaves and fqn.startswith(modules)
            if is_module and tensor.holders < source.world_size:
                problems.append(
                    f"{fqn}: only {tensor.holders} of {source.world_size} old ranks have it: ranks "
                    "with different models (pipeline stages) use the same names for their "
                    "optimizers' tensors"
                )
            is_state, _ = self._parameter(fqn)
            if is_state and tensor.is_cut and self._box(fqn, tensor.dtype, tensor.shape) is None:
                problems.append(
                    f"{fqn}: {tensor.dtype} {list(tensor.shape)} is sharded, but has another shape "
                    "than its parameter, so the part of this rank is unknown"
                )
        return problems


def _find(
    value: Any, path: str, modules: list[str], optimizers: list[tuple[str, list[Any]]]
) -> None:
    torch = torch_module()
    if is_stateful(value):
        value = unwrap(value)
        if torch is not None and isinstance(value, torch.nn.Module):
            modules.append(f"{path}.")
        elif torch is not None and isinstance(value, torch.optim.Optimizer):
            parameters = [p for group in value.param_groups for p in group["params"]]
            optimizers.append((f"{path}.state.", parameters))
    elif isinstance(value, dict):
        for key, item in value.items():
            _find(item, f"{path}.{key}", modules, optimizers)
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            _find(item, f"{path}.{position}", modules, optimizers)
