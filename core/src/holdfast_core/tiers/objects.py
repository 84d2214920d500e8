"""The contract of an object store: immutable objects under keys, in a bucket, a directory or a dict.

`store.tier.ObjectTier` keeps checkpoints in any store with this contract. docs/extending.md shows how to
write one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from holdfast_core.errors import CorruptionError, FormatError, UnreadableError
from holdfast_core.format import keys
from holdfast_core.format.canonical import append_crc
from holdfast_core.ids import CheckpointId, Rank

MAX_DOCUMENT_BYTES = 64 << 20
"""Longest object that `ObjectStore.get` returns."""
_SLICE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of an open file. A store can send them without a copy in this process."""

    fd: int
    offset: int
    length_bytes: int


def unreadable(error: OSError) -> UnreadableError:
    """Return the error of a file that its disk does not return, which is no fault of the store."""
    return UnreadableError(f"reading a shard file: {error.strerror or error}", may_pass=True)


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive bytes of an object."""

    pieces: tuple[bytes | FileRange, ...]
    length_bytes: int
    crc32c: int
    """Computed when the tensors were first read, so it also detects bits that flipped on the disk."""
    is_last: bool

    def data(self) -> Iterator[memoryview]:
        """Yield the bytes in order, at most 1 MiB at a time.

        Raises:
            CorruptionError: A file is too short. The CRC32C is not compared.
            UnreadableError: A file cannot be read.
        """
        for piece in self.pieces:
            if isinstance(piece, bytes):
                view = memoryview(piece)
                yield from (
                    view[at : at + _SLICE_BYTES] for at in range(0, len(view), _SLICE_BYTES)
                )
                continue
            position, stop = piece.offset, piece.offset + piece.length_bytes
            while position < stop:
                try:
                    data = os.pread(piece.fd, min(_SLICE_BYTES, stop - position), position)
                except OSError as error:
                    raise unreadable(error) from error
                if not data:
                    raise CorruptionError(f"a shard file ends at byte {position}, expected {stop}")
                position += len(data)
                yield memoryview(data)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Length and checksum of a whole object."""

    size_bytes: int
    crc32c: int | None
    """None if the store keeps none."""


def info_of(parts: Iterable[Part]) -> ObjectInfo:
    """Return length and checksum of the object that consists of these parts."""
    size, crc = 0, 0
    for part in parts:
        crc = append_crc(crc, part.crc32c, part.length_bytes)
        size += part.length_bytes
    return ObjectInfo(size, crc)


class ObjectSource(Protocol):
    """The bytes of one object that is to be written."""

    @property
    def made_while_sent(self) -> bool:
        """Whether making a part takes time and memory.

        If not, all parts can be made first, so that length and checksum of the object are known before
        its first byte is sent.
        """
        ...

    @property
    def size_limit(self) -> int:
        """Upper bound of the object's length in bytes."""
        ...

    def parts(self, part_bytes: int) -> Iterator[Part]:
        """Make the parts from the first one on. Every call makes the same bytes.

        All parts but the last have the same length: `part_bytes`, or a little more.
        """
        ...

    def verify(self) -> None:
        """Read the source again. Raises CorruptionError if it is damaged on this node."""
        ...


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing."""

    key: str
    age: timedelta
    """Time since the object was written, by the store's own clock, at least 0."""
    size_bytes: int


@dataclass(slots=True)
class CheckpointObjects:
    """What a listing shows of one checkpoint that has a manifest."""

    age: timedelta
    """Time since the manifest was written."""
    ranks: int = 0
    """Number of ranks that have a shard or a pack here."""
    size_bytes: int = 0
    """Bytes of its objects but the manifest. Chunks that another checkpoint stores for it do not count."""


def checkpoints_in(manifests: Iterable[Listed]) -> dict[CheckpointId, CheckpointObjects]:
    """Return the checkpoints of a job that have a manifest, in the order of the listing.

    Args:
        manifests: The objects below `keys.MANIFESTS`, with keys relative to the job.
    """
    return {
        key.checkpoint: CheckpointObjects(age)
        for key, age in ((_parsed(item), item.age) for item in manifests)
        if isinstance(key, keys.ManifestKey)
    }


