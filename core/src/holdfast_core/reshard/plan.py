"""Plan of which bytes of the old ranks' payloads make up a new rank's payload. Pure.

Any shard whose layout covers a part of a wanted box can be its source. If several ranks hold the same
boxes of all tensors, the new rank r reads its home, the old rank r mod N. If its home is not among them,
it reads number r mod their number. Equal copies thus serve about equally many ranks.

Moves are converted to reads of whole chunks, because only whole chunks can be verified. A chunk that several
moves need is read once. Chunks that no move needs are not read.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast_core.errors import FormatError, NotFoundError, StateMismatchError
from holdfast_core.format.manifest import ManifestShard
from holdfast_core.format.payload import PayloadPlan, plan_payload
from holdfast_core.format.rank_layout import RankLayout, TensorSlice, element_bytes
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


class SliceSearch:
    """Search for the bytes that fill every wanted box and the objects exactly once.

    It asks for the layouts of old ranks one at a time and keeps only the moves that it needs of each. It
    begins with the home, and goes on with the ranks that are nearest to the new rank's position in the
    gang. It ends when all boxes are filled, so that few layouts are read where ranks hold rows in order.
    Ranks that hold the same boxes count as one. The moves do not cover the payload's header: see
    `payload_plan`.
    """

    def __init__(
        self,
        wanted: RankLayout,
        world_size: int,
        shards: Sequence[ManifestShard],
        missing: Mapping[Rank, str],
    ) -> None:
        """Begin a search.

        Args:
            wanted: Layout of the new rank's payload.
            world_size: Number of the new ranks.
            shards: Entries of the manifest, by old rank.
            missing: Old ranks whose shard or layout cannot be read, with the reasons.
        """
        self._wanted = wanted
        self._shards = shards
        self._missing = missing
        self._home = home_of(wanted.rank, len(shards))
        self._open = {
            fqn: [Box(item.offsets, item.lengths)]
            for fqn, item in wanted.tensors.items()
            if 0 not in item.lengths
        }
        """What is left of each wanted box."""
        self._problems: dict[str, str] = {}
        self._found: set[str] = set()
        """Names that any layout had."""
        self._moves: list[Move] = []
        self._needs_home = bool(wanted.objects)
        self._names: dict[Rank, Collection[str]] = {}
        """Names of the tensors by `same_tensors`, of the layouts that were read."""
        self._order = iter(self._ranks(world_size))

    def _ranks(self, world_size: int) -> list[Rank]:
        """Return one readable rank of each group with the same boxes, in the order of the search."""
        groups: dict[Rank, list[Rank]] = {}
        for shard in self._shards:
            if shard.rank not in self._missing:
                groups.setdefault(shard.same_boxes, []).append(shard.rank)
        number = self._wanted.rank
        chosen = [
            self._home if self._home in ranks else ranks[number % len(ranks)]
            for ranks in groups.values()
        ]
        position = (number + 0.5) / world_size * len(self._shards) - 0.5

        def distance(rank: Rank) -> tuple[bool, float]:
            # A group is as near as its nearest rank, whichever of its ranks is read.
            group = groups[self._shards[rank].same_boxes]
            return rank != self._home, min(abs(member - position) for member in group)

        return sorted(chosen, key=distance)

    def next(self) -> Rank | None:
        """Return the old rank whose layout `add` needs next. None once the search has ended."""
        for rank in self._order:
            if rank == self._home and self._needs_home:
                return rank
            names = self._names.get(self._shards[rank].same_tensors)
            if self._open and (names is None or any(fqn in names for fqn in self._open)):
                return rank
        return None

    def add(self, rank: Rank, layout: RankLayout) -> None:
        """Take the layout of the rank that `next` returned.

        Raises FormatError if it is not the layout of this rank's shard.
        """
        if (layout.rank, layout.payload_bytes) != (rank, self._shards[rank].payload_bytes):
            raise FormatError(
                f"layout of rank {rank}: it is of rank {layout.rank} with a payload of "
                f"{layout.payload_bytes} bytes, expected {self._shards[rank].payload_bytes}"
            )
        self._names[self._shards[rank].same_tensors] = frozenset(layout.tensors)
        if rank == self._home:
            self._add_objects(layout)
        for fqn in tuple(self._open):
            if (held := layout.tensors.get(fqn)) is not None:
                self._found.add(fqn)
                self._add_tensor(fqn, self._wanted.tensors[fqn], rank, held)

    def moves(self) -> tuple[Move, ...]:
        """Return the moves in order of source and start. Adjacent ones are joined.

        Raises:
            StateMismatchError: Tensors or objects are missing, have another dtype, shape or length, or are
                in no shard completely. The message names all of them.
            NotFoundError: The readable shards do not suffice. The message has the reasons.
        """
        problems = dict(self._problems)
        for fqn, left in self._open.items():
            item = self._wanted.tensors[fqn]
            problems[fqn] = (
                _uncovered(fqn, item, left)
                if fqn in self._found
                else f"{_expected(fqn, item)}, found nothing in the checkpoint"
            )
        if self._needs_home and self._home in self._missing:
            for fqn in self._wanted.objects:
                problems[fqn] = (
                    f"object {fqn}: expected it in the shard of rank {self._home}, which cannot be read"
                )
        if not problems:
            return _joined(self._moves)
        lines = "\n  ".join(text for _, text in sorted(problems.items()))
        text = (
            f"rank {self._wanted.rank} cannot be assembled from the checkpoint of "
            f"{len(self._shards)} ranks, in {len(problems)} places:\n  {lines}"
        )
        if not self._missing:
            raise StateMismatchError(text)
        raise NotFoundError(f"{'; '.join(self._missing.values())}; without them: {text}")

    def _add_tensor(self, fqn: str, item: TensorSlice, rank: Rank, held: TensorSlice) -> None:
        """Add the moves of one tensor from one rank, for what is left of the wanted box."""
        if (held.dtype, held.shape) != (item.dtype, item.shape):
            self._problems[fqn] = f"{_expected(fqn, item)}, found {held.dtype} {list(held.shape)}"
            del self._open[fqn]
            return
        target, box = Box(item.offsets, item.lengths), Box(held.offsets, held.lengths)
        size = element_bytes(item.dtype, "reshard")
        left: list[Box] = []
        for open_box in self._open[fqn]:
            part = intersect(open_box, box)
            if part is None:
                left.append(open_box)
                continue
            left += subtract(open_box, part)
            for run in runs(part, box, target):
                self._moves.append(
                    Move(
                        rank,
                        held.byte_range.start + run.source * size,
                        run.length * size,
                        item.byte_range.start + run.target * size,
                        run.times,
                        run.source_step * size,
                        run.target_step * size,
                    )
                )
        if left:
            self._open[fqn] = left
        else:
            del self._open[fqn]

    def _add_objects(self, layout: RankLayout) -> None:
        """Add the moves of the objects, which come from the home."""
        pairs: set[tuple[ByteRange, ByteRange]] = set()
        for fqn, target in self._wanted.objects.items():
            place = layout.objects.get(fqn)
            if place is None:
                self._problems[fqn] = (
                    f"object {fqn}: expected it in the shard of rank {self._home}, found nothing"
                )
            elif place.length_bytes != target.length_bytes:
                self._problems[fqn] = (
                    f"object {fqn}: expected {target.length_bytes} bytes, found "
                    f"{place.length_bytes} in the shard of rank {self._home}"
                )
            else:
                pairs.add((place, target))
        self._moves += [
            Move(self._home, place.start, place.length_bytes, target.start)
            for place, target in pairs
            if place.length_bytes
        ]


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


def _expected(fqn: str, item: TensorSlice) -> str:
    return f"{fqn}: expected {item.dtype} {list(item.shape)}"


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


READ_BYTES = 8 << 20
"""Maximum length of one read, in whole chunks. It bounds the reader's buffer and one request to a peer or
a store."""


class Piece(NamedTuple):
    """Bytes of a read or an old payload, and their offset in the new payload.

    `start` counts from the first byte of the read or of the old payload.
    """

    start: int
    length_bytes: int
    target: int


@dataclass(frozen=True, slots=True)
class Read:
    """One read of whole chunks: `span` of the source's payload, and the pieces of it that are needed."""

    span: ByteRange
    pieces: tuple[Piece, ...]


