"""The contract of every object store as tests. The author of a store subclasses one of these classes.

The module needs pytest and nothing of this repository's own tests, so that the suite can run wherever a
store is written.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import pytest

from holdfast_core.errors import AlreadyExistsError, CorruptionError, HoldfastError, NotFoundError
from holdfast_core.format.canonical import crc32c
from holdfast_core.store.upload import Document
from holdfast_core.tiers.objects import (
    Listed,
    ObjectStore,
    Part,
    RangedStore,
    ReadableStore,
)

WRITERS = 8
LARGE = 11 << 20
"""An object of three parts in a store whose parts have 5 MiB."""

Put = Callable[[str, bytes], object]
"""Puts an object under a key. The store that is tested shows it when the call returns."""


@dataclass(frozen=True)
class SourceInMemory:
    """An ObjectSource in memory whose bytes may differ from their checksums."""

    data: bytes
    made_while_sent: bool = False
    is_damaged: bool = False

    @property
    def size_limit(self) -> int:
        return len(self.data)

    def parts(self, part_bytes: int) -> Iterator[Part]:
        for start in range(0, len(self.data), part_bytes):
            data = self.data[start : start + part_bytes]
            crc = crc32c(data)
            if self.is_damaged and start + part_bytes >= len(self.data):
                data = data[:-1] + bytes([data[-1] ^ 1])
            yield Part((data,), len(data), crc, start + part_bytes >= len(self.data))

    def verify(self) -> None:
        if self.is_damaged:
            raise CorruptionError("the source is damaged")


@dataclass(frozen=True)
class Overtaken:
    """An ObjectSource that calls `meanwhile` while its part is made."""

    data: bytes
    meanwhile: Callable[[], object]
    made_while_sent: bool = True

    @property
    def size_limit(self) -> int:
        return len(self.data)

    def parts(self, part_bytes: int) -> Iterator[Part]:
        self.meanwhile()
        yield from Document(self.data).parts(part_bytes)

    def verify(self) -> None:
        """Do nothing."""


class RangedStoreContract:
    """Tests of a store whose objects are read by ranges, and of the reads of every other store.

    The module of a subclass `TestX(RangedStoreContract)` has two fixtures: `objects`, a store without
    objects, and `put`, which puts an object where that store finds it.
    """

    @pytest.mark.parametrize("size", [0, 1, 70_001, LARGE])
    def test_an_object_reads_back_as_it_was_written(
        self, objects: RangedStore, put: Put, size: int
    ) -> None:
        data = payload(size)
        put("a/b/one", data)
        assert objects.size("a/b/one") == size
        check_same(read(objects, "a/b/one", 0, size), data)
        check_same(read(objects, "a/b/one", size // 3, size), data[size // 3 :])
        check_same(read(objects, "a/b/one", size // 3, size // 2), data[size // 3 : size // 2])

    def test_an_absent_object_is_reported(self, objects: RangedStore) -> None:
        assert objects.size("a/one") is None
        assert objects.size("a/one", sure=True) is None
        with pytest.raises(NotFoundError):
            read(objects, "a/one", 0, 1)

    @pytest.mark.parametrize("start", [5, 10, 20])
    def test_a_range_beyond_the_end_is_refused(
        self, objects: RangedStore, put: Put, start: int
    ) -> None:
        put("a/one", bytes(10))
        with pytest.raises(HoldfastError):
            read(objects, "a/one", start, start + 10)


class ReadableStoreContract(RangedStoreContract):
    """Tests of a store that is only read, and of the reads of every store that is written.

    The module of a subclass `TestX(ReadableStoreContract)` has the fixtures of `RangedStoreContract`.
    """

    @pytest.mark.parametrize("size", [0, 1, 70_001, LARGE])
    def test_a_whole_object_reads_back(self, objects: ReadableStore, put: Put, size: int) -> None:
        put("a/b/one", payload(size))
        check_same(objects.get("a/b/one"), payload(size))

    def test_an_absent_object_is_not_in_a_listing(self, objects: ReadableStore) -> None:
        with pytest.raises(NotFoundError):
            objects.get("a/one")
        assert everything(objects, "a/") == []

    def test_a_listing_has_the_keys_of_the_prefix_in_order(
        self, objects: ReadableStore, put: Put
    ) -> None:
        names = [f"a/s{number:03d}/r{number % 3}.json" for number in range(205)]
        with ThreadPoolExecutor(WRITERS) as threads:
            for _ in threads.map(lambda name: put(name, b"x"), names):
                pass
        put("b/s000/r0.json", b"x")
        put("a-b/s000/r0.json", b"x")
        found = everything(objects, "a/")
        assert [item.key for item in found] == sorted(names)
        assert all(timedelta(0) <= item.age < timedelta(minutes=10) for item in found)
        assert [item.key for item in everything(objects, "a/s00")] == sorted(names)[:10]

    def test_a_listing_by_folder_has_each_folder_once(
        self, objects: ReadableStore, put: Put
    ) -> None:
        names = [
            f"a/s{number:03d}-r{part}/{part}"
            for number in range(105)
            for part in range(1 + number % 3)
        ]
        with ThreadPoolExecutor(WRITERS) as threads:
            for _ in threads.map(lambda name: put(name, b"x"), names):
                pass
        put("a/one", b"x")
        put("a/s000-r0/below/two", b"x")
        put("a-b/one", b"x")
        found, folders = by_folder(objects, "a/")
        assert found == ["a/one"]
        assert folders == sorted({f"{name.rpartition('/')[0]}/" for name in names})
        assert by_folder(objects, "a/s000-r0/") == (["a/s000-r0/0"], ["a/s000-r0/below/"])
        assert by_folder(objects, "b/") == ([], [])


class ObjectStoreContract(ReadableStoreContract):
    """Tests of an ObjectStore.

    The module of a subclass `TestX(ObjectStoreContract)` has the fixture `objects`: a store without objects.
    """

    @pytest.fixture
    def put(self, objects: ObjectStore) -> Put:
        return lambda key, data: objects.write(key, Document(data))

    def test_an_object_whose_parts_are_made_while_they_are_sent(self, objects: ObjectStore) -> None:
        data = payload(LARGE)
        objects.write("a/one", SourceInMemory(data, made_while_sent=True))
        check_same(objects.get("a/one"), data)
        with pytest.raises(AlreadyExistsError):
            objects.write("a/one", SourceInMemory(data, made_while_sent=True))

    @pytest.mark.parametrize("size", [70_001, LARGE])
    def test_an_object_is_written_once(self, objects: ObjectStore, size: int) -> None:
        objects.write("a/one", Document(payload(size)))
        objects.write("a/one", Document(payload(size)))
        with pytest.raises(AlreadyExistsError):
            objects.write("a/one", Document(payload(size, seed=1)))
        with pytest.raises(AlreadyExistsError):
            objects.write("a/one", Document(payload(size - 1)))
        check_same(objects.get("a/one"), payload(size))

    @pytest.mark.parametrize("made_while_sent", [False, True], ids=["known", "made while sent"])
    @pytest.mark.parametrize("size", [70_001, LARGE])
    def test_damaged_bytes_are_not_stored(
        self, objects: ObjectStore, size: int, made_while_sent: bool
    ) -> None:
        with pytest.raises(CorruptionError):
            objects.write("a/one", SourceInMemory(payload(size), made_while_sent, is_damaged=True))
        assert objects.size("a/one") is None
        assert everything(objects, "a/") == []
        objects.write("a/one", SourceInMemory(payload(size), made_while_sent))
        check_same(objects.get("a/one"), payload(size))

    def test_an_object_that_another_writer_makes_meanwhile_is_compared(
        self, objects: ObjectStore
    ) -> None:
        """The other writer is faster after this one has found that the key is free."""
        same, other = Document(payload(1000)), Document(payload(1000, seed=1))
        objects.write("a/one", Overtaken(same.data, lambda: objects.write("a/one", same)))
        assert objects.get("a/one") == same.data
        with pytest.raises(AlreadyExistsError):
            objects.write("a/two", Overtaken(same.data, lambda: objects.write("a/two", other)))
        assert objects.get("a/two") == other.data

    def test_a_damaged_object_is_replaced_or_kept_but_never_mixed(
        self, objects: ObjectStore
    ) -> None:
        objects.write("a/one", Document(b"damaged"))
        try:
            objects.write("a/one", Document(b"good"), replace=True)
        except AlreadyExistsError:
            assert objects.get("a/one") == b"damaged"
        else:
            assert objects.get("a/one") == b"good"
        assert [item.key for item in everything(objects, "a/")] == ["a/one"]

    def test_a_folder_ends_with_its_last_object(self, objects: ObjectStore) -> None:
        for name in ("a/one/1", "a/two/1", "a/two/2"):
            objects.write(name, Document(b"x"))
        objects.delete(["a/one/1", "a/two/1"])
        assert by_folder(objects, "a/") == ([], ["a/two/"])

    def test_a_listing_shows_writes_and_deletions_at_once(self, objects: ObjectStore) -> None:
        for name in ("a/one", "a/two", "b/one"):
            objects.write(name, Document(b"x"))
        objects.delete(["a/one", "b/one", "a/three"])
        assert [item.key for item in everything(objects, "")] == ["a/two"]
        assert objects.size("a/one") is None
        objects.write("a/one", Document(b"other"))
        assert objects.get("a/one") == b"other"

    def test_complete_objects_are_no_leftovers(self, objects: ObjectStore) -> None:
        objects.write("a/one", Document(payload(LARGE)))
        assert list(objects.unfinished("")) == []
        assert objects.abort_stale(["a/", "b/"], timedelta(0)) == 0
        assert objects.size("a/one") == LARGE

    @pytest.mark.parametrize("size", [100, LARGE])
    def test_of_different_objects_one_is_stored(self, objects: ObjectStore, size: int) -> None:
        documents = [payload(size, seed=number) for number in range(WRITERS)]
        errors = at_once(lambda number: objects.write("a/one", Document(documents[number])))
        assert sum(error is None for error in errors) == 1
        check_same(objects.get("a/one"), documents[errors.index(None)])

    @pytest.mark.parametrize("size", [100, LARGE])
    def test_writers_of_the_same_object_all_succeed(self, objects: ObjectStore, size: int) -> None:
        errors = at_once(lambda _: objects.write("a/one", Document(payload(size))))
        assert errors == [None] * WRITERS
        assert [item.key for item in everything(objects, "a/")] == ["a/one"]

    def test_the_deletion_of_an_absent_object_is_no_error(self, objects: ObjectStore) -> None:
        objects.delete(["a/one"])


def check_same(found: bytes, written: bytes) -> None:
    """Fail with the place of the first byte that differs.

    A plain `==` would let pytest write a diff of all bytes, which takes it many minutes for 11 MiB, and it
    does so wherever the environment variable CI is set.
    """
    if found != written:
        pairs = zip(found, written, strict=False)
        differing = (place for place, pair in enumerate(pairs) if pair[0] != pair[1])
        first = next(differing, min(len(found), len(written)))
        pytest.fail(
            f"{len(written)} bytes were written and {len(found)} read; they differ from byte {first}"
        )


def read(objects: RangedStore, key: str, start: int, stop: int) -> bytes:
    buffer = bytearray(stop - start)
    objects.read_into(key, start, memoryview(buffer))
    return bytes(buffer)


def everything(objects: ReadableStore, prefix: str) -> list[Listed]:
    """Return all objects of a listing, from all of its pages."""
    found, page = list[Listed](), ""
    while True:
        listed = objects.list(prefix, page)
        found += listed.objects
        page = listed.next
        if not page:
            return found


def by_folder(objects: ReadableStore, prefix: str) -> tuple[list[str], list[str]]:
    """Return the objects and the folders of a listing by folder, from all of its pages."""
    found, folders, page = list[str](), list[str](), ""
    while True:
        listed = objects.list(prefix, page, folders=True)
        found += [item.key for item in listed.objects]
        folders += listed.folders
        page = listed.next
        if not page:
            return found, folders


def at_once(write: Callable[[int], object]) -> list[AlreadyExistsError | None]:
    """Return the error of each of 8 writers that begin at the same time, or None if it succeeded."""
    start = threading.Barrier(WRITERS)

    def run(number: int) -> AlreadyExistsError | None:
        start.wait(30)
        try:
            write(number)
        except AlreadyExistsError as error:
            return error
        return None

    with ThreadPoolExecutor(WRITERS) as threads:
        return list(threads.map(run, range(WRITERS)))


def payload(size_bytes: int, *, seed: int = 0) -> bytes:
    """Return random bytes that depend only on `size_bytes` and `seed`."""
    return random.Random(seed).randbytes(size_bytes)
