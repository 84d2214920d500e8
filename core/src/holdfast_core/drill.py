"""A drill: read everything that a restore of one checkpoint would need, and compare its digests.

The manifest names shards and layouts. Each stored byte is read once, by the readers that a restore uses, and
nothing is written. A few tens of MiB of a shard are in memory, and its chunk table.

Damage is what a place holds wrongly. It is looked at twice, because a byte may be wrong in transit. A place
that does not answer, refuses the keys or was emptied, and a checkpoint that is deleted meanwhile, are no
damage: then the drill raises an error, and its caller knows no more than before.

With a world size, the drill also assembles the tensors for another number of ranks, through the reader of a
restore, a few MiB at a time. It compares them with what it reads directly from the shards that were used.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Protocol, TypeVar

from holdfast_core.contract import MAX_DRILL_RANKS, DrillExit
from holdfast_core.errors import (
    ConfigError,
    CorruptionError,
    CutError,
    FormatError,
    HoldfastError,
    NotFoundError,
    StateMismatchError,
    SwappedError,
    UnavailableError,
    UnknownVersionError,
    UnreadableError,
)
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.manifest import Manifest, ManifestShard, parse_manifest_of
from holdfast_core.format.payload import unpack_objects
from holdfast_core.format.rank_layout import (
    RankLayout,
    TensorSlice,
    element_bytes,
    parse_rank_layout,
)
from holdfast_core.ids import (
    ByteRange,
    CheckpointId,
    Digest,
    JobUid,
    Rank,
    ShardRef,
    TierName,
    age_of,
)
from holdfast_core.reading import Reader, ShardPlace, run_blocking
from holdfast_core.reshard.boxes import (
    Box,
    SavedTensor,
    holders_of,
    intersect,
    runs,
    saved_state,
)
from holdfast_core.tasks import Closing
from holdfast_core.tiers.base import ShardSource

T = TypeVar("T")

PIECE_BYTES = 8 << 20
"""Bytes of the state that are assembled at a time, unless a single element is longer."""
_WINDOW_BYTES = 4 << 20
_WINDOWS = 8
"""Parts of shards that stay in memory for the comparison: 32 MiB. A part holds many small tensors."""
_OPEN_SHARDS = 16
_LAYOUTS = 64
_LOOKS = 2
_MANIFEST = "manifest"
_MAX_BAD = 100
"""Bad parts that a report lists. One lost node can damage each of thousands of shards."""
_REPORT_BYTES = 4000
"""Longest JSON of a report. Kubernetes keeps 4,096 bytes of a termination message."""
_REPORT_TEXT = 300


class Damage(StrEnum):
    """What is wrong with a part of a checkpoint."""

    MISSING = "Missing"
    """The place does not have it."""
    CUT = "Cut"
    """It ends too early, or its end was replaced."""
    SWAPPED = "Swapped"
    """It is intact, but it is another shard or manifest under this name."""
    WRONG_BYTES = "WrongBytes"
    """A digest, a checksum or a value does not match."""


@dataclass(frozen=True, slots=True)
class BadPart:
    """A part of a checkpoint that is damaged."""

    part: str
    """`manifest`, `shard of rank 3`, `layout of rank 3` or `reference to step 5`."""
    damage: Damage
    message: str


@dataclass(frozen=True, slots=True)
class DrillReport:
    """Result of a drill that ran to its end."""

    checkpoint: CheckpointId
    read_bytes: int
    """Payload bytes that were read and compared, without chunk tables, layouts and compression."""
    seconds: float
    shards: int
    """Shards that were read, or 0 if the manifest is damaged."""
    bad: tuple[BadPart, ...]
    """Up to 100 bad parts. Empty: the checkpoint is intact."""
    bad_count: int
    tensors: int | None = None
    """Tensors that were assembled for another number of ranks and compared; None if none were to be."""
    not_restorable: str = ""
    """Why the state cannot be assembled for that number of ranks, although no byte is damaged."""

    @property
    def is_intact(self) -> bool:
        return not self.bad_count

    @property
    def exit_code(self) -> DrillExit:
        if self.bad_count:
            return DrillExit.DAMAGED
        return DrillExit.NOT_RESTORABLE if self.not_restorable else DrillExit.INTACT

    def to_json(self) -> str:
        """Return the report as one line of ASCII JSON that fits into a termination message."""
        shown = [
            {"part": bad.part, "damage": str(bad.damage), "message": _ascii(bad.message)}
            for bad in self.bad
        ]
        while True:
            text = json.dumps(
                {
                    "step": self.checkpoint.step,
                    "round": self.checkpoint.round,
                    "readBytes": self.read_bytes,
                    "seconds": round(self.seconds, 3),
                    "shards": self.shards,
                    "tensors": self.tensors,
                    "notRestorable": _ascii(self.not_restorable),
                    "badCount": self.bad_count,
                    "bad": shown,
                }
            )
            if len(text) <= _REPORT_BYTES:
                return text
            shown.pop()


class DrillPlace(Protocol):
    """The checkpoints of one job in one place. Calls block."""

    @property
    def name(self) -> str:
        """What users call the place."""
        ...

    @property
    def tier(self) -> TierName: ...

    def checkpoints(self) -> Collection[CheckpointId]:
        """Return the checkpoints that have a manifest. Manifests are not read."""
        ...

    def manifest_document(self, checkpoint: CheckpointId) -> bytes:
        """Return the manifest as stored. Raises NotFoundError, and CorruptionError if that is known."""
        ...

    def layout(self, ref: ShardRef, digest: Digest) -> bytes:
        """Return the layout of a shard, verified. Raises NotFoundError, CorruptionError."""
        ...

    def open_shard(self, ref: ShardRef) -> ShardSource:
        """Open a shard for reading. Raises NotFoundError, CorruptionError."""
        ...

    def verifier(self, checkpoint: CheckpointId) -> ShardVerifier:
        """Return what reads the shards of a checkpoint."""
        ...


class ShardVerifier(Protocol):
    """Reads whole shards of one checkpoint."""

    def verify(self, ref: ShardRef, shard: ManifestShard) -> int:
        """Read every byte of a shard that was not read yet, and compare all.

        Returns the payload bytes that were read. Raises CorruptionError and NotFoundError for damage.
        """
        ...

    def missing_references(self) -> Collection[CheckpointId]:
        """Return earlier checkpoints that the verified shards need and that nothing keeps."""
        ...


@dataclass(frozen=True, slots=True)
class DrillRequest:
    """Which checkpoint to read, and how."""

    job_uid: JobUid
    checkpoint: CheckpointId
    manifest: Digest | None = None
    """Digest of the manifest, if it is known from elsewhere. Without it, some wrong bytes of a manifest, such
    as those of the job's name, cannot be found."""
    world_size: int | None = None
    """Number of ranks for which to assemble the state. None: it is not assembled."""


