"""Ranges of a shard in a real store: only the requested bytes are fetched, and all bytes are verified."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.servers.hostile_s3 import (
    Answer,
    CutReply,
    FlipReply,
    Hang,
    HostileProxy,
    Matches,
    Seen,
    on,
)
from tests.support.shards.builders import shard_header
from tests.support.shards.shard_files import file_span, write_shard

from holdfast_core.errors import (
    AccessDeniedError,
    CorruptionError,
    NotFoundError,
    UnavailableError,
)
from holdfast_core.ids import CheckpointId, ShardRef
from holdfast_core.node.shard_file import DiskShardReader
from holdfast_core.shards.file import trailer_bytes
from holdfast_core.store.tier import ObjectTier

pytestmark = pytest.mark.integration
NAMESPACE = "team-a"
CHUNK = 64 << 10
CHUNKS = 60
RUNS = [range(2, 5), range(7, 8), range(20, 41), range(58, CHUNKS)]
FOREVER = 1000
GET = on("GET", query="")


@dataclass
class Bench:
    honest: ObjectTier
    tier: ObjectTier
    proxy: HostileProxy
    reader: DiskShardReader
    data: bytes

    @property
    def ref(self) -> ShardRef:
        return self.reader.record.ref

    def bytes_of(self, chunks: range) -> bytes:
        return self.data[chunks.start * CHUNK : chunks.stop * CHUNK]

    def range_of(self, chunks: range) -> str:
        span = file_span(self.reader.record.header, chunks)
        return f"bytes={span.start}-{span.stop - 1}"

    def of_run(self, chunks: range) -> Matches:
        def matches(seen: Seen) -> bool:
            return seen.method == "GET" and seen.headers.get("range") == self.range_of(chunks)

        return matches

    def ranges(self) -> list[str]:
        return [s.headers["range"] for s in self.proxy.requests if s.method == "GET"]

    def read(self, runs: list[range]) -> list[bytes]:
        with self.tier.open_shard(NAMESPACE, self.ref) as source:
            return [bytes(view) for view in source.read(runs)]


@pytest.fixture
def bench(
    tmp_path: Path,
    tier: ObjectTier,
    proxied: ObjectTier,
    proxy: HostileProxy,
) -> Iterator[Bench]:
    data = os.urandom((CHUNKS - 1) * CHUNK + 100)
    header = shard_header(len(data), chunk_bytes=CHUNK)
    with write_shard(tmp_path, header, data) as reader:
        tier.upload_shard(NAMESPACE, reader)
        yield Bench(tier, proxied, proxy, reader, data)


def test_only_what_is_asked_for_is_fetched(bench: Bench) -> None:
    with bench.tier.open_shard(NAMESPACE, bench.ref) as source:
        assert source.trailer.record == bench.reader.record
        assert source.trailer.table == bench.reader.table
        assert [bytes(view) for view in source.read(RUNS)] == [bench.bytes_of(r) for r in RUNS]
        assert [bytes(view) for view in source.read(RUNS[1:2])] == [bench.bytes_of(RUNS[1])]
    tail, *runs = bench.ranges()
    first, last = map(int, tail.removeprefix("bytes=").split("-"))
    file_bytes = bench.reader.record.file_bytes
    assert last == file_bytes - 1
    assert trailer_bytes(bench.reader.record.header) <= file_bytes - first <= 4 * 4096
    expected = [bench.range_of(run) for run in (*RUNS, RUNS[1])]
    assert sorted(runs) == sorted(expected), "one request a run"


@pytest.mark.parametrize(
    "action",
    [Answer(503, "SlowDown"), CutReply(1000), CutReply(1000, lying=True), Hang()],
    ids=["503", "cut", "cut and lying", "silence"],
)
def test_a_range_gets_over_it(bench: Bench, action: Answer | CutReply | Hang) -> None:
    fault = bench.proxy.add(bench.of_run(RUNS[2]), action)
    assert bench.read(RUNS) == [bench.bytes_of(run) for run in RUNS]
    assert fault.applied == 1


def test_a_bit_that_flipped_on_the_way_is_asked_for_again_alone(bench: Bench) -> None:
    bench.proxy.add(bench.of_run(RUNS[2]), FlipReply(3 * CHUNK + 5))
    assert bench.read(RUNS) == [bench.bytes_of(run) for run in RUNS]
    assert bench.ranges().count(bench.range_of(range(23, 24))) == 1


def test_a_chunk_that_is_wrong_twice_is_corrupt_and_what_came_before_is_good(bench: Bench) -> None:
    bench.proxy.add(bench.of_run(RUNS[2]), FlipReply(3 * CHUNK + 5), FOREVER)
    bench.proxy.add(bench.of_run(range(23, 24)), FlipReply(5), FOREVER)
    with bench.tier.open_shard(NAMESPACE, bench.ref) as source:
        views = source.read(RUNS)
        assert [bytes(view) for view in itertools.islice(views, 2)] == [
            bench.bytes_of(run) for run in RUNS[:2]
        ]
        with pytest.raises(CorruptionError, match=r"chunks \[23\] do not match"):
            next(views)


def test_a_trailer_that_is_wrong_twice_is_corrupt(bench: Bench) -> None:
    bench.proxy.add(GET, FlipReply(-60), FOREVER)
    with pytest.raises(CorruptionError):
        bench.tier.open_shard(NAMESPACE, bench.ref)


def test_a_store_that_is_down_is_given_up(bench: Bench) -> None:
    with bench.tier.open_shard(NAMESPACE, bench.ref) as source:
        bench.proxy.add(GET, Answer(503, "SlowDown"), FOREVER)
        with pytest.raises(UnavailableError, match="given up after 5"):
            list(source.read(RUNS))


def test_a_shard_that_is_deleted_in_the_middle_is_not_found(bench: Bench) -> None:
    with bench.tier.open_shard(NAMESPACE, bench.ref) as source:
        assert [bytes(view) for view in source.read(RUNS[:1])] == [bench.bytes_of(RUNS[0])]
        bench.honest.delete_checkpoint(
            NAMESPACE, bench.ref.job_uid, CheckpointId(bench.ref.step, bench.ref.round)
        )
        with pytest.raises(NotFoundError):
            list(source.read(RUNS))


def test_a_reader_that_stops_asks_for_nothing_more(bench: Bench) -> None:
    with bench.tier.open_shard(NAMESPACE, bench.ref) as source:
        views = source.read(range(i, i + 1) for i in range(CHUNKS))
        assert bytes(next(views)) == bench.bytes_of(range(1))
        views.close()
        before = bench.proxy.count(GET)
        bench.honest.list_manifests(NAMESPACE, bench.ref.job_uid)
        assert bench.proxy.count(GET) == before
        assert [bytes(view) for view in source.read(RUNS)] == [bench.bytes_of(r) for r in RUNS]


def test_who_may_not_read_is_told(bench: Bench) -> None:
    bench.proxy.add(GET, Answer(403, "AccessDenied"), FOREVER)
    with pytest.raises(AccessDeniedError):
        bench.tier.open_shard(NAMESPACE, bench.ref)


def test_what_is_not_there(bench: Bench) -> None:
    with pytest.raises(NotFoundError, match="no such shard"):
        bench.tier.open_shard("team-b", bench.ref)
