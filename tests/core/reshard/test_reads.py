"""Reads of whole chunks cover everything that is needed, nothing twice, and few other bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.shards.placements import bytes_read, layout_of, plan, shards_of, transformer

from holdfast_core.ids import Rank
from holdfast_core.reshard.plan import Move, by_source, reads_of
from holdfast_core.shards.file import CHUNK_BYTES

CHUNK = 8
VOCABULARY = 128256
"""Rows of the largest tensor. Tests with cut columns use fewer, because each row of each is a separate
read."""


@st.composite
def payload_and_moves(draw: st.DrawFn) -> tuple[int, list[Move]]:
    cuts = sorted(draw(st.sets(st.integers(0, 200), min_size=2, max_size=20)))
    payload_bytes = cuts[-1] + draw(st.integers(0, 9))
    moves = [
        Move(Rank(0), a, b - a, 1000 * a)
        for a, b in itertools.pairwise(cuts)
        if draw(st.booleans())
    ]
    return payload_bytes, moves


@given(payload_and_moves(), st.sampled_from([1, CHUNK, 3 * CHUNK, 1000]))
def test_reads_bring_every_byte_once(case: tuple[int, list[Move]], limit: int) -> None:
    check_reads(*case, limit)


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 30), st.integers(0, 9))
def test_rows_within_each_others_rows_are_merged(a: int, gap: int, rows: int, b: int) -> None:
    step = a + gap + b + 1
    moves = [Move(Rank(0), 3, a, 10_000, rows, step, a)]
    if b:
        moves.append(Move(Rank(0), 3 + a + gap, b, 20_000, rows, step, b))
    moves.append(Move(Rank(0), 3 + rows * step, 5, 30_000))
    check_reads(3 + rows * step + 11, moves, 3 * CHUNK)


def check_reads(payload_bytes: int, moves: list[Move], limit: int) -> None:
    needed = {
        move.start + row * move.start_step + i: move.target + row * move.target_step + i
        for move in moves
        for row in range(move.times)
        for i in range(move.length_bytes)
    }
    brought: dict[int, int] = {}
    stop = 0
    for read in reads_of(moves, payload_bytes, CHUNK, limit):
        assert read.span.start % CHUNK == 0
        assert read.span.stop % CHUNK == 0 or read.span.stop == payload_bytes
        assert 0 < read.span.length_bytes <= max(limit, CHUNK)
        assert read.span.start >= stop, "a chunk is read once"
        stop = read.span.stop
        for piece in read.pieces:
            assert piece.start >= 0
            assert piece.start + piece.length_bytes <= read.span.length_bytes
            for i in range(piece.length_bytes):
                assert read.span.start + piece.start + i not in brought
                brought[read.span.start + piece.start + i] = piece.target + i
    assert brought == needed
    touched = {position // CHUNK for position in needed}
    whole = sum(min(CHUNK, payload_bytes - chunk * CHUNK) for chunk in touched)
    assert bytes_read(moves, [payload_bytes], CHUNK) == whole


def test_moves_are_grouped_by_source_in_order() -> None:
    moves = [Move(Rank(1), 9, 1, 0), Move(Rank(0), 5, 1, 1), Move(Rank(1), 2, 1, 2)]
    assert by_source(moves) == {
        0: [Move(Rank(0), 5, 1, 1)],
        1: [Move(Rank(1), 2, 1, 2), Move(Rank(1), 9, 1, 0)],
    }


@pytest.mark.parametrize(
    ("old", "before", "new", "after", "text"),
    [
        pytest.param(8, [0], 6, [0], VOCABULARY, id="rows 8 to 6"),
        pytest.param(6, [0], 8, [0], VOCABULARY, id="rows 6 to 8"),
        pytest.param(8, [0], 4, [0], VOCABULARY, id="rows 8 to 4"),
        pytest.param(1, None, 4, [0], VOCABULARY, id="1 to 4"),
        pytest.param(8, None, 6, None, VOCABULARY, id="replicated 8 to 6"),
        pytest.param(4, [1], 2, [1], VOCABULARY // 16, id="columns 4 to 2"),
    ],
)
def test_little_is_read_besides_what_is_needed(
    old: int,
    before: list[int | None] | None,
    new: int,
    after: list[int | None] | None,
    text: int,
) -> None:
    """At most 1.1 bytes are read for every byte needed, on every rank, with the chunk sizes of real
    shards."""
    saved = [layout_of(transformer(4, before, text), [old], rank) for rank in range(old)]
    shards, sizes = shards_of(saved), [layout.payload_bytes for layout in saved]
    for rank in range(new):
        wanted = layout_of(transformer(4, after, text), [new], rank)
        moves = plan(wanted, new, shards, saved.__getitem__)
        needed = sum(move.total_bytes for move in moves)
        assert bytes_read(moves, sizes, CHUNK_BYTES) <= 1.1 * needed