Progress = Callable[[int, int], object]
"""Receives the payload bytes of a shard after they were read, and those of all shards."""


def drill(
    place: DrillPlace,
    request: DrillRequest,
    now: Callable[[], float] = time.monotonic,
    progress: Progress = lambda read, total: None,
) -> DrillReport:
    """Read one checkpoint and return what was found. Blocks for as long as its bytes take.

    Raises:
        ConfigError: The world size is out of bounds.
        NotFoundError: The checkpoint was deleted meanwhile, or the place has no checkpoint of the job.
        UnknownVersionError: A newer release wrote it.
        UnavailableError: The place cannot be reached.
        AccessDeniedError: The place refuses the keys.
        TierError: Another failure of the place.
    """
    size = request.world_size
    if size is not None and not 1 <= size <= MAX_DRILL_RANKS:
        raise ConfigError(f"world size {size}: expected 1 to {MAX_DRILL_RANKS} ranks")
    began = now()
    reading = _Drill(place, request, progress)
    manifest = reading.look(_MANIFEST, reading.manifest)
    tensors, not_restorable = None, ""
    if manifest is not None:
        reading.read_all(manifest)
        if size is not None and not reading.bad_count:
            tensors, not_restorable = _restored(place, manifest, size)
    if reading.bad_count or not_restorable:
        reading.expect_kept()
    return DrillReport(
        request.checkpoint,
        reading.read_bytes,
        now() - began,
        0 if manifest is None else manifest.world_size,
        tuple(reading.bad),
        reading.bad_count,
        tensors,
        not_restorable,
    )


