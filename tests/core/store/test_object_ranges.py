"""Pieces of a shard file: without a gap, each with the checksums of its bytes."""

from __future__ import annotations

import os

import pytest
from tests.support.shards.builders import shard_file, shard_header

from holdfast_core.format.digest import crc32c
from holdfast_core.shards.file import Trailer, trailer_offset, unpack_trailer
from holdfast_core.store.download.ranges import longest_piece, plan_pieces

CHUNK = 65_536


def shard(payload_bytes: int) -> tuple[bytes, Trailer]:
    header = shard_header(payload_bytes, chunk_bytes=CHUNK)
    data, _ = shard_file(header, os.urandom(payload_bytes))
    return data, unpack_trailer(data[trailer_offset(header) :])


@pytest.mark.parametrize("piece_bytes", [1, CHUNK, 3 * CHUNK, 1 << 30])
@pytest.mark.parametrize("payload", [0, 1, 4096, CHUNK, CHUNK + 1, 5 * CHUNK, 7 * CHUNK - 3])
def test_pieces_cover_everything_before_the_trailer(payload: int, piece_bytes: int) -> None:
    data, trailer = shard(payload)
    position = 0
    for piece in plan_pieces(trailer, piece_bytes):
        assert piece.span.start == position
        assert piece.span.length_bytes <= longest_piece(trailer, piece_bytes)
        for segment in piece.segments:
            assert segment.span.start == position
            assert crc32c(data[position : segment.span.stop]) == segment.crc32c
            position = segment.span.stop
    assert position == trailer_offset(trailer.record.header)


@pytest.mark.parametrize(
    ("piece_bytes", "spans"),
    [
        (1, [(0, 4096), (4096, 69_632), (69_632, 135_168), (135_168, 135_268), (135_268, 139_264)]),
        (2 * CHUNK, [(0, 69_632), (69_632, 139_264)]),
        (1 << 30, [(0, 139_264)]),
    ],
    ids=["one-segment-each", "two-chunks", "all"],
)
def test_spans(piece_bytes: int, spans: list[tuple[int, int]]) -> None:
    _, trailer = shard(2 * CHUNK + 100)
    found = [(p.span.start, p.span.stop) for p in plan_pieces(trailer, piece_bytes)]
    assert found == spans
