"""How a shard file is cut into frames."""

from __future__ import annotations

import pytest
from tests.support.shards.builders import payload, shard_file, shard_header

from holdfast_core.errors import FormatError
from holdfast_core.ids import ByteRange
from holdfast_core.peer.data import pieces, spans_without
from holdfast_core.peer.protocol import MAX_DATA_BYTES
from holdfast_core.shards.file import head_bytes
from holdfast_core.shards.record import ShardRecord

MIB = 1 << 20


def record_of(size: int, chunk_bytes: int) -> ShardRecord:
    return shard_file(shard_header(size, chunk_bytes=chunk_bytes), payload(size))[1]


@pytest.mark.parametrize(
    ("size", "chunk_bytes", "start", "expected"),
    [
        # (start, stop, chunks), counted from the payload's first byte; the head is 4096 bytes.
        (0, 4 * MIB, 0, [(-4096, 0, ()), (0, 4096, ())]),
        (10, 4 * MIB, 0, [(-4096, 0, ()), (0, 10, (0,)), (10, 8192, ())]),
        (
            9 * MIB,
            4 * MIB,
            0,
            [
                (-4096, 0, ()),
                (0, 4 * MIB, (0,)),
                (4 * MIB, 8 * MIB, (1,)),
                (8 * MIB, 9 * MIB, (2,)),
                (9 * MIB, 9 * MIB + 4096, ()),
            ],
        ),
        (
            6 * MIB,
            8 * MIB,
            0,
            [
                (-4096, 0, ()),
                (0, 4 * MIB, ()),
                (4 * MIB, 6 * MIB, ()),
                (6 * MIB, 6 * MIB + 4096, ()),
            ],
        ),
        # A range that begins within a chunk goes to the end of the chunk; whole chunks follow.
        (8 * MIB, 4 * MIB, 4096 + MIB, [(MIB, 4 * MIB, ()), (4 * MIB, 8 * MIB, (1,))]),
        (
            6 * MIB + 1,
            MIB,
            0,
            [
                (-4096, 0, ()),
                (0, 4 * MIB, (0, 1, 2, 3)),
                (4 * MIB, 6 * MIB + 1, (4, 5, 6)),
                (6 * MIB + 1, 6 * MIB + 8192, ()),
            ],
        ),
        # The frames have 3 MiB each, because a frame contains whole chunks only.
        (7 * MIB, 3 * MIB, 0, [(-4096, 0, ()), (0, 3 * MIB, (0,)), (3 * MIB, 6 * MIB, (1,))]),
    ],
    ids=[
        "empty",
        "tiny",
        "chunks",
        "chunks larger than frames",
        "from within a chunk",
        "several",
        "not a divisor",
    ],
)
def test_a_file_is_cut_at_its_chunks(
    size: int, chunk_bytes: int, start: int, expected: list[tuple[int, int, tuple[int, ...]]]
) -> None:
    record = record_of(size, chunk_bytes)
    first = head_bytes(record.header)
    assert first == 4096
    found = [
        (p.span.start - first, p.span.stop - first, tuple(p.chunks))
        for p in pieces(record, ByteRange(start, record.file_bytes))
    ]
    assert found[: len(expected)] == expected
    assert found[-1][1] + first == record.file_bytes


@pytest.mark.parametrize("start", [0, 1, 4095, 4096, 5000, 12 * MIB + 7])
@pytest.mark.parametrize("chunk_bytes", [4096, 12288, 4 * MIB, 12 * MIB])
def test_every_byte_travels_once(start: int, chunk_bytes: int) -> None:
    record = record_of(13 * MIB + 5, chunk_bytes)
    position = start
    for piece in pieces(record, ByteRange(start, record.file_bytes)):
        assert piece.span.start == position
        assert 0 < piece.span.length_bytes <= MAX_DATA_BYTES
        position = piece.span.stop
    assert position == record.file_bytes
    assert list(pieces(record, ByteRange(record.file_bytes, record.file_bytes))) == []


@pytest.mark.parametrize(
    ("start", "have", "expected"),
    [
        (0, [], [(-4096, None)]),
        (0, [range(0, 2)], [(-4096, 0), (8192, None)]),
        (0, [range(1, 2), range(3, 4)], [(-4096, 4096), (8192, 12288), (16384, None)]),
        (4096 + 8192, [range(2, 3)], [(12288, None)]),
        (4096 + 4096, [range(2, 4)], [(4096, 8192), (16384, None)]),
        (0, [range(3, 5)], [(-4096, 12288), (17000, None)]),
    ],
    ids=["nothing", "first", "holes", "at once", "from within", "last"],
)
def test_what_the_receiver_has_is_left_out(
    start: int, have: list[range], expected: list[tuple[int, int | None]]
) -> None:
    record = record_of(17_000, 4096)
    found = [(s.start - 4096, s.stop) for s in spans_without(record, start, have)]
    assert found == [
        (first, record.file_bytes if last is None else last + 4096) for first, last in expected
    ]


@pytest.mark.parametrize("run", [range(4, 6), range(5, 6), range(3, 3)], ids=str)
def test_chunks_that_are_not_there_cannot_be_left_out(run: range) -> None:
    with pytest.raises(FormatError, match="no chunks"):
        list(spans_without(record_of(17_000, 4096), 0, [run]))