def newest_of(
    place: DrillPlace, step: int | None = None, round_: int | None = None
) -> CheckpointId:
    """Return the newest checkpoint of a place, or the newest one of a step or a round.

    Raises NotFoundError where there is none.
    """
    known = place.checkpoints()
    found = [
        checkpoint
        for checkpoint in known
        if step in (None, checkpoint.step) and round_ in (None, checkpoint.round)
    ]
    if found:
        return max(found, key=age_of)
    wanted = "a checkpoint" if step is None else f"step {step}"
    wanted += "" if round_ is None else f" of round {round_}"
    steps = ", ".join(str(one) for one in sorted({checkpoint.step for checkpoint in known})[-20:])
    raise NotFoundError(
        f"{place.name}: expected {wanted}, found {'the steps ' + steps if known else 'no checkpoint'}"
    )


class _Drill:
    """The reads of one drill."""

    def __init__(self, place: DrillPlace, request: DrillRequest, progress: Progress) -> None:
        self._place = place
        self._request = request
        self._progress = progress
        self._verifier = place.verifier(request.checkpoint)
        self.read_bytes = 0
        self.bad: list[BadPart] = []
        self.bad_count = 0

    def look(self, part: str, read: Callable[[], T]) -> T | None:
        """Return what `read` returns. If it is damaged at each look, record that and return None."""
        for left in reversed(range(_LOOKS)):
            try:
                return read()
            except UnknownVersionError:
                raise
            except (FormatError, NotFoundError) as error:
                if isinstance(error, UnreadableError) and error.may_pass:
                    raise UnavailableError(str(error)) from error
                if not left:
                    self._found_bad(BadPart(part, _damage_of(error), str(error)))
        return None

    def manifest(self) -> Manifest:
        request = self._request
        document = self._place.manifest_document(request.checkpoint)
        manifest = parse_manifest_of(document, request.job_uid, request.checkpoint)
        if request.manifest not in (None, found := digest_of(document)):
            raise CorruptionError(
                f"the manifest of {request.checkpoint}: expected digest {request.manifest}, found {found}"
            )
        return manifest

    def read_all(self, manifest: Manifest) -> None:
        """Read all shards, layouts and markers of references."""
        total = sum(shard.payload_bytes for shard in manifest.shards)
        for shard in manifest.shards:
            self.look(
                f"shard of rank {shard.rank}", partial(self._shard, manifest, shard.rank, total)
            )
            self.look(f"layout of rank {shard.rank}", partial(self._layout, manifest, shard.rank))
        for earlier in self._verifier.missing_references():
            text = f"no marker keeps the objects of {earlier}, which this checkpoint needs"
            self._found_bad(BadPart(f"reference to step {earlier.step}", Damage.MISSING, text))

    def expect_kept(self) -> None:
        """Raise an error if what was found has another cause than damage of this checkpoint.

        Raises NotFoundError for a checkpoint that was deleted meanwhile, and for a store without any
        checkpoint of the job, and UnavailableError for a manifest that is there now and was not before.
        """
        checkpoint = self._request.checkpoint
        known = self._place.checkpoints()
        if not known:
            raise NotFoundError(
                f"{self._place.name} has no checkpoint of this job: check the bucket and the prefix"
            )
        lacks_manifest = any(
            bad.part == _MANIFEST and bad.damage is Damage.MISSING for bad in self.bad
        )
        if checkpoint in known and lacks_manifest:
            raise UnavailableError(f"the manifest of {checkpoint} is listed, but was not found")
        if checkpoint not in known and not lacks_manifest:
            raise NotFoundError(f"{checkpoint} was deleted while it was read")

    def _shard(self, manifest: Manifest, rank: Rank, total_bytes: int) -> None:
        read = self._verifier.verify(manifest.ref(rank), manifest.shards[rank])
        self.read_bytes += read
        self._progress(read, total_bytes)

    def _layout(self, manifest: Manifest, rank: Rank) -> None:
        _layout_of(self._place, manifest, rank)

    def _found_bad(self, bad: BadPart) -> None:
        self.bad_count += 1
        if len(self.bad) < _MAX_BAD:
            self.bad.append(bad)


def _layout_of(place: DrillPlace, manifest: Manifest, rank: Rank) -> RankLayout:
    """Return a layout. Raises NotFoundError, CorruptionError, and FormatError if it is of another shard."""
    shard = manifest.shards[rank]
    layout = parse_rank_layout(place.layout(manifest.ref(rank), shard.layout))
    if (layout.rank, layout.payload_bytes) != (rank, shard.payload_bytes):
        raise FormatError(
            f"layout of rank {rank}: it is of rank {layout.rank} with a payload of "
            f"{layout.payload_bytes} bytes, expected {shard.payload_bytes}"
        )
    return layout


