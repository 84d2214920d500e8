"""A payload that is larger than its ring of slots arrives in segments and is read by one writer."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.errors import FormatError, RefusedError, UnavailableError
from holdfast_core.format.digest import digest_of
from holdfast_core.ids import Rank, RestartRound, Step
from holdfast_core.messages.schema import Segment, Stage, StageSegment
from holdfast_core.shm.slot_file import SlotFile
from holdfast_core.shm.slot_header import HEADER_BYTES, SlotHeader, SlotState, slot_name
from holdfast_core.shm.slot_stream import SegmentStream

RANK = Rank(3)
ROUND = RestartRound(1)
CAPACITY = 4096
LAYOUT = digest_of(b"layout")


class Ring:
    """The rank's side: slot files, each of which is filled when it is FREE."""

    def __init__(self, directory: Path, payload: bytes, slots: int) -> None:
        self.directory = directory
        self.payload = payload
        self.names = [slot_name(RANK, index) for index in range(slots)]
        for name in self.names:
            with (directory / name).open("wb") as file:
                file.write(SlotHeader(SlotState.FREE, RANK, CAPACITY).pack())
                file.truncate(HEADER_BYTES + CAPACITY)

    def message(self, name: str, start: int, stop: int, step: int = 7) -> StageSegment:
        stage = Stage(ROUND, Step(step), RANK, name, len(self.payload), LAYOUT)
        return StageSegment(stage, Segment(start, stop))

    def fill(self, name: str, start: int, stop: int) -> StageSegment:
        header = SlotHeader(SlotState.FULL, RANK, CAPACITY, ROUND, Step(7), stop - start)
        with (self.directory / name).open("r+b") as file:
            file.seek(HEADER_BYTES)
            file.write(self.payload[start:stop])
            file.flush()
            file.seek(0)
            file.write(header.pack())
        return self.message(name, start, stop)

    def open(self, name: str) -> SlotFile:
        return SlotFile.open(self.directory, name)

    def state(self, name: str) -> SlotState:
        with (self.directory / name).open("rb") as file:
            return SlotHeader.unpack(file.read(HEADER_BYTES)).state

    def states(self) -> set[SlotState]:
        return {self.state(name) for name in self.names}

    def hand_over(self, stream: SegmentStream, sizes: list[int]) -> None:
        """Send the payload in segments of these sizes, the last one as often as needed."""
        start = 0
        number = 0
        while start < len(self.payload):
            size = sizes[min(number, len(sizes) - 1)]
            name = self.names[number % len(self.names)]
            while self.state(name) is not SlotState.FREE:
                os.sched_yield()
            stop = min(start + size, len(self.payload))
            stream.add(self.open(name), self.fill(name, start, stop))
            start, number = stop, number + 1


def read_all(stream: SegmentStream, payload_bytes: int, buffer_bytes: int) -> bytes:
    found = bytearray()
    while len(found) < payload_bytes:
        buffer = bytearray(min(buffer_bytes, payload_bytes - len(found)))
        stream.read_into(len(found), memoryview(buffer))
        found += buffer
    return bytes(found)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring(tmp_path, bytes(range(256)) * 48, 3)


def stream_of(ring: Ring) -> SegmentStream:
    return SegmentStream(ring.message(ring.names[0], 0, 1).stage, "a connection")