def count_shards(found: Mapping[CheckpointId, CheckpointObjects], shards: Iterable[Listed]) -> None:
    """Add ranks and bytes to the checkpoints of a job.

    Args:
        found: The checkpoints that have a manifest.
        shards: Their objects below `keys.SHARDS`, with keys relative to the job. Those of one checkpoint and
            rank follow each other.
    """
    last: tuple[CheckpointId, Rank] | None = None
    for item in shards:
        key = _parsed(item)
        if not isinstance(key, keys.ShardObjectKey) or key.checkpoint not in found:
            continue  # it is being written or deleted
        objects = found[key.checkpoint]
        objects.size_bytes += item.size_bytes
        if key.kind is not keys.ShardObject.LAYOUT and last != (key.checkpoint, key.rank):
            last = key.checkpoint, key.rank
            objects.ranks += 1


def _parsed(item: Listed) -> keys.Key | None:
    with suppress(FormatError):
        return keys.parse_key(item.key)
    return None  # Holdfast did not write it


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing."""

    objects: tuple[Listed, ...]
    next: str = ""
    """Token of the next page; "" if this is the last one."""
    folders: tuple[str, ...] = ()
    """Beginnings of keys, each up to and with a `/`, if the listing has folders."""


class RangedStore(Protocol):
    """Immutable objects under keys, to be read by ranges. Safe for use by many threads and processes.

    A key consists of names of letters, digits, `.`, `_` and `-`, separated by `/`. No name begins with a
    dot or ends with `.bad`. Calls block and retry temporary failures themselves. They raise errors of
    holdfast_core.errors only: AccessDeniedError if the store refuses this process, UnavailableError if it
    cannot be reached, TierError for other failures. After any error the caller may repeat the call.
    """

    @property
    def name(self) -> str:
        """What an operator calls this store, for error messages."""
        ...

    def read_into(
        self, key: str, start: int, buffer: memoryview, stopped: threading.Event | None = None
    ) -> None:
        """Fill `buffer` with the bytes of the object from `start` on. The caller verifies them.

        Args:
            key: Key of the object.
            start: Position of the first byte.
            buffer: Is filled completely, else an error is raised.
            stopped: Once it is set, the bytes are not needed any more, and the call may end with any
                error. A store that retries looks at it before each attempt.

        Raises:
            NotFoundError: There is no such object.
            CorruptionError: The object ends before the range does.
        """
        ...

    def size(self, key: str, *, sure: bool = False) -> int | None:
        """Return the length of an object in bytes, or None if there is no such object.

        With `sure`, None means that repeated looks did not find it: some stores miss an object for a
        moment after it was written.
        """
        ...

    def close(self) -> None:
        """End all waits, and release connections and threads. Calls in progress raise UnavailableError."""
        ...


class ReadableStore(RangedStore, Protocol):
    """A RangedStore that can also be listed."""

    def get(self, key: str) -> bytes:
        """Return a whole object of at most MAX_DOCUMENT_BYTES. Raises NotFoundError, CorruptionError."""
        ...

    def list(self, prefix: str, page: str = "", *, folders: bool = False) -> Page:
        """Return one page of the objects whose key begins with `prefix`, in ascending order of the keys.

        Every object that was written before the call is listed, and none that was deleted before.

        Args:
            prefix: Beginning of the keys. It ends with a `/` if `folders` is set.
            page: `Page.next` of the page before; "" for the first page.
            folders: List the objects whose key has a further `/` behind the prefix by folder, each
                folder once. The time of a listing then does not depend on the number of these objects.
        """
        ...


class ObjectStore(ReadableStore, Protocol):
    """A ReadableStore that can also be written."""

    def write(self, key: str, source: ObjectSource, *, replace: bool = False) -> None:
        """Write an object if the key is free. It is durable and complete when the call returns.

        The object appears at once or not at all. If the key holds an object of the same length and
        CRC32C, nothing is written. If several writers write different objects, exactly one succeeds.
        A part whose bytes do not match its CRC32C is never stored.

        Args:
            key: Key of the object.
            source: Its bytes. If `made_while_sent` is set and the key is not free, nothing is compared.
            replace: The caller has found that the stored object is damaged. It is replaced atomically.
                A store that detects damage by its own checksums may ignore this.

        Raises:
            AlreadyExistsError: The key holds another object, or any object if the parts of `source` are
                made while they are sent.
            CorruptionError: The source is damaged.
            CapacityError: The store is full.
        """
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects durably. Absent objects are ignored."""
        ...

    def unfinished(self, prefix: str) -> Sequence[Listed]:
        """Return what interrupted or running writes have stored below a prefix, at most 1,000 of them.

        The age counts from the beginning of the write, and the size is what is stored of it.
        """
        ...

    def abort_stale(self, prefixes: Collection[str], older_than: timedelta) -> int:
        """Remove what interrupted writes left below these prefixes at least `older_than` ago.

        Return how many were removed. A write that goes on later begins from its first byte.
        """
        ...