def _damage_of(error: HoldfastError) -> Damage:
    match error:
        case NotFoundError():
            return Damage.MISSING
        case CutError():
            return Damage.CUT
        case SwappedError():
            return Damage.SWAPPED
        case _:
            return Damage.WRONG_BYTES


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode()[:_REPORT_TEXT]


# ------------------------------------------------------------------ the state for another number of ranks


class _Memory:
    """Memory that the reader fills."""

    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)

    def write_payload(self, offset: int, data: memoryview) -> None:
        self.data[offset : offset + len(data)] = data


class _DrilledParts(Closing):
    """The checkpoint as `reading.CheckpointPlaces`, with one place of its parts."""

    def __init__(self, place: DrillPlace, manifest: Manifest) -> None:
        self._place = place
        self._manifest = manifest
        self._layouts: OrderedDict[Rank, RankLayout] = OrderedDict()
        self._shards: OrderedDict[Rank, ShardSource] = OrderedDict()
        self._windows: OrderedDict[tuple[Rank, int], bytes] = OrderedDict()

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    async def layout(self, rank: Rank) -> RankLayout:
        return self.layout_of(rank)

    def places(self, rank: Rank) -> Sequence[ShardPlace]:
        return (ShardPlace(self._place.tier, self._place.name, partial(self._shard, rank)),)

    async def run(self, call: Callable[[], T], place: ShardPlace | None = None) -> T:
        return call()

    async def failed(self, place: ShardPlace, rank: Rank, error: HoldfastError) -> None:
        """Do nothing: the reader's own error has the text."""

    def layout_of(self, rank: Rank) -> RankLayout:
        if rank not in self._layouts:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.popitem(last=False)
            self._layouts[rank] = _layout_of(self._place, self._manifest, rank)
        return self._layouts[rank]

    def payload(self, rank: Rank, span: ByteRange) -> bytes:
        """Return verified bytes of a rank's payload."""
        first, last = span.start // _WINDOW_BYTES, (span.stop - 1) // _WINDOW_BYTES
        joined = b"".join(self._window(rank, number) for number in range(first, last + 1))
        skipped = span.start - first * _WINDOW_BYTES
        return joined[skipped : skipped + span.length_bytes]

    def _window(self, rank: Rank, number: int) -> bytes:
        if (rank, number) not in self._windows:
            if len(self._windows) >= _WINDOWS:
                self._windows.popitem(last=False)
            span = ByteRange(
                number * _WINDOW_BYTES,
                min((number + 1) * _WINDOW_BYTES, self._manifest.shards[rank].payload_bytes),
            )
            memory = _Memory(span.length_bytes)
            run_blocking(Reader(self, memory).read_span(rank, span))
            self._windows[rank, number] = bytes(memory.data)
        return self._windows[rank, number]

    @contextmanager
    def _shard(self, rank: Rank) -> Iterator[ShardSource]:
        """Lend the open shard of a rank: opening one takes requests for its chunk table."""
        shard = self._shards.pop(rank, None)
        if shard is None:
            if len(self._shards) >= _OPEN_SHARDS:
                self._shards.popitem(last=False)[1].close()
            shard = self._place.open_shard(self._manifest.ref(rank))
        try:
            yield shard
        except BaseException:
            shard.close()
            raise
        self._shards[rank] = shard

    def close(self) -> None:
        while self._shards:
            self._shards.popitem()[1].close()


def _restored(place: DrillPlace, manifest: Manifest, world_size: int) -> tuple[int, str]:
    """Assemble the state for `world_size` ranks.

    A tensor of the gang is cut along its first dimension, so that every element is read once. Tensors that
    belong to one rank only are left out, as in a restore on another number of ranks.

    Returns:
        The number of tensors that were compared, and why the state cannot be assembled or differs, or "".
    """
    try:
        with closing(_DrilledParts(place, manifest)) as places:
            groups = [
                (places.layout_of(rank), len(ranks))
                for rank, ranks in holders_of(manifest.shards).items()
            ]
            state = saved_state(places.layout_of(Rank(0)), groups, manifest.world_size)
            for rank in range(min(world_size, manifest.world_size)):
                _read_objects(places, Rank(rank))
            for number in range(world_size):
                for batch in _batches(state.tensors, Rank(number), world_size):
                    _compare(places, batch, world_size)
    except UnknownVersionError:
        raise
    except (StateMismatchError, NotFoundError, FormatError) as error:
        return 0, str(error)
    return len(state.tensors), ""