@given(
    payload=st.binary(min_size=1, max_size=40_000),
    sizes=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=8),
    slots=st.integers(1, 4),
    buffer_bytes=st.integers(1, 9_000),
)
def test_every_payload_passes_through_every_ring(
    payload: bytes, sizes: list[int], slots: int, buffer_bytes: int
) -> None:
    sizes = [max(size, len(payload) // 50) for size in sizes]
    before = open_files()
    with TemporaryDirectory() as folder:
        ring = Ring(Path(folder), payload, slots)
        stream = stream_of(ring)
        with ThreadPoolExecutor(1) as thread:
            reading = thread.submit(read_all, stream, len(payload), buffer_bytes)
            ring.hand_over(stream, sizes)
            assert reading.result() == payload
        assert stream.is_complete
        assert ring.states() == {SlotState.FREE}
    assert open_files() == before


@given(read_bytes=st.integers(0, 6 * 1024), handed_over=st.integers(0, 3))
def test_a_stream_that_stops_anywhere_leaves_nothing(read_bytes: int, handed_over: int) -> None:
    before = open_files()
    with TemporaryDirectory() as folder:
        ring = Ring(Path(folder), bytes(12 * 1024), 3)
        stream = stream_of(ring)
        for number in range(handed_over):
            name = ring.names[number]
            stream.add(ring.open(name), ring.fill(name, 2048 * number, 2048 * (number + 1)))
        stream.read_into(0, memoryview(bytearray(min(read_bytes, 2048 * handed_over))))
        stream.stop("the rank has ended")
        assert ring.states() == {SlotState.FREE}
        with pytest.raises(UnavailableError, match="the rank has ended"):
            stream.read_into(stream.bytes_read, memoryview(bytearray(1)))
        name = ring.names[0]
        slot = ring.open(name)
        with pytest.raises(RefusedError, match="the rank has ended"):
            stream.add(slot, ring.fill(name, 2048 * handed_over, 2048 * (handed_over + 1)))
        slot.close()
        assert ring.state(name) is SlotState.FULL, "a slot that was refused is left alone"
    assert open_files() == before


def test_a_waiting_reader_ends_with_its_stream(ring: Ring) -> None:
    stream = stream_of(ring)
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read_all, stream, 1, 1)
        stream.stop_unless_complete("the round was sealed")
        with pytest.raises(UnavailableError, match="the round was sealed"):
            reading.result(60)


def test_a_slot_that_is_being_read_is_freed_by_its_reader(ring: Ring) -> None:
    """Otherwise the rank could write into it while the last bytes are read."""
    reads, goes_on = threading.Event(), threading.Event()

    def wait(byte_count: int) -> None:
        reads.set()
        assert goes_on.wait(60)

    stream = stream_of(ring)
    first = ring.open(ring.names[0])
    first.throttle = wait
    stream.add(first, ring.fill(ring.names[0], 0, 4096))
    second = ring.open(ring.names[1])
    stream.add(second, ring.fill(ring.names[1], 4096, 8192))
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read_all, stream, 8192, 4096)
        assert reads.wait(60)
        stream.stop("the rank has ended")
        assert stream.holds(ring.names[0])
        assert [ring.state(name) for name in ring.names[:2]] == [SlotState.OWNED, SlotState.FREE]
        goes_on.set()
        with pytest.raises(UnavailableError):
            reading.result(60)
    assert not stream.holds(ring.names[0])
    assert ring.states() == {SlotState.FREE}


def test_bytes_that_were_read_cannot_be_read_again(ring: Ring) -> None:
    stream = stream_of(ring)
    stream.add(ring.open(ring.names[0]), ring.fill(ring.names[0], 0, 4096))
    stream.read_into(0, memoryview(bytearray(4096)))
    stream.bytes_read = 0  # as those who watch a write's progress do before it is written again
    assert not stream.can_be_read_again
    with pytest.raises(UnavailableError, match="not in memory any more"):
        stream.read_into(0, memoryview(bytearray(1)))


@pytest.mark.parametrize(
    ("start", "stop", "step", "error"),
    [
        pytest.param(4096, 8192, 7, RefusedError, id="not the next one"),
        pytest.param(0, 4096, 8, FormatError, id="another step"),
        pytest.param(0, 2048, 7, FormatError, id="another length"),
        pytest.param(0, 0, 7, FormatError, id="empty"),
    ],
)
def test_a_segment_that_does_not_fit_is_refused(
    ring: Ring, start: int, stop: int, step: int, error: type[Exception]
) -> None:
    stream, name = stream_of(ring), ring.names[0]
    ring.fill(name, 0, 4096)
    slot = ring.open(name)
    with pytest.raises(error):
        stream.add(slot, ring.message(name, start, stop, step))
    assert ring.state(name) is SlotState.FULL
    slot.close()
