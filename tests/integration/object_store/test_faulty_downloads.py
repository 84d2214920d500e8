"""Downloads from a store that fails and returns wrong bytes."""

from __future__ import annotations

import pytest
from tests.support.servers.hostile_s3 import (
    Action,
    Answer,
    CutReply,
    FlipReply,
    Hang,
    LoseReply,
    Matches,
    Replace,
    SetReplyHeader,
)
from tests.support.shards.builders import JOB_UID
from tests.support.tiers.store_bench import (
    FIRST_RUN,
    FOREVER,
    GET,
    HEAD,
    MIB,
    NAMESPACE,
    Bench,
    asks_for_byte,
)

from holdfast_core.errors import (
    AccessDeniedError,
    CorruptionError,
    UnavailableError,
)

pytestmark = pytest.mark.integration


READS: list[tuple[str, Matches, Action]] = [
    ("404-on-head", HEAD, Answer(404)),
    ("503", GET, Answer(503, "SlowDown")),
    ("503-in-the-middle", FIRST_RUN, Answer(503, "SlowDown")),
    ("cut-trailer", GET, CutReply(1000)),
    ("cut", FIRST_RUN, CutReply(3 * MIB)),
    ("cut-and-lying", FIRST_RUN, CutReply(3 * MIB, lying=True)),
    ("reset-before-a-byte", FIRST_RUN, LoseReply()),
    ("silence", FIRST_RUN, Hang()),
    ("200-instead-of-206", FIRST_RUN, Replace(200, b"everything")),
    ("other-range", FIRST_RUN, SetReplyHeader("Content-Range", "bytes 4096-8191/8192")),
    ("flip-in-payload", FIRST_RUN, FlipReply(3 * MIB)),
    ("flip-in-second-piece", asks_for_byte(9 * MIB), FlipReply(100)),
    ("flip-in-table", GET, FlipReply(-60)),
    ("flip-in-footer", GET, FlipReply(-20)),
]


@pytest.mark.fault("The store cuts the body of a reply with status 200")
@pytest.mark.parametrize(
    ("matches", "action"), [case[1:] for case in READS], ids=[case[0] for case in READS]
)
def test_a_download_gets_over_it(bench: Bench, matches: Matches, action: Action) -> None:
    """Only the wrong range is requested again, and the writer does not see it."""
    bench.honest.upload_shard(NAMESPACE, bench.parts)
    fault = bench.proxy.add(matches, action)
    record, writers = bench.parts.record, bench.writers()
    assert bench.tier.download_shard(NAMESPACE, record.ref, writers) == record
    assert (fault.applied, len(writers.opened)) == (1, 1)


def ranges(bench: Bench, matches: Matches) -> list[str]:
    seen = [s for s in bench.proxy.requests if s.method == "GET" and matches(s)]
    return [s.headers["range"] for s in seen]


def test_a_broken_download_goes_on_at_the_last_byte(bench: Bench) -> None:
    bench.honest.upload_shard(NAMESPACE, bench.parts)
    bench.proxy.add(FIRST_RUN, CutReply(3 * MIB))
    bench.proxy.add(asks_for_byte(4096 + 3 * MIB), CutReply(2 * MIB, lying=True))
    bench.tier.download_shard(NAMESPACE, bench.parts.record.ref, bench.writers())
    start, last = 4096, 4096 + 8 * MIB - 1  # a run of two chunks
    assert ranges(bench, asks_for_byte(last)) == [
        f"bytes={start}-{last}",
        f"bytes={start + 3 * MIB}-{last}",
        f"bytes={start + 5 * MIB}-{last}",
    ]


def test_a_wrong_chunk_is_asked_for_again_and_nothing_else_is(bench: Bench) -> None:
    bench.honest.upload_shard(NAMESPACE, bench.parts)
    start = 4096  # the second chunk ends the first run
    fault = bench.proxy.add(asks_for_byte(start), FlipReply(5 * MIB))
    bench.tier.download_shard(NAMESPACE, bench.parts.record.ref, bench.writers())
    assert fault.applied == 1
    assert ranges(bench, asks_for_byte(start + 5 * MIB)) == [
        f"bytes={start}-{start + 8 * MIB - 1}",
        f"bytes={start + 4 * MIB}-{start + 8 * MIB - 1}",
    ]


def test_a_server_that_gives_a_byte_at_a_time_is_given_up(bench: Bench) -> None:
    bench.honest.upload_shard(NAMESPACE, bench.parts)
    bench.proxy.add(asks_for_byte(5 * MIB), CutReply(1), FOREVER)
    writers = bench.writers()
    with pytest.raises(UnavailableError, match="given up after 5"):
        bench.tier.download_shard(NAMESPACE, bench.parts.record.ref, writers)
    assert [writer.aborted for writer in writers.opened] == [True]


@pytest.mark.fault("The store returns a flipped bit in the body of an object")
@pytest.mark.parametrize(
    ("matches", "offset", "opened"),
    [(FIRST_RUN, 7, [True]), (GET, -30, [])],
    ids=["payload", "trailer"],
)
def test_bytes_that_are_wrong_twice_are_corrupt(
    bench: Bench, matches: Matches, offset: int, opened: list[bool]
) -> None:
    bench.honest.upload_shard(NAMESPACE, bench.parts)
    fault = bench.proxy.add(matches, FlipReply(offset), FOREVER)
    writers = bench.writers()
    with pytest.raises(CorruptionError):
        bench.tier.download_shard(NAMESPACE, bench.parts.record.ref, writers)
    assert [writer.aborted for writer in writers.opened] == opened
    assert fault.applied == 2


def test_a_download_that_fails_leaves_no_thread_at_work(bench: Bench) -> None:
    """Otherwise a range that is still in progress would write into memory that has another use."""
    bench.honest.upload_shard(NAMESPACE, bench.parts)
    bench.proxy.add(FIRST_RUN, Answer(403, "AccessDenied"), FOREVER)
    with pytest.raises(AccessDeniedError):
        bench.tier.download_shard(NAMESPACE, bench.parts.record.ref, bench.writers())
    before = bench.proxy.count(GET)
    bench.honest.list_manifests(NAMESPACE, JOB_UID)
    assert bench.proxy.count(GET) == before
    bench.tier.upload_shard(NAMESPACE, bench.parts)
