"""The object tier and a store that fails, returns wrong data and loses data (faults F46-F63)."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.servers.hostile_s3 import (
    Action,
    Answer,
    CutReply,
    CutRequest,
    DripReply,
    DropRequestHeader,
    FlipReply,
    FlipRequest,
    Hang,
    HostileProxy,
    LoseReply,
    Matches,
    Replace,
    Seen,
    SetReplyHeader,
    error_document,
    on,
)
from tests.support.servers.store_server import StoreServer
from tests.support.shards.builders import JOB_UID, shard_header
from tests.support.shards.shard_files import CopyWriters, write_shard
from tests.support.tiers.stores import s3_tier

from holdfast_core.contract import StoreConfig
from holdfast_core.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ConfigError,
    CorruptionError,
    HoldfastError,
    NotFoundError,
    TierError,
    UnavailableError,
)
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.node.shard_file import DiskShardReader
from holdfast_core.store.s3.client import CHECKSUM_HEADER, S3Client
from holdfast_core.store.s3.credentials import FileCredentials, Keys
from holdfast_core.store.s3.http import Timeouts
from holdfast_core.store.s3.retry import Retrier, RetryPolicy
from holdfast_core.store.tier import ObjectTier

pytestmark = pytest.mark.integration
MIB = 1 << 20
NAMESPACE = "team-a"
CHECKPOINT = CheckpointId(Step(100), RestartRound(0))
FOREVER = 1000

ANYTHING = on("")

PUT_WHOLE = on("PUT", query="")
PUT_PART = on("PUT", query="partNumber=")
SECOND_PART = on("PUT", query="partNumber=2")
CREATE = on("POST", query="uploads=")
COMPLETE = on("POST", query="uploadId=")
ABORT = on("DELETE", query="uploadId=")
HEAD = on("HEAD")
GET = on("GET", query="")
LIST = on("GET", query="list-type=2")


@dataclass
class Bench:
    """Two shards on disk, and direct access to the store without the proxy."""

    server: StoreServer
    tier: ObjectTier
    honest: ObjectTier
    proxy: HostileProxy
    client: S3Client
    whole: DiskShardReader
    parts: DiskShardReader
    directory: Path

    def reader(self, kind: str) -> DiskShardReader:
        return self.whole if kind == "whole" else self.parts

    def is_stored(self, reader: DiskShardReader) -> bool:
        """Return whether a direct download of the shard succeeds. The download verifies every byte."""
        try:
            self.honest.download_shard(NAMESPACE, reader.record.ref, self.writers())
        except NotFoundError:
            return False
        return True

    def unfinished(self, reader: DiskShardReader) -> int:
        ref = reader.record.ref
        key = (
            f"{self.client.config.prefix}/{NAMESPACE}/{JOB_UID}/shards/s{ref.step:012d}/r000000/"
            f"rank{ref.rank:06d}-{ref.blake3[3:19]}.shard"
        )
        return len(self.client.list_uploads(key)[0])

    def writers(self) -> CopyWriters:
        number = len(list(self.directory.iterdir()))
        directory = self.directory / f"copies{number}"
        directory.mkdir()
        return CopyWriters(directory)


@pytest.fixture
def bench(
    tmp_path: Path,
    tier: ObjectTier,
    proxied: ObjectTier,
    proxy: HostileProxy,
    server: StoreServer,
    store: StoreConfig,
) -> Iterator[Bench]:
    client = S3Client(store, server.credentials)
    small, large = 300_000, 11 * MIB
    with (
        write_shard(tmp_path, shard_header(small, rank=0), os.urandom(small)) as whole,
        write_shard(
            tmp_path, shard_header(large, rank=1, chunk_bytes=4 * MIB), os.urandom(large)
        ) as parts,
    ):
        yield Bench(server, proxied, tier, proxy, client, whole, parts, tmp_path)


HEALED: list[tuple[str, str, Matches, Action, int]] = [
    ("F46-503-on-put", "whole", PUT_WHOLE, Answer(503, "SlowDown"), 2),
    ("F46-503-on-part", "parts", PUT_PART, Answer(503, "SlowDown"), 3),
    ("F46-503-on-head", "whole", HEAD, Answer(503), 2),
    ("F46-503-on-create", "parts", CREATE, Answer(503, "SlowDown"), 2),
    ("F46-503-on-complete", "parts", COMPLETE, Answer(503, "SlowDown"), 2),
    ("F47-500", "whole", PUT_WHOLE, Answer(500, "InternalError"), 2),
    ("F49-reply-to-put-lost", "whole", PUT_WHOLE, LoseReply(), 1),
    ("F49-reply-to-create-lost", "parts", CREATE, LoseReply(), 1),
    ("F49-reply-to-part-lost", "parts", SECOND_PART, LoseReply(), 1),
    ("F49-reply-to-complete-lost", "parts", COMPLETE, LoseReply(), 1),
    ("F49-silence-after-put", "whole", PUT_WHOLE, Hang(), 1),
    ("F49-silence-after-complete", "parts", COMPLETE, Hang(), 1),
    ("reset-in-put", "whole", PUT_WHOLE, CutRequest(100_000), 1),
    ("reset-in-part", "parts", SECOND_PART, CutRequest(2 * MIB), 2),
    ("client-dies-in-put", "whole", PUT_WHOLE, CutRequest(100_000, reset=False), 1),
    ("client-dies-in-part", "parts", SECOND_PART, CutRequest(MIB, reset=False), 1),
    ("F51-checksum-once", "whole", HEAD, SetReplyHeader(CHECKSUM_HEADER, "AAAAAA=="), 2),
    ("F54-404-after-put", "whole", HEAD, Answer(404), 2),
    ("F54-404-after-complete", "parts", HEAD, Answer(404), 2),
    ("F55-409-on-put", "whole", PUT_WHOLE, Answer(409, "ConditionalRequestConflict"), 1),
    ("F55-409-on-complete", "parts", COMPLETE, Answer(409, "ConditionalRequestConflict"), 1),
    ("F55-412-yet-nothing", "whole", PUT_WHOLE, Answer(412, "PreconditionFailed"), 1),
    ("F57-200-error-not-done", "parts", COMPLETE, Answer(200, "InternalError"), 1),
    (
        "F57-200-error-yet-done",
        "parts",
        COMPLETE,
        Replace(200, b"   \n" + error_document("InternalError", "try again")),
        1,
    ),
    ("F58-upload-gone-at-part", "parts", SECOND_PART, Answer(404, "NoSuchUpload"), 1),
    ("F58-upload-gone-at-complete", "parts", COMPLETE, Answer(404, "NoSuchUpload"), 2),
    ("flip-in-put", "whole", PUT_WHOLE, FlipRequest(150_000), 1),
    ("flip-in-part", "parts", SECOND_PART, FlipRequest(MIB), 1),
    ("503-burst", "parts", ANYTHING, Answer(503, "SlowDown"), 4),
    ("429-burst", "parts", ANYTHING, Answer(429, "TooManyRequests"), 4),
    ("part-checksum-wrong", "parts", SECOND_PART, SetReplyHeader(CHECKSUM_HEADER, "AAAAAA=="), 1),
    ("condition-ignored", "parts", COMPLETE, DropRequestHeader("If-None-Match"), 1),
    ("abort-refused", "parts", ABORT, Answer(503), 1),
]


@pytest.mark.parametrize(
    ("kind", "matches", "action", "times"),
    [case[1:] for case in HEALED],
    ids=[case[0] for case in HEALED],
)
def test_an_upload_gets_over_it(
    bench: Bench, kind: str, matches: Matches, action: Action, times: int
) -> None:
    fault = bench.proxy.add(matches, action, times)
    bench.tier.upload_shard(NAMESPACE, bench.reader(kind))
    if matches is not ABORT:
        assert fault.applied == times
    assert bench.is_stored(bench.reader(kind))


@pytest.mark.parametrize("action", [LoseReply(), Hang()], ids=["lost", "silent"])
def test_a_completion_whose_reply_was_lost_is_not_repeated(bench: Bench, action: Action) -> None:
    bench.proxy.add(COMPLETE, action)
    bench.tier.upload_shard(NAMESPACE, bench.parts)
    assert bench.proxy.count(COMPLETE) == 1
    assert bench.unfinished(bench.parts) == 0


STUCK: list[tuple[str, str, Matches, Action, type[HoldfastError], str]] = [
    ("F46-put", "whole", PUT_WHOLE, Answer(503, "SlowDown"), UnavailableError, "SlowDown"),
    ("F46-part", "parts", SECOND_PART, Answer(503, "SlowDown"), UnavailableError, "SlowDown"),
    ("F46-complete", "parts", COMPLETE, Answer(503, "SlowDown"), UnavailableError, "SlowDown"),
    ("F57", "parts", COMPLETE, Answer(200, "InternalError"), UnavailableError, "InternalError"),
    ("F58", "parts", SECOND_PART, Answer(404, "NoSuchUpload"), UnavailableError, "disappeared"),
    ("F60-put", "whole", PUT_WHOLE, Answer(403, "AccessDenied"), AccessDeniedError, "AccessDenied"),
    ("F60-part", "parts", PUT_PART, Answer(403, "AccessDenied"), AccessDeniedError, "AccessDenied"),
    ("F61", "whole", PUT_WHOLE, Answer(404, "NoSuchBucket"), NotFoundError, "create the bucket"),
    ("F61-parts", "parts", CREATE, Answer(404, "NoSuchBucket"), NotFoundError, "NoSuchBucket"),
    ("reset", "whole", PUT_WHOLE, CutRequest(1000), UnavailableError, "given up after 5"),
    ("cut-part", "parts", SECOND_PART, CutRequest(9, reset=False), UnavailableError, "given up"),
]


@pytest.mark.parametrize(
    ("kind", "matches", "action", "expected", "text"),
    [case[1:] for case in STUCK],
    ids=[case[0] for case in STUCK],
)
def test_an_upload_that_cannot_succeed_says_why(
    bench: Bench,
    kind: str,
    matches: Matches,
    action: Action,
    expected: type[HoldfastError],
    text: str,
) -> None:
    bench.proxy.add(matches, action, FOREVER)
    with pytest.raises(expected, match=text) as caught:
        bench.tier.upload_shard(NAMESPACE, bench.reader(kind))
    assert bench.proxy.endpoint in str(caught.value) or text == "disappeared"
    assert not bench.is_stored(bench.reader(kind))
    interrupted = kind == "parts" and expected is UnavailableError and text != "disappeared"
    assert bench.unfinished(bench.reader(kind)) == (1 if interrupted else 0)


def test_f51_a_checksum_that_stays_wrong_is_never_taken_for_done(bench: Bench) -> None:
    bench.proxy.add(HEAD, SetReplyHeader(CHECKSUM_HEADER, "AAAAAA=="), FOREVER)
    with pytest.raises(AlreadyExistsError, match=r"found \d+ bytes with CRC32C 00000000"):
        bench.tier.upload_shard(NAMESPACE, bench.whole)


def test_a_store_that_keeps_no_checksum_is_not_trusted(bench: Bench) -> None:
    bench.proxy.add(HEAD, SetReplyHeader(CHECKSUM_HEADER, ""), FOREVER)
    with pytest.raises(TierError, match="has no CRC32C"):
        bench.tier.upload_shard(NAMESPACE, bench.whole)


class Rotation:
    """Credentials in files, as in a mounted Secret, which are replaced during a request (F59).

    The store revokes the old credentials while the first request of a kind is on its way with them.
    """

    def __init__(self, directory: Path, server: StoreServer, prefix: str) -> None:
        self.directory = directory
        self._server = server
        self._prefix = prefix
        self._keys: Keys | None = None
        self.rotated = 0
        directory.mkdir()
        self.rotate()

    def rotate(self) -> None:
        old, new = self._keys, Keys(secrets.token_hex(8), secrets.token_hex(16))
        self._server.add_user(new, self._prefix)
        (self.directory / "accessKey").write_text(new.access_key)
        (self.directory / "secretKey").write_text(new.secret_key)
        if old is not None:
            self._server.remove_user(old)
        self._keys = new
        self.rotated += 1

    def within(self, kind: Matches) -> Matches:
        """Return a condition that never matches, and rotates the keys at the first request of this kind."""

        def matches(seen: Seen) -> bool:
            if kind(seen) and self.rotated == 1:
                self.rotate()
            return False

        return matches


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("upload", SECOND_PART),
        ("upload", COMPLETE),
        ("whole", PUT_WHOLE),
        ("download", on("GET", query="")),
        ("manifest", on("GET", query="")),
    ],
    ids=["part", "completion", "put", "range", "document"],
)
def test_f59_keys_that_end_in_the_middle_are_read_again_and_it_goes_on(
    bench: Bench, store: StoreConfig, quick: Retrier, tmp_path: Path, way: str, kind: Matches
) -> None:
    rotation = Rotation(tmp_path / "keys", bench.server, store.prefix)
    bench.proxy.add(rotation.within(kind), Answer(500))
    if way in ("download", "manifest"):
        bench.honest.upload_shard(NAMESPACE, bench.parts)
        bench.honest.put_manifest(NAMESPACE, JOB_UID, CHECKPOINT, b"{}")
    config = bench.server.config(store.prefix, endpoint=bench.proxy.endpoint)
    tier = s3_tier(config, FileCredentials(rotation.directory), retrier=quick)
    ref = bench.parts.record.ref
    match way:
        case "upload":
            tier.upload_shard(NAMESPACE, bench.parts)
            assert bench.proxy.count(CREATE) == 1
            assert bench.is_stored(bench.parts)
        case "whole":
            tier.upload_shard(NAMESPACE, bench.whole)
            assert bench.is_stored(bench.whole)
        case "download":
            assert tier.download_shard(NAMESPACE, ref, bench.writers()) == bench.parts.record
        case _:
            assert tier.get_manifest(NAMESPACE, JOB_UID, CHECKPOINT) == b"{}"
    assert rotation.rotated == 2
    tier.close()


@pytest.mark.parametrize(("status", "code"), [(400, "ExpiredToken"), (404, "XAdminUserNotFound")])
def test_f59_a_refusal_of_keys_that_is_no_403(
    bench: Bench, store: StoreConfig, quick: Retrier, tmp_path: Path, status: int, code: str
) -> None:
    rotation = Rotation(tmp_path / "keys", bench.server, store.prefix)
    bench.proxy.add(rotation.within(SECOND_PART), Answer(500))
    bench.proxy.add(SECOND_PART, Answer(status, code))
    config = bench.server.config(store.prefix, endpoint=bench.proxy.endpoint)
    tier = s3_tier(config, FileCredentials(rotation.directory), retrier=quick)
    tier.upload_shard(NAMESPACE, bench.parts)
    assert bench.is_stored(bench.parts)
    tier.close()


def asks_for_byte(position: int) -> Matches:
    """Match ranged GETs that include this byte of the object."""

    def matches(seen: Seen) -> bool:
        first, _, last = seen.headers.get("range", "").removeprefix("bytes=").partition("-")
        return seen.method == "GET" and bool(last) and int(first) <= position <= int(last)

    return matches


FIRST_RUN = asks_for_byte(4096)
READS: list[tuple[str, Matches, Action]] = [
    ("F54-404-on-head", HEAD, Answer(404)),
    ("F46-503", GET, Answer(503, "SlowDown")),
    ("F46-503-in-the-middle", FIRST_RUN, Answer(503, "SlowDown")),
    ("F50-cut-trailer", GET, CutReply(1000)),
    ("F50-cut", FIRST_RUN, CutReply(3 * MIB)),
    ("F50-cut-and-lying", FIRST_RUN, CutReply(3 * MIB, lying=True)),
    ("reset-before-a-byte", FIRST_RUN, LoseReply()),
    ("silence", FIRST_RUN, Hang()),
    ("200-instead-of-206", FIRST_RUN, Replace(200, b"everything")),
    ("other-range", FIRST_RUN, SetReplyHeader("Content-Range", "bytes 4096-8191/8192")),
    ("F52-flip-in-payload", FIRST_RUN, FlipReply(3 * MIB)),
    ("F52-flip-in-second-piece", asks_for_byte(9 * MIB), FlipReply(100)),
    ("F52-flip-in-table", GET, FlipReply(-60)),
    ("F52-flip-in-footer", GET, FlipReply(-20)),
]


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


@pytest.mark.parametrize(
    ("matches", "offset", "opened"),
    [(FIRST_RUN, 7, [True]), (GET, -30, [])],
    ids=["payload", "trailer"],
)
def test_f52_bytes_that_are_wrong_twice_are_corrupt(
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


def test_f61_bucket_gone_while_reading(bench: Bench) -> None:
    bench.proxy.add(GET, Answer(404, "NoSuchBucket"), FOREVER)
    with pytest.raises(NotFoundError, match="create the bucket"):
        bench.tier.get_manifest(NAMESPACE, JOB_UID, CHECKPOINT)


DOCUMENTS: list[tuple[str, Matches, Action]] = [
    ("F46-503", PUT_WHOLE, Answer(503, "SlowDown")),
    ("F49-reply-lost", PUT_WHOLE, LoseReply()),
    ("F49-silence", PUT_WHOLE, Hang()),
    ("reset", PUT_WHOLE, CutRequest(3)),
    ("F55-409", PUT_WHOLE, Answer(409, "OperationAborted")),
    ("F55-412-yet-nothing", PUT_WHOLE, Answer(412, "PreconditionFailed")),
    ("F54-404-after-put", HEAD, Answer(404)),
]


@pytest.mark.parametrize(
    ("matches", "action"), [case[1:] for case in DOCUMENTS], ids=[case[0] for case in DOCUMENTS]
)
def test_putting_a_manifest_gets_over_it(bench: Bench, matches: Matches, action: Action) -> None:
    fault = bench.proxy.add(matches, action)
    digest = bench.tier.put_manifest(NAMESPACE, JOB_UID, CHECKPOINT, b'{"step":100}')
    assert fault.applied == 1
    assert bench.honest.get_manifest(NAMESPACE, JOB_UID, CHECKPOINT) == b'{"step":100}'
    assert bench.honest.put_manifest(NAMESPACE, JOB_UID, CHECKPOINT, b'{"step":100}') == digest


@pytest.mark.parametrize(
    "action",
    [
        Answer(503),
        Answer(404, "NoSuchKey"),
        LoseReply(),
        CutReply(4),
        CutReply(4, lying=True),
        FlipReply(3),
    ],
    ids=["F46-503", "F54-404", "lost", "F50-cut", "F50-cut-and-lying", "F52-flip"],
)
def test_getting_a_manifest_gets_over_it(bench: Bench, action: Action) -> None:
    bench.honest.put_manifest(NAMESPACE, JOB_UID, CHECKPOINT, b'{"step":100}')
    fault = bench.proxy.add(GET, action)
    assert bench.tier.get_manifest(NAMESPACE, JOB_UID, CHECKPOINT) == b'{"step":100}'
    assert fault.applied == 1


def test_f52_a_manifest_that_is_wrong_twice_is_corrupt(bench: Bench) -> None:
    bench.honest.put_manifest(NAMESPACE, JOB_UID, CHECKPOINT, b'{"step":100}')
    bench.proxy.add(GET, FlipReply(3), FOREVER)
    with pytest.raises(CorruptionError, match="expected CRC32C"):
        bench.tier.get_manifest(NAMESPACE, JOB_UID, CHECKPOINT)


def test_f56_without_the_condition_a_later_writer_still_does_not_overwrite(bench: Bench) -> None:
    bench.proxy.add(PUT_WHOLE, DropRequestHeader("If-None-Match"), FOREVER)
    bench.tier.put_manifest(NAMESPACE, JOB_UID, CHECKPOINT, b'{"a":1}')
    with pytest.raises(AlreadyExistsError):
        bench.tier.put_manifest(NAMESPACE, JOB_UID, CHECKPOINT, b'{"a":2}')
    assert bench.honest.get_manifest(NAMESPACE, JOB_UID, CHECKPOINT) == b'{"a":1}'


def test_f53_a_stale_list_is_a_hint_only(bench: Bench) -> None:
    bench.honest.put_manifest(NAMESPACE, JOB_UID, CHECKPOINT, b"{}")
    empty = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
    bench.proxy.add(LIST, Replace(200, empty))
    assert bench.tier.list_manifests(NAMESPACE, JOB_UID) == ()
    assert bench.tier.get_manifest(NAMESPACE, JOB_UID, CHECKPOINT) == b"{}"


@pytest.mark.parametrize(
    "body",
    [
        b"<html>hello</html>",
        b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
        b'<!DOCTYPE x [<!ENTITY a "b">]><ListBucketResult>&a;</ListBucketResult>',
    ],
    ids=["html", "endless", "entities"],
)
def test_a_list_that_is_none_is_refused(bench: Bench, body: bytes) -> None:
    bench.proxy.add(LIST, Replace(200, body), FOREVER)
    with pytest.raises(TierError, match=r"ListBucketResult|truncated"):
        bench.tier.list_manifests(NAMESPACE, JOB_UID)


HUGE = {
    "larger-than-any-page": b"<ListBucketResult>" + b"<Contents/>" * (1 << 20),
    "many-elements": b"<ListBucketResult>" + b"<a/>" * (1 << 20) + b"</ListBucketResult>",
    "deep": b"<a>" * 100_000 + b"</a>" * 100_000,
}


@pytest.mark.parametrize("body", HUGE.values(), ids=HUGE.keys())
@pytest.mark.parametrize("status", [200, 400])
def test_huge_xml_is_refused(bench: Bench, body: bytes, status: int) -> None:
    bench.proxy.add(LIST, Replace(status, body), FOREVER)
    with pytest.raises(TierError) as caught:
        bench.tier.list_manifests(NAMESPACE, JOB_UID)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_never_followed(bench: Bench, status: int) -> None:
    """Following a redirect would send signed requests and data to an unknown server."""
    with HostileProxy(bench.server.endpoint) as elsewhere:
        location = f"http://{elsewhere.endpoint}/holdfast/x"
        answer = Answer(status, "TemporaryRedirect", location=location)
        bench.proxy.add(ANYTHING, answer, FOREVER)
        for call in (
            lambda: bench.tier.upload_shard(NAMESPACE, bench.whole),
            lambda: bench.tier.upload_shard(NAMESPACE, bench.parts),
            lambda: bench.tier.get_manifest(NAMESPACE, JOB_UID, CHECKPOINT),
            lambda: bench.tier.download_shard(NAMESPACE, bench.parts.record.ref, bench.writers()),
        ):
            before = len(bench.proxy.requests)
            with pytest.raises(ConfigError, match="check region and endpoint"):
                call()
            assert len(bench.proxy.requests) == before + 1
        assert elsewhere.requests == []
    assert not bench.is_stored(bench.whole)


@pytest.mark.parametrize("way", ["upload", "download", "manifest"])
def test_a_store_that_only_drips_is_given_up_and_asked_again(bench: Bench, way: str) -> None:
    if way != "upload":
        bench.honest.upload_shard(NAMESPACE, bench.parts)
        bench.honest.put_manifest(NAMESPACE, JOB_UID, CHECKPOINT, b'{"step":100}')
    matches = {"upload": COMPLETE, "download": FIRST_RUN, "manifest": GET}[way]
    fault = bench.proxy.add(matches, DripReply(0.5))
    match way:
        case "upload":
            bench.tier.upload_shard(NAMESPACE, bench.parts)
        case "download":
            ref = bench.parts.record.ref
            bench.tier.download_shard(NAMESPACE, ref, bench.writers())
        case _:
            bench.tier.get_manifest(NAMESPACE, JOB_UID, CHECKPOINT)
            assert bench.proxy.count(GET) == 2
    assert fault.applied == 1
    assert way == "manifest" or bench.is_stored(bench.parts)


def test_a_list_never_names_what_is_outside_of_the_job(bench: Bench) -> None:
    body = (
        b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>other/team-b/uid/"
        b"manifests/s000000000001/r000000.json</Key></Contents></ListBucketResult>"
    )
    bench.proxy.add(LIST, Replace(200, body), FOREVER)
    assert bench.tier.list_manifests(NAMESPACE, JOB_UID) == ()
    bench.tier.delete_checkpoint(NAMESPACE, JOB_UID, CHECKPOINT)
    assert [s.path for s in bench.proxy.requests if "team-b" in s.path] == []


def test_f63_an_upload_goes_on_when_a_killed_server_is_back(
    tmp_path: Path, server: StoreServer
) -> None:
    failed = threading.Event()

    def wait(seconds: float) -> None:
        failed.set()
        threading.Event().wait(min(seconds, 0.2))

    with type(server)() as own:
        retrier = Retrier(RetryPolicy(max_attempts=1000, budget_seconds=60), sleep=wait)
        tier = s3_tier(
            own.config("p"), own.credentials, retrier=retrier, timeouts=Timeouts(2.0, 5.0)
        )
        size = 11 * MIB
        with write_shard(tmp_path, shard_header(size), os.urandom(size)) as reader:
            own.kill()
            thread = threading.Thread(target=tier.upload_shard, args=(NAMESPACE, reader))
            thread.start()
            assert failed.wait(30)
            own.revive()
            thread.join(60)
            assert not thread.is_alive()
            target = tmp_path / "target"
            target.mkdir()
            ref = reader.record.ref
            assert tier.download_shard(NAMESPACE, ref, CopyWriters(target)) == reader.record
        tier.close()
