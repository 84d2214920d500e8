"""A shard is copied segment by segment, and each chunk of a segment is verified."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.shards.builders import BytesSource, shard_header

from holdfast_core.errors import CorruptionError, FormatError
from holdfast_core.messages.schema import Segment
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.file import head_bytes
from holdfast_core.shards.record import CHUNK_BYTES, ShardRecord
from holdfast_core.shm.slot_fill import copy_segment
from holdfast_core.shm.slot_header import SlotHeader, SlotState

PAYLOAD = b"".join(bytes([n]) * CHUNK_BYTES for n in range(40)) + b"the end"


class Target:
    """A slot in private memory."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.state = SlotState.FREE

    def header(self) -> SlotHeader:
        return SlotHeader(self.state, shard_header(1).rank, len(PAYLOAD))

    def write_header(self, header: SlotHeader) -> None:
        self.state = header.state
        assert header.step is None, "a segment is not a shard"

    def write_payload(self, offset: int, data: memoryview) -> None:
        assert offset == len(self.data)
        self.data += data


@pytest.fixture
def node(tmp_path: Path) -> DiskNodeTier:
    tier = DiskNodeTier(tmp_path / "node")
    tier.open()
    return tier


@pytest.fixture
def record(node: DiskNodeTier) -> ShardRecord:
    return node.write_shard(shard_header(len(PAYLOAD)), BytesSource(PAYLOAD))


@pytest.mark.parametrize("chunks", [1, 7, 16, 17, 41])
def test_the_segments_of_a_shard_are_its_payload(
    node: DiskNodeTier, record: ShardRecord, chunks: int
) -> None:
    found = bytearray()
    size = chunks * CHUNK_BYTES
    with node.open_shard(record.ref) as reader:
        for start in range(0, len(PAYLOAD), size):
            target = Target()
            stop = min(start + size, len(PAYLOAD))
            copy_segment(reader, len(PAYLOAD), Segment(start, stop), target)
            assert target.state is SlotState.FREE
            found += target.data
    assert found == PAYLOAD


@pytest.mark.parametrize("chunk", [16, 20, 40])
def test_a_bad_chunk_is_found_in_its_segment(
    node: DiskNodeTier, record: ShardRecord, chunk: int
) -> None:
    with node.shard_path(record.ref).open("r+b") as file:
        file.seek(head_bytes(record.header) + chunk * CHUNK_BYTES + 5)
        file.write(b"x")
    with node.open_shard(record.ref) as reader:
        copy_segment(reader, len(PAYLOAD), Segment(0, 16 * CHUNK_BYTES), Target())
        target = Target()
        with pytest.raises(CorruptionError, match=f"chunk {chunk} does not match"):
            copy_segment(reader, len(PAYLOAD), Segment(16 * CHUNK_BYTES, len(PAYLOAD)), target)
        assert target.state is SlotState.FILLING, "what it holds is not offered as good bytes"


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        pytest.param(1, CHUNK_BYTES, id="starts within a chunk"),
        pytest.param(0, CHUNK_BYTES + 1, id="stops within a chunk"),
        pytest.param(0, len(PAYLOAD) + 1, id="beyond the end"),
        pytest.param(CHUNK_BYTES, CHUNK_BYTES, id="empty"),
    ],
)
def test_a_segment_that_is_not_of_whole_chunks_is_refused(
    node: DiskNodeTier, record: ShardRecord, start: int, stop: int
) -> None:
    with node.open_shard(record.ref) as reader, pytest.raises(FormatError, match="whole chunks"):
        copy_segment(reader, len(PAYLOAD), Segment(start, stop), Target())
