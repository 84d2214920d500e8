"""What a rank wants of a checkpoint: its present state as the layout of a payload.

A checkpoint that another number of ranks saved, or ranks with other placements, holds the same
tensors cut differently. The present state says which box of each this rank has now. Optimizers make
their tensors in the first step, so most are not there yet when a state is restored: they are cut as
their parameter is. What the state does not know is taken whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from holdfast.state.load import fits
from holdfast.state.sizing import slot_bytes
from holdfast.state.snapshot import Snapshot, plan_save, take_snapshot
from holdfast.state.tensors import Leaf, is_in_host_memory, local_part, placement, torch_module
from holdfast.state.tree import is_stateful, unwrap
from holdfast_core.errors import StateMismatchError
from holdfast_core.format.layout import Layout, TensorLayout
from holdfast_core.format.payload import plan_payload
from holdfast_core.format.rank_layout import RankLayout, TensorSlice
from holdfast_core.ids import Rank
from holdfast_core.reshard.boxes import Box
from holdfast_core.reshard.plan import home_of

_RANK_LOCAL = re.compile(r"@rank(\d+)(~\d+)?\Z")
"""How `state.tree` names tensors that belong to one rank alone."""


class Wish:
    """Of one state, as it is now. Looks at it when asked, and once."""

    def __init__(self, state: Mapping[str, Any], rank: Rank, *, strict: bool) -> None:
        self._state = state
        self._rank = rank
        self._strict = strict

    def needed_bytes(self) -> int:
        """Of a slot for this state. Raises UnsupportedStateError."""
        return slot_bytes(self._state, plan_save(self._snapshot, self._rank))

    def is_read_in_place(self) -> bool:
        """Whether the state's tensors may be written before it is loaded: they lie in this process's
        memory, and no code but torch's has a say in it. The same on ranks with the same model."""
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
        """The present state's tensors. Raises UnsupportedStateError."""
        return self._snapshot.leaves

    def fits(self, saved: dict[str, Any]) -> bool:
        """Whether all of `saved` can be loaded, and nothing is missing."""
        return fits(self._state, saved)

    def is_as_saved(self, saved: RankLayout) -> bool:
        """Whether this rank had the same boxes when it saved. Another shape or dtype is not a
        question of boxes: it is told when the state is loaded."""
        for fqn, item in saved.tensors.items():
            box = self._box(fqn, item.dtype, item.shape)
            if box is not None and box != Box(item.offsets, item.lengths):
                return False
        return True

    def layout(self, source: Layout) -> RankLayout:
        """The payload that this rank wants of the checkpoint `source`.

        Raises StateMismatchError naming every tensor that does not fit; with strict=False only
        where the ranks' states cannot be told apart.
        """
        home = home_of(self._rank, len(source.ranks))
        problems = self._impossible(source)
        if self._strict:
            problems += self._mismatches(source)
        if problems:
            lines = "\n  ".join(problems)
            raise StateMismatchError(
                f"the checkpoint of {len(source.ranks)} ranks does not fit this state in "
                f"{len(problems)} places:\n  {lines}\nnothing was loaded; build the same model and "
                "optimizer, cut in any way"
            )
        boxes: dict[str, Box] = {}
        for fqn, tensor in source.tensors.items():
            if self._wants(fqn, tensor, home):
                whole = Box((0,) * len(tensor.shape), tensor.shape)
                boxes[fqn] = self._box(fqn, tensor.dtype, tensor.shape) or whole
        places = {
            name: place.byte_range
            for name, all_places in source.objects.items()
            for place in all_places
            if place.rank == home
        }
        room = max((place.length_bytes for place in places.values()), default=0)
        planned = plan_payload(
            ((fqn, source.tensors[fqn].dtype, box.lengths) for fqn, box in boxes.items()), room
        )
        ranges = {tensor.fqn: tensor.byte_range for tensor in planned.tensors}
        return RankLayout(
            rank=self._rank,
            tensors={
                fqn: TensorSlice(
                    source.tensors[fqn].dtype,
                    source.tensors[fqn].shape,
                    box.offsets,
                    box.lengths,
                    ranges[fqn],
                )
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
        """The gang's tensors; not those that belong to this rank alone."""
        leaves = self._snapshot.leaves
        return {leaf.name: leaf for leaf in leaves if _RANK_LOCAL.search(leaf.name) is None}

    @cached_property
    def _parts(self) -> tuple[tuple[str, ...], tuple[tuple[str, list[Any]], ...]]:
        """How the names of modules' tensors begin; the same of optimizers' state, with its
        parameters in their order."""
        modules: list[str] = []
        optimizers: list[tuple[str, list[Any]]] = []
        for key, value in self._state.items():
            _find(value, key, modules, optimizers)
        return tuple(modules), tuple(optimizers)

    def _parameter(self, fqn: str) -> tuple[bool, Any]:
        """Whether `fqn` is of an optimizer's state, and of which parameter."""
        for prefix, parameters in self._parts[1]:
            if fqn.startswith(prefix):
                number = fqn[len(prefix) :].partition(".")[0]
                known = number.isdecimal() and int(number) < len(parameters)
                return True, parameters[int(number)] if known else None
        return False, None

    def _box(self, fqn: str, dtype: str, shape: tuple[int, ...]) -> Box | None:
        """This rank's part of a saved tensor; None where the present state does not say."""
        leaf = self._leaves.get(fqn)
        if leaf is not None and (leaf.dtype, leaf.global_shape) == (dtype, shape):
            return Box(leaf.offsets, leaf.shape)
        _, parameter = self._parameter(fqn)
        if parameter is None:
            return None
        whole, offsets = placement(parameter, fqn)
        return Box(offsets, tuple(local_part(parameter).shape)) if whole == shape else None

    def _wants(self, fqn: str, tensor: TensorLayout, home: Rank) -> bool:
        found = _RANK_LOCAL.search(fqn)
        if found is not None and {str(s.rank) for s in tensor.slices} == {found[1]}:
            return found[1] == str(home)
        if fqn in self._leaves or self._parameter(fqn)[0]:
            return True
        # Nothing here has this name, but the objects of `home` may refer to it.
        return any(placed.rank == home for placed in tensor.slices)

    def _mismatches(self, source: Layout) -> list[str]:
        problems: list[str] = []
        for fqn, leaf in sorted(self._leaves.items()):
            if self._parameter(fqn)[0]:
                continue  # loading an optimizer replaces what it has
            expected = f"{fqn}: expected {leaf.dtype} {list(leaf.global_shape)}"
            found = source.tensors.get(fqn)
            if found is None:
                problems.append(f"{expected}, found nothing in the checkpoint")
            elif (found.dtype, found.shape) != (leaf.dtype, leaf.global_shape):
                problems.append(f"{expected}, found {found.dtype} {list(found.shape)}")
        return problems

    def _impossible(self, source: Layout) -> list[str]:
        """What would be wrong without a sign of it."""
        problems: list[str] = []
        modules, _ = self._parts
        for fqn, tensor in sorted(source.tensors.items()):
            ranks = sorted({placed.rank for placed in tensor.slices})
            if fqn in self._leaves and fqn.startswith(modules) and len(ranks) < len(source.ranks):
                problems.append(
                    f"{fqn}: only old ranks {ranks[:8]} of {len(source.ranks)} have it: ranks with "
                    "different models (pipeline stages) name their optimizers' tensors alike"
                )
            is_state, _ = self._parameter(fqn)
            boxes = {(placed.offsets, placed.lengths) for placed in tensor.slices}
            if is_state and len(boxes) > 1 and self._box(fqn, tensor.dtype, tensor.shape) is None:
                problems.append(
                    f"{fqn}: {tensor.dtype} {list(tensor.shape)} is cut, but is not of its "
                    "parameter's shape: which part is this rank's cannot be told"
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
