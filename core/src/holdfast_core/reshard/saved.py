"""What a checkpoint holds, as a rank that declares what it needs must know it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast_core.errors import FormatError
from holdfast_core.format.manifest import ManifestShard
from holdfast_core.format.rank_layout import RankLayout, owner_of
from holdfast_core.ids import Rank


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of the gang."""

    dtype: str
    shape: tuple[int, ...]
    is_cut: bool
    """Whether a rank holds only a part of it."""
    holders: int
    """Number of ranks that have the tensor, or an empty part of it."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """The tensors of a checkpoint, and the layout of the home, whose objects the new rank takes."""

    world_size: int
    tensors: Mapping[str, SavedTensor]
    """Tensors of the gang by name. Tensors that belong to one rank only are in `home`."""
    home: RankLayout


def holders_of(shards: Sequence[ManifestShard]) -> dict[Rank, list[Rank]]:
    """Return the ranks that have tensors of the same names, by the lowest of them.

    The layout of one rank of each group shows which tensors the checkpoint has.
    """
    groups: dict[Rank, list[Rank]] = {}
    for shard in shards:
        groups.setdefault(shard.same_tensors, []).append(shard.rank)
    return groups


def saved_state(
    home: RankLayout, groups: Iterable[tuple[RankLayout, int]], world_size: int
) -> SavedState:
    """Return what a checkpoint holds.

    Args:
        home: Layout of the home of the new rank.
        groups: For each group of ranks with the same tensors one layout, and the number of ranks.
        world_size: Number of ranks that saved the checkpoint.

    Raises:
        FormatError: Ranks have different dtypes or shapes of a tensor.
    """
    tensors: dict[str, SavedTensor] = {}
    for layout, holders in groups:
        for fqn, item in layout.tensors.items():
            if owner_of(fqn) is not None:
                continue
            is_cut, before = item.lengths != item.shape, tensors.get(fqn)
            if before is not None:
                if (before.dtype, before.shape) != (item.dtype, item.shape):
                    raise FormatError(
                        f"layout: tensor {fqn!r} is {item.dtype} {list(item.shape)} on rank "
                        f"{layout.rank}, but {before.dtype} {list(before.shape)} on another rank"
                    )
                is_cut, holders_before = is_cut or before.is_cut, before.holders
            else:
                holders_before = 0
            tensors[fqn] = SavedTensor(item.dtype, item.shape, is_cut, holders_before + holders)
    return SavedState(world_size, tensors, home)