def by_source(moves: Iterable[Move]) -> dict[Rank, list[Move]]:
    """Return the moves of each old rank, in order of start."""
    found: dict[Rank, list[Move]] = {}
    for move in sorted(moves):
        found.setdefault(move.source, []).append(move)
    return found


def reads_of(
    moves: Sequence[Move], payload_bytes: int, chunk_bytes: int, limit_bytes: int = READ_BYTES
) -> Iterator[Read]:
    """Yield the reads for the moves of one source.

    Args:
        moves: Moves of one old rank, in order of start.
        payload_bytes: Length of the old rank's payload.
        chunk_bytes: Chunk size of the old rank's shard.
        limit_bytes: Maximum length of one read. A read is at least one chunk.
    """
    limit_bytes = max(limit_bytes // chunk_bytes, 1) * chunk_bytes
    start = stop = 0
    pieces: list[Piece] = []
    for run in _runs(moves):
        position, end = run.start, run.start + run.length_bytes
        while position < end:
            chunk = position - position % chunk_bytes
            if not pieces or chunk > stop or position >= start + limit_bytes:
                if pieces:
                    yield Read(ByteRange(start, min(stop, payload_bytes)), tuple(pieces))
                    pieces = []
                start = stop = chunk
            length = min(end, start + limit_bytes) - position
            pieces.append(Piece(position - start, length, run.target + position - run.start))
            position += length
            stop = max(stop, position + -position % chunk_bytes)
    if pieces:
        yield Read(ByteRange(start, min(stop, payload_bytes)), tuple(pieces))


def _runs(moves: Sequence[Move]) -> Iterator[Piece]:
    """Yield the single runs of moves in order of start.

    Only moves whose ranges overlap are merged, so that few iterators are open at a time.
    """
    first = 0
    while first < len(moves):
        last, stop = first + 1, moves[first].stop
        while last < len(moves) and moves[last].start < stop:
            stop = max(stop, moves[last].stop)
            last += 1
        if last == first + 1:
            yield from _runs_of(moves[first])
        else:
            yield from heapq.merge(*map(_runs_of, moves[first:last]))
        first = last


def _runs_of(move: Move) -> Iterator[Piece]:
    for i in range(move.times):
        start, target = move.start + i * move.start_step, move.target + i * move.target_step
        yield Piece(start, move.length_bytes, target)
