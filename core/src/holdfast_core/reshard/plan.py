"""Plan of which bytes of the old ranks' payloads make up a new rank's payload. Pure.

Any shard whose layout covers a part of a wanted box can be its source. If several shards hold the same
box, the new rank r takes that of its home, the old rank r mod N. If its home does not hold the box, it
takes holder number r mod the number of holders. Equal copies thus serve about equally many ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from holdfast_core.errors import FormatError, NotFoundError, StateMismatchError
from holdfast_core.format.dtypes import element_bytes
from holdfast_core.format.layout import Layout, PlacedSlice, TensorLayout
from holdfast_core.format.payload import PayloadPlan, plan_payload
from holdfast_core.format.rank_layout import RankLayout, TensorSlice
from holdfast_core.ids import ByteRange, Rank
from holdfast_core.reshard.boxes import Box, intersect, runs, subtract


class Move(NamedTuple):
    """Bytes of one old rank's payload and their position in the new payload.

    A move is `times` runs of `length_bytes` each, `start_step` bytes apart in the old payload and
    `target_step` in the new one. A tensor that is cut along its columns is thus one move instead of one
    for each row.
    """

    source: Rank
    start: int
    length_bytes: int
    target: int
    times: int = 1
    start_step: int = 0
    target_step: int = 0

    @property
    def total_bytes(self) -> int:
        return self.length_bytes * self.times

    @property
    def stop(self) -> int:
        """End offset of the last run in the old payload."""
        return self.start + (self.times - 1) * self.start_step + self.length_bytes


def home_of(rank: Rank, old_world_size: int) -> Rank:
    """Return the old rank whose objects (all state that is not a tensor) the new `rank` takes: r mod N."""
    return Rank(rank % old_world_size)


def plan(wanted: RankLayout, source: Layout, *, avoid: Collection[Rank] = ()) -> tuple[Move, ...]:
    """Return the moves that fill every wanted box and the objects exactly once.

    Moves are in order of source and start, and adjacent ones are joined. They do not cover the payload's
    header: see `payload_plan`.

    Args:
        wanted: Layout of the new rank's payload.
        source: Layout of the checkpoint.
        avoid: Old ranks whose shards cannot be read.

    Raises:
        StateMismatchError: Tensors or objects are missing, have another dtype, shape or length, or are
            not covered by the readable shards. The message names all of them.
    """
    problems = mismatches(wanted, source)
    moves: list[Move] = []
    if not problems:
        home = home_of(wanted.rank, len(source.ranks))
        for fqn, item in sorted(wanted.tensors.items()):
            layout = source.tensors[fqn]
            found, left = _tensor(item, layout, wanted.rank, home, avoid)
            moves += found
            if left:
                problems.append(_uncovered(fqn, item, left))
        problems += _objects(wanted, source, home, avoid, moves)
    if problems:
        lines = "\n  ".join(problems)
        raise StateMismatchError(
            f"rank {wanted.rank} cannot be assembled from the checkpoint of {len(source.ranks)} "
            f"ranks, in {len(problems)} places:\n  {lines}"
        )
    return _joined(moves)


def plan_without(
    wanted: RankLayout, source: Layout, missing: Mapping[Rank, str]
) -> tuple[Move, ...]:
    """Return `plan` without the shards of the `missing` ranks, whose values are the reasons.

    Raises:
        StateMismatchError: The checkpoint does not hold what is wanted.
        NotFoundError: It does, but the other shards do not suffice. The message has the reasons.
    """
    try:
        return plan(wanted, source, avoid=missing)
    except StateMismatchError as error:
        if not missing:
            raise
        text = "; ".join(missing.values())
        raise NotFoundError(f"{text}; without them: {error}") from error


def mismatches(wanted: RankLayout, source: Layout) -> list[str]:
    """Return a line for every wanted tensor that is missing or has another dtype or shape."""
    problems: list[str] = []
    for fqn, item in sorted(wanted.tensors.items()):
        found = source.tensors.get(fqn)
        expected = f"{fqn}: expected {item.dtype} {list(item.shape)}"
        if found is None:
            problems.append(f"{expected}, found nothing in the checkpoint")
        elif (found.dtype, found.shape) != (item.dtype, item.shape):
            problems.append(f"{expected}, found {found.dtype} {list(found.shape)}")
    return problems


def payload_plan(wanted: RankLayout) -> PayloadPlan:
    """Return the plan of the payload that `wanted` describes, with its header, which no old shard holds.

    Raises FormatError if tensors or objects are not where `plan_payload` places them.
    """
    places = set(wanted.objects.values())
    if len(places) > 1:
        raise FormatError(
            f"layout of rank {wanted.rank}: expected objects in 1 place, found {len(places)}"
        )
    capacity = sum(place.length_bytes for place in places)
    planned = plan_payload(
        ((fqn, item.dtype, item.lengths) for fqn, item in wanted.tensors.items()), capacity
    )
    ranges = {tensor.fqn: tensor.byte_range for tensor in planned.tensors}
    requested = {fqn: item.byte_range for fqn, item in wanted.tensors.items()}
    same_objects = not places or planned.objects in places
    if ranges != requested or not same_objects or planned.total_bytes != wanted.payload_bytes:
        raise FormatError(
            f"layout of rank {wanted.rank}: its byte ranges are not those of a payload of "
            f"{planned.total_bytes} bytes with these tensors"
        )
    return planned


def _tensor(
    item: TensorSlice,
    layout: TensorLayout,
    rank: Rank,
    home: Rank,
    avoid: Collection[Rank],
) -> tuple[list[Move], list[Box]]:
    """Return the moves for one wanted box, and the parts of the box that no shard covers."""
    target = Box(item.offsets, item.lengths)
    if not target.elements:
        return [], []
    holders: dict[Box, list[PlacedSlice]] = {}
    for placed in layout.slices:
        if placed.rank not in avoid:
            holders.setdefault(Box(placed.offsets, placed.lengths), []).append(placed)
    overlaps = []
    for box, equal in holders.items():
        common = intersect(target, box)
        if common is not None:
            at_home = any(placed.rank == home for placed in equal)
            overlaps.append((-common.elements, not at_home, box))
    size = element_bytes(item.dtype, "reshard")
    moves: list[Move] = []
    left = [target]
    for _, _, box in sorted(overlaps):
        if not left:
            break
        chosen = _choose(holders[box], rank, home)
        rest: list[Box] = []
        for open_box in left:
            part = intersect(open_box, box)
            if part is None:
                rest.append(open_box)
                continue
            rest += subtract(open_box, part)
            for run in runs(part, box, target):
                moves.append(
                    Move(
                        chosen.rank,
                        chosen.byte_range.start + run.source * size,
                        run.length * size,
                        item.byte_range.start + run.target * size,
                        run.times,
                        run.source_step * size,
                        run.target_step * size,
                    )
                )
        left = rest
    return moves, left


def _choose(equal: list[PlacedSlice], rank: Rank, home: Rank) -> PlacedSlice:
    at_home = next((placed for placed in equal if placed.rank == home), None)
    return at_home or equal[rank % len(equal)]


def _objects(
    wanted: RankLayout, source: Layout, home: Rank, avoid: Collection[Rank], moves: list[Move]
) -> list[str]:
    problems: list[str] = []
    pairs: set[tuple[ByteRange, ByteRange]] = set()
    for fqn, target in sorted(wanted.objects.items()):
        places = source.objects.get(fqn, ())
        place = next((p.byte_range for p in places if p.rank == home), None)
        if place is None or home in avoid:
            problems.append(
                f"object {fqn}: expected it in the shard of rank {home}, which cannot be read"
            )
        elif place.length_bytes != target.length_bytes:
            problems.append(
                f"object {fqn}: expected {target.length_bytes} bytes, found "
                f"{place.length_bytes} in the shard of rank {home}"
            )
        else:
            pairs.add((place, target))
    moves += [
        Move(home, place.start, place.length_bytes, target.start)
        for place, target in pairs
        if place.length_bytes
    ]
    return problems


def _uncovered(fqn: str, item: TensorSlice, left: list[Box]) -> str:
    elements = sum(box.elements for box in left)
    first = left[0]
    return (
        f"{fqn}: {elements} of {Box(item.offsets, item.lengths).elements} elements are in no "
        f"readable shard, the first at {list(first.offsets)} of {list(item.shape)}"
    )


def _joined(moves: list[Move]) -> tuple[Move, ...]:
    joined: list[Move] = []
    for move in sorted(moves):
        if joined and joined[-1].times == move.times == 1:
            last = joined[-1]
            stop = (last.source, last.start + last.length_bytes, last.target + last.length_bytes)
            if stop == (move.source, move.start, move.target):
                joined[-1] = last._replace(length_bytes=last.length_bytes + move.length_bytes)
                continue
        joined.append(move)
    return tuple(joined)