def _read_objects(places: _DrilledParts, rank: Rank) -> None:
    """Parse the objects of a rank, which hold all state that is no tensor. Raises FormatError."""
    for span in set(places.layout_of(rank).objects.values()):
        if span.length_bytes:
            unpack_objects(places.payload(rank, span))


def _batches(
    tensors: Mapping[str, SavedTensor], rank: Rank, world_size: int
) -> Iterator[RankLayout]:
    """Yield layouts of a few MiB that together hold what a new rank wants."""
    wanted: dict[str, TensorSlice] = {}
    position = 0
    for fqn, tensor in sorted(tensors.items()):
        size = element_bytes(tensor.dtype, fqn)
        for box in _pieces(_share(tensor.shape, rank, world_size), max(1, PIECE_BYTES // size)):
            length = box.elements * size
            if wanted and (fqn in wanted or position + length > PIECE_BYTES):
                yield RankLayout(rank, wanted, {}, position)
                wanted, position = {}, 0
            place = ByteRange(position, position + length)
            wanted[fqn] = TensorSlice(tensor.dtype, tensor.shape, *box, place)
            position += length
    if wanted:
        yield RankLayout(rank, wanted, {}, position)


def _share(shape: tuple[int, ...], rank: Rank, world_size: int) -> Box:
    """Return the rows of a tensor for one of `world_size` ranks. Rank 0 has a tensor without dimensions."""
    if not shape:
        return Box((), ()) if rank == 0 else Box((0,), (0,))
    start, stop = (shape[0] * at // world_size for at in (rank, rank + 1))
    return Box((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))


def _pieces(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `limit` elements, in row-major order. An empty one has no pieces."""
    if box.elements <= limit:
        if box.elements:
            yield box
        return
    axis = next(at for at, length in enumerate(box.lengths) if length > 1)
    count = max(1, limit * box.lengths[axis] // box.elements)
    for start in range(0, box.lengths[axis], count):
        length = min(count, box.lengths[axis] - start)
        yield from _pieces(
            Box(
                (*box.offsets[:axis], box.offsets[axis] + start, *box.offsets[axis + 1 :]),
                (*box.lengths[:axis], length, *box.lengths[axis + 1 :]),
            ),
            limit,
        )


def _compare(places: _DrilledParts, wanted: RankLayout, world_size: int) -> None:
    """Assemble a part of the state and compare each tensor with its sources.

    Raises StateMismatchError if they differ or if the shards do not hold all elements.
    """
    memory = _Memory(wanted.payload_bytes)
    reader = Reader(places, memory)
    run_blocking(reader.read(wanted, world_size))
    for fqn, item in wanted.tensors.items():
        found = memory.data[item.byte_range.start : item.byte_range.stop]
        expected = _from_sources(places, fqn, item, reader.sources)
        if expected is not None and expected != found:
            raise StateMismatchError(
                f"tensor {fqn} assembled for rank {wanted.rank} of {world_size}: expected digest "
                f"{digest_of(expected)} of the saved ranks {sorted(reader.sources)}, found "
                f"{digest_of(found)}"
            )


def _from_sources(
    places: _DrilledParts, fqn: str, item: TensorSlice, sources: Iterable[Rank]
) -> bytearray | None:
    """Return the bytes of a box as they are in the shards of these ranks.

    Returns None if two of the ranks hold the same element: replicas may differ, and a restore takes the
    element from one of them.
    """
    target, size = Box(item.offsets, item.lengths), element_bytes(item.dtype, fqn)
    data, filled = bytearray(target.elements * size), 0
    for rank in sorted(sources):
        held = places.layout_of(rank).tensors.get(fqn)
        box = None if held is None else Box(held.offsets, held.lengths)
        part = None if box is None else intersect(box, target)
        if held is None or box is None or part is None:
            continue
        filled += part.elements
        found = runs(part, box, target)
        first = found[0].source
        last = max(run.source + (run.times - 1) * run.source_step + run.length for run in found)
        start = held.byte_range.start
        saved = places.payload(rank, ByteRange(start + first * size, start + last * size))
        for run in found:
            for number in range(run.times):
                at = (run.source + number * run.source_step - first) * size
                to = (run.target + number * run.target_step) * size
                data[to : to + run.length * size] = saved[at : at + run.length * size]
    return data if filled == target.elements else None
