"""Which chunks of a shard other shards contain already."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.support.shards.builders import JOB_UID, payload, shard_file, shard_header

from holdfast_core.ids import ShardRef
from holdfast_core.peer.store import MAX_SOURCES, equal_runs, likely_sources
from holdfast_core.shards.file import ChunkTable
from holdfast_core.store.download.shard import EqualRun


def table(text: str) -> ChunkTable:
    """Return a chunk table with one chunk for each letter."""
    return ChunkTable(tuple(map(ord, text)), b"".join(letter.encode() * 32 for letter in text))


def ref(step: int = 10, rank: int = 0) -> ShardRef:
    return shard_file(shard_header(100, step=step, rank=rank), payload(100))[1].ref


A, B = ref(rank=1), ref(rank=2)


def runs(ours: str, *others: str, limit: int = 100) -> list[tuple[int, int, int]]:
    sources = [(r, table(text)) for r, text in zip((A, B), others, strict=False)]
    found = equal_runs(table(ours), sources, limit)
    return [(run.chunks.start, run.chunks.stop, int(run.source.rank)) for run in found]


def test_equal_chunks_are_found_where_they_lie() -> None:
    assert runs("abcdef", "abcdef") == [(0, 6, 1)]
    assert runs("abcdef", "xbcxef") == [(1, 3, 1), (4, 6, 1)]
    assert runs("abcdef", "bcdefa") == []
    assert runs("abcdef", "abc") == [(0, 3, 1)]
    assert runs("abc", "abcdef") == [(0, 3, 1)]
    assert runs("", "abc") == []


def test_an_earlier_source_wins_and_a_later_one_fills_the_holes() -> None:
    assert runs("abcdef", "abxxef", "abcxxx") == [(0, 2, 1), (2, 3, 2), (4, 6, 1)]


def test_the_longest_runs_are_kept_when_there_are_too_many() -> None:
    assert runs("abcdefgh", "axcxefgx", limit=2) == [(0, 1, 1), (4, 7, 1)]


@given(st.text("ab", max_size=40), st.lists(st.text("ab", max_size=40), max_size=2))
def test_runs_are_exactly_the_chunks_that_are_equal(ours: str, others: list[str]) -> None:
    sources = [(r, table(text)) for r, text in zip((A, B), others, strict=False)]
    found = equal_runs(table(ours), sources, 1000)
    covered = [chunk for run in found for chunk in run.chunks]
    assert covered == sorted(set(covered))
    texts = dict(zip((A, B), others, strict=False))
    assert all(texts[run.source][chunk] == ours[chunk] for run in found for chunk in run.chunks)
    equal = {
        i for text in others for i, (x, y) in enumerate(zip(ours, text, strict=False)) if x == y
    }
    assert set(covered) == equal


def test_likely_are_the_same_checkpoint_and_the_rank_before() -> None:
    def record(step: int, rank: int, **fields: object) -> object:
        return shard_file(shard_header(100, step=step, rank=rank, **fields), payload(100))[1]  # type: ignore[arg-type]

    wanted = ref(step=20, rank=1)
    records = [record(20, 2), record(10, 1), record(15, 1), record(15, 2), record(20, 0)]
    found = likely_sources(records, wanted)  # type: ignore[arg-type]
    assert [(r.step, r.rank) for r in found] == [(20, 0), (20, 2), (15, 1)]
    assert all(r.job_uid == JOB_UID for r in found)


def test_so_many_are_compared_and_no_more() -> None:
    layout = ref().blake3
    header = [shard_header(100, step=20, rank=r, world_size=40, layout=layout) for r in range(40)]
    records = [shard_file(h, payload(100))[1] for h in header]
    assert len(likely_sources(records, ref(step=20, rank=1))) == MAX_SOURCES - 1


def test_a_run_names_its_source() -> None:
    assert equal_runs(table("ab"), [(A, table("ab"))], 9) == (EqualRun(range(2), A),)
