"""Reads boxes of whole tensors from the shards of a checkpoint, verified chunk by chunk.

A box is assembled from any shards whose slices cover it, as a restore on another number of ranks does. A
chunk that does not verify is never returned: another shard that holds the same slice is read instead, and
without one the read fails with the path of the file.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from holdfast.reading.source import CheckpointSource
from holdfast_core.errors import (
    CorruptionError,
    FormatError,
    HoldfastError,
    NotFoundError,
    StateMismatchError,
)
from holdfast_core.format.manifest import Manifest
from holdfast_core.format.rank_layout import (
    RankLayout,
    TensorSlice,
    owner_of,
    parse_rank_layout,
    tensor_bytes,
)
from holdfast_core.ids import ByteRange, CheckpointId, Rank
from holdfast_core.reading import Reader, ShardPlace, run_blocking
from holdfast_core.tasks import Closing
from holdfast_core.tiers.base import ShardSource

T = TypeVar("T")
logger = logging.getLogger(__name__)

_OPEN_SHARDS = 16
"""Shards that stay open between two reads. Each may keep a buffer of 8 MiB."""
_ALIGNMENT_BYTES = 64

Memory = np.ndarray[tuple[int], np.dtype[np.uint8]]


class _Target:
    """Memory that the moves of a plan fill."""

    def __init__(self, size_bytes: int) -> None:
        whole = np.empty(size_bytes + _ALIGNMENT_BYTES, np.uint8)
        start = -whole.ctypes.data % _ALIGNMENT_BYTES
        self.memory: Memory = whole[start : start + size_bytes]

    def write_payload(self, offset: int, data: memoryview) -> None:
        self.memory[offset : offset + len(data)] = np.frombuffer(data, np.uint8)


@dataclass(frozen=True, slots=True)
class _Places:
    """The only place of the shards, as `reading.CheckpointPlaces`."""

    reader: BoxReader
    tensor: str = ""
    """The tensor that is read. The search looks at all names of a layout, of which only this one matters."""

    @property
    def manifest(self) -> Manifest:
        return self.reader.manifest

    async def layout(self, rank: Rank) -> RankLayout:
        found = self.reader.layout(rank)
        own = found.tensors.get(self.tensor)
        return replace(found, tensors={} if own is None else {self.tensor: own}, objects={})

    def places(self, rank: Rank) -> tuple[ShardPlace, ...]:
        return (ShardPlace(self.reader.tier, self.reader.name, partial(self.reader.shard, rank)),)

    async def run(self, call: Callable[[], T], place: ShardPlace | None = None) -> T:
        return call()

    async def failed(self, place: ShardPlace, rank: Rank, error: HoldfastError) -> None:
        logger.warning("shard of rank %d of %s: %s", rank, place.name, error)


class BoxReader(Closing):
    """Reads one checkpoint. Not thread-safe.

    It keeps the layouts that it has read, and up to 16 open shards.
    """

    def __init__(self, source: CheckpointSource, checkpoint: CheckpointId) -> None:
        """Open a checkpoint. Raises NotFoundError, CorruptionError, FormatError."""
        # The tensors refer to this object, so that the claim exists as long as one of them exists.
        self._claim: object = source.claim(checkpoint)
        self.manifest: Manifest = source.manifest(checkpoint)
        self.source = source
        self.tier = source.tier
        self._layouts: dict[Rank, RankLayout] = {}
        self._shards: OrderedDict[Rank, ShardSource] = OrderedDict()
        self.most_open = _OPEN_SHARDS

    @property
    def name(self) -> str:
        return f"step {self.manifest.step} in {self.source.name}"

    def layout(self, rank: Rank) -> RankLayout:
        """Return the layout of a rank. Raises CorruptionError, NotFoundError."""
        if rank not in self._layouts:
            shard = self.manifest.shards[rank]
            document = self.source.layout(self.manifest.ref(rank), shard.layout)
            self._layouts[rank] = parse_rank_layout(document)
        return self._layouts[rank]

    def read_box(self, name: str, box: TensorSlice) -> Memory:
        """Return the bytes of a box of the tensor `name`, in row-major order.

        Args:
            name: Name of the tensor.
            box: The box. Its byte range has no meaning.

        Raises:
            CorruptionError: No readable shard holds a part of the box. The message has the reasons.
            NotFoundError: The checkpoint was deleted.
        """
        size = tensor_bytes(box.dtype, box.lengths, name)
        target = _Target(size)
        if not size:
            return target.memory
        place = ByteRange(0, size)
        owner = owner_of(name)
        wanted = RankLayout(
            Rank(0) if owner is None else owner,
            {name: _at(box, place)},
            {},
            size,
        )
        self._read(name, Reader(_Places(self, name), target).read(wanted, 1))
        return target.memory

    def read_objects(self, rank: Rank) -> bytes:
        """Return the objects of a rank: JSON. Raises CorruptionError, NotFoundError."""
        try:
            places = set(self.layout(rank).objects.values())
        except (NotFoundError, CorruptionError) as error:
            raise self._unreadable(f"the layout of rank {rank}", error) from error
        if not places:
            return b""
        place = places.pop()
        target = _Target(place.length_bytes)
        reader = Reader(_Places(self), target)
        self._read(f"the objects of rank {rank}", reader.read_span(rank, place))
        return target.memory.tobytes()

    def close(self) -> None:
        while self._shards:
            self._shards.popitem()[1].close()
        self._claim = None

    @contextmanager
    def shard(self, rank: Rank) -> Iterator[ShardSource]:
        """Lend the open shard of a rank. It is closed after an error, and when others were used since."""
        shard = self._shards.pop(rank, None)
        if shard is None:
            if len(self._shards) >= self.most_open:
                self._shards.popitem(last=False)[1].close()
            shard = self.source.open_shard(self.manifest.ref(rank))
        try:
            yield shard
        except BaseException:
            shard.close()
            raise
        self._shards[rank] = shard

    def _read(self, what: str, read: Coroutine[Any, Any, object]) -> None:
        """Run a read.

        Raises CorruptionError, UnavailableError, and NotFoundError if the checkpoint was deleted.
        """
        try:
            run_blocking(read)
        except (NotFoundError, StateMismatchError, FormatError) as error:
            self._expect_committed(error)
            raise self._unreadable(what, error) from error

    def _expect_committed(self, cause: Exception) -> None:
        """Raise NotFoundError if the checkpoint was deleted, which explains that shards are missing."""
        with suppress(CorruptionError):
            try:
                self.source.manifest(self.manifest.checkpoint)
            except NotFoundError:
                raise NotFoundError(
                    f"{self.name} was deleted while it was read: read another step"
                ) from cause

    def _unreadable(self, what: str, error: Exception) -> Exception:
        return CorruptionError(f"{what} of {self.name} cannot be read: {error}")


def _at(box: TensorSlice, place: ByteRange) -> TensorSlice:
    return TensorSlice(box.dtype, box.shape, box.offsets, box.lengths, place)
