"""A shard that is verified is the one that was opened, and one identity has one payload."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import BytesSource, payload, shard_file, shard_header

from holdfast_core.errors import AlreadyExistsError, CorruptionError
from holdfast_core.node.files import BufferPool, PoisonedError
from holdfast_core.node.shard_file import read_back, to_read_back
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.file import BLOCK_BYTES, ShardRecord, trailer_offset

SIZE = 3 * BLOCK_BYTES
HEADER = shard_header(SIZE, chunk_bytes=BLOCK_BYTES)


@pytest.fixture
def tier(tmp_path: Path) -> DiskNodeTier:
    return opened(tmp_path)


def opened(tmp_path: Path) -> DiskNodeTier:
    tier = DiskNodeTier(tmp_path / "node", capacity_bytes=64 << 20)
    tier.open()
    return tier


def written(tier: DiskNodeTier, seed: int) -> ShardRecord:
    return tier.write_shard(HEADER, BytesSource(payload(SIZE, seed=seed)))


BUFFERS = BufferPool(BLOCK_BYTES, 1)
OTHER, _ = shard_file(HEADER, payload(SIZE, seed=2))
"""A complete shard file with the same header and another payload."""


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(0, id="the whole file became another shard"),
        pytest.param(trailer_offset(HEADER), id="the trailer became that of another shard"),
    ],
)
def test_a_file_that_changed_after_it_was_opened_does_not_verify(
    tier: DiskNodeTier, start: int
) -> None:
    """Each of the two is valid on its own: the payload matches one trailer and not the other."""
    record = written(tier, seed=1)
    with tier.open_shard(record.ref) as reader:
        reader.verify()
        with tier.shard_path(record.ref).open("r+b") as file:
            file.seek(start)
            file.write(OTHER[start:])
        with pytest.raises(CorruptionError):
            reader.verify()


@pytest.mark.parametrize("chunk", range(SIZE // BLOCK_BYTES))
def test_a_flipped_bit_of_a_chunk_is_not_restored(tier: DiskNodeTier, chunk: int) -> None:
    record = written(tier, seed=1)
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with tier.open_shard(record.ref) as reader:
        place = reader.payload_start + chunk * BLOCK_BYTES + 100
        with tier.shard_path(record.ref).open("r+b") as file:
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1]))
        for other in range(SIZE // BLOCK_BYTES):
            if other != chunk:
                reader.read_payload_into(other * BLOCK_BYTES, buffer)
        with pytest.raises(CorruptionError, match=f"chunk {chunk} "):
            reader.read_payload_into(chunk * BLOCK_BYTES, buffer)


def test_the_read_back_of_a_save_finds_two_blocks_in_each_others_places(tier: DiskNodeTier) -> None:
    """A disk that writes a block to the wrong place reports success."""
    record = written(tier, seed=1)
    with tier.open_shard(record.ref) as reader:
        table, start = reader.table, reader.payload_start
    with tier.shard_path(record.ref).open("r+b") as file:
        read_back(file.fileno(), record, table, range(3), BUFFERS)
        file.seek(start)
        first, second = file.read(BLOCK_BYTES), file.read(BLOCK_BYTES)
        file.seek(start)
        file.write(second + first)
        file.flush()
        read_back(file.fileno(), record, table, range(2, 3), BUFFERS)
        for chunk in (0, 1):
            with pytest.raises(PoisonedError, match=f"chunk {chunk} differs"):
                read_back(file.fileno(), record, table, range(chunk, chunk + 1), BUFFERS)


@pytest.mark.parametrize("chunks", [1, 63, 64, 65, 1000])
def test_each_chunk_is_read_back_at_the_first_write_and_within_64_further_ones(chunks: int) -> None:
    assert to_read_back(0, chunks) == range(chunks)
    read = [chunk for written in range(7, 7 + 64) for chunk in to_read_back(written, chunks)]
    assert sorted(read) == list(range(chunks))


class Held:
    """A payload whose first read waits until a second writer reads its own, or waits for the first writer."""

    def __init__(self, seed: int) -> None:
        self.source = BytesSource(payload(SIZE, seed=seed))
        self.begun = threading.Event()
        self.other: Held | None = None

    def read_into(self, offset: int, buffer: memoryview) -> None:
        first = not self.begun.is_set()
        self.begun.set()
        if first and self.other is not None:
            assert self.other.begun.wait(HANG_SECONDS)
        self.source.read_into(offset, buffer)

    def verified(self, byte_count: int) -> None:
        self.source.verified(byte_count)


class ObservedLock:
    """A lock that sets the event when a second thread is about to wait for it."""

    def __init__(self, awaited: threading.Event) -> None:
        self._lock = threading.Lock()
        self._awaited = awaited

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._awaited.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_one_of_two_writers_of_the_same_identity_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two payloads of one step and rank would make two checkpoints of one step."""
    first, second = Held(1), Held(2)
    first.other = second
    locks = SimpleNamespace(Lock=lambda: ObservedLock(second.begun))
    monkeypatch.setattr("holdfast_core.node.tier.threading", locks)
    tier = opened(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        winner = threads.submit(tier.write_shard, HEADER, first)
        assert first.begun.wait(HANG_SECONDS)
        late = threads.submit(tier.write_shard, HEADER, second)
        record = winner.result(HANG_SECONDS)
        with pytest.raises(AlreadyExistsError):
            late.result(HANG_SECONDS)
    assert tier.list_shards() == (record,)
