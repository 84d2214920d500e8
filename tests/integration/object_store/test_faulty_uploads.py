"""Uploads to a store that fails, returns wrong replies and loses parts."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.servers.hostile_s3 import (
    Action,
    Answer,
    CutRequest,
    DropRequestHeader,
    FlipRequest,
    Hang,
    LoseReply,
    Matches,
    Replace,
    SetReplyHeader,
    error_document,
)
from tests.support.servers.store_server import StoreServer
from tests.support.shards.builders import shard_header
from tests.support.shards.shard_files import CopyWriters, write_shard
from tests.support.tiers.store_bench import (
    ABORT,
    ANYTHING,
    COMPLETE,
    CREATE,
    FOREVER,
    HEAD,
    MIB,
    NAMESPACE,
    PUT_PART,
    PUT_WHOLE,
    SECOND_PART,
    Bench,
)
from tests.support.tiers.stores import s3_tier

from holdfast_core.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    HoldfastError,
    NotFoundError,
    TierError,
    UnavailableError,
)
from holdfast_core.store.s3.client import CHECKSUM_HEADER
from holdfast_core.store.s3.errors import Retrier, RetryPolicy
from holdfast_core.store.s3.http import Timeouts

pytestmark = pytest.mark.integration


HEALED: list[tuple[str, str, Matches, Action, int]] = [
    ("503-on-put", "whole", PUT_WHOLE, Answer(503, "SlowDown"), 2),
    ("503-on-part", "parts", PUT_PART, Answer(503, "SlowDown"), 3),
    ("503-on-head", "whole", HEAD, Answer(503), 2),
    ("503-on-create", "parts", CREATE, Answer(503, "SlowDown"), 2),
    ("503-on-complete", "parts", COMPLETE, Answer(503, "SlowDown"), 2),
    ("500", "whole", PUT_WHOLE, Answer(500, "InternalError"), 2),
    ("reply-to-put-lost", "whole", PUT_WHOLE, LoseReply(), 1),
    ("reply-to-create-lost", "parts", CREATE, LoseReply(), 1),
    ("reply-to-part-lost", "parts", SECOND_PART, LoseReply(), 1),
    ("reply-to-complete-lost", "parts", COMPLETE, LoseReply(), 1),
    ("silence-after-put", "whole", PUT_WHOLE, Hang(), 1),
    ("silence-after-complete", "parts", COMPLETE, Hang(), 1),
    ("reset-in-put", "whole", PUT_WHOLE, CutRequest(100_000), 1),
    ("reset-in-part", "parts", SECOND_PART, CutRequest(2 * MIB), 2),
    ("client-dies-in-put", "whole", PUT_WHOLE, CutRequest(100_000, reset=False), 1),
    ("client-dies-in-part", "parts", SECOND_PART, CutRequest(MIB, reset=False), 1),
    ("checksum-once", "whole", HEAD, SetReplyHeader(CHECKSUM_HEADER, "AAAAAA=="), 2),
    ("404-after-put", "whole", HEAD, Answer(404), 2),
    ("404-after-complete", "parts", HEAD, Answer(404), 2),
    ("409-on-put", "whole", PUT_WHOLE, Answer(409, "ConditionalRequestConflict"), 1),
    ("409-on-complete", "parts", COMPLETE, Answer(409, "ConditionalRequestConflict"), 1),
    ("412-yet-nothing", "whole", PUT_WHOLE, Answer(412, "PreconditionFailed"), 1),
    ("200-error-not-done", "parts", COMPLETE, Answer(200, "InternalError"), 1),
    (
        "200-error-yet-done",
        "parts",
        COMPLETE,
        Replace(200, b"   \n" + error_document("InternalError", "try again")),
        1,
    ),
    (
        "400-as-another-writer-completes",
        "parts",
        COMPLETE,
        Replace(400, error_document("InvalidRequest", "the null checksum mode")),
        1,
    ),
    ("upload-gone-at-part", "parts", SECOND_PART, Answer(404, "NoSuchUpload"), 1),
    ("upload-gone-at-complete", "parts", COMPLETE, Answer(404, "NoSuchUpload"), 2),
    ("flip-in-put", "whole", PUT_WHOLE, FlipRequest(150_000), 1),
    ("flip-in-part", "parts", SECOND_PART, FlipRequest(MIB), 1),
    ("503-burst", "parts", ANYTHING, Answer(503, "SlowDown"), 4),
    ("429-burst", "parts", ANYTHING, Answer(429, "TooManyRequests"), 4),
    ("part-checksum-wrong", "parts", SECOND_PART, SetReplyHeader(CHECKSUM_HEADER, "AAAAAA=="), 1),
    ("condition-ignored", "parts", COMPLETE, DropRequestHeader("If-None-Match"), 1),
    ("abort-refused", "parts", ABORT, Answer(503), 1),
]


@pytest.mark.fault("The store answers 503")
@pytest.mark.fault("The store answers 500")
@pytest.mark.fault("The store answers 404 right after a PUT")
@pytest.mark.fault("The store answers 409 or 412")
@pytest.mark.fault("The store answers 200 with an error in the body")
@pytest.mark.fault("The store loses a part of an upload, or another process aborts the upload")
@pytest.mark.fault(
    "Another writer has completed an upload, and the store is just removing it (400)"
)
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


@pytest.mark.fault("The store carries out a request, and the reply is lost")
@pytest.mark.parametrize("action", [LoseReply(), Hang()], ids=["lost", "silent"])
def test_a_completion_whose_reply_was_lost_is_not_repeated(bench: Bench, action: Action) -> None:
    bench.proxy.add(COMPLETE, action)
    bench.tier.upload_shard(NAMESPACE, bench.parts)
    assert bench.proxy.count(COMPLETE) == 1
    assert bench.unfinished(bench.parts) == 0


STUCK: list[tuple[str, str, Matches, Action, type[HoldfastError], str]] = [
    ("503-put", "whole", PUT_WHOLE, Answer(503, "SlowDown"), UnavailableError, "SlowDown"),
    ("503-part", "parts", SECOND_PART, Answer(503, "SlowDown"), UnavailableError, "SlowDown"),
    ("503-complete", "parts", COMPLETE, Answer(503, "SlowDown"), UnavailableError, "SlowDown"),
    (
        "200-error",
        "parts",
        COMPLETE,
        Answer(200, "InternalError"),
        UnavailableError,
        "InternalError",
    ),
    (
        "upload-gone",
        "parts",
        SECOND_PART,
        Answer(404, "NoSuchUpload"),
        UnavailableError,
        "disappeared",
    ),
    ("403-put", "whole", PUT_WHOLE, Answer(403, "AccessDenied"), AccessDeniedError, "AccessDenied"),
    ("403-part", "parts", PUT_PART, Answer(403, "AccessDenied"), AccessDeniedError, "AccessDenied"),
    (
        "no-bucket",
        "whole",
        PUT_WHOLE,
        Answer(404, "NoSuchBucket"),
        NotFoundError,
        "create the bucket",
    ),
    (
        "no-bucket-parts",
        "parts",
        CREATE,
        Answer(404, "NoSuchBucket"),
        NotFoundError,
        "NoSuchBucket",
    ),
    ("reset", "whole", PUT_WHOLE, CutRequest(1000), UnavailableError, "given up after 5"),
    ("cut-part", "parts", SECOND_PART, CutRequest(9, reset=False), UnavailableError, "given up"),
]


@pytest.mark.fault("The store answers 503")
@pytest.mark.fault("The store answers 403")
@pytest.mark.fault("The bucket is deleted")
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


@pytest.mark.fault("The store returns a wrong checksum header")
def test_a_checksum_that_stays_wrong_is_never_taken_for_done(bench: Bench) -> None:
    bench.proxy.add(HEAD, SetReplyHeader(CHECKSUM_HEADER, "AAAAAA=="), FOREVER)
    with pytest.raises(AlreadyExistsError, match=r"found \d+ bytes with CRC32C 00000000"):
        bench.tier.upload_shard(NAMESPACE, bench.whole)


def test_a_store_that_keeps_no_checksum_is_not_trusted(bench: Bench) -> None:
    bench.proxy.add(HEAD, SetReplyHeader(CHECKSUM_HEADER, ""), FOREVER)
    with pytest.raises(TierError, match="has no CRC32C"):
        bench.tier.upload_shard(NAMESPACE, bench.whole)


def test_an_upload_goes_on_when_a_killed_server_is_back(
    tmp_path: Path, server: StoreServer
) -> None:
    failed = threading.Event()

    def wait(seconds: float) -> None:
        failed.set()
        threading.Event().wait(min(seconds, 0.2))

    with type(server)() as own:
        retrier = Retrier(RetryPolicy(max_attempts=1000, budget_seconds=HANG_SECONDS), sleep=wait)
        tier = s3_tier(
            own.config("p"), own.credentials, retrier=retrier, timeouts=Timeouts(2.0, 5.0)
        )
        size = 11 * MIB
        with write_shard(tmp_path, shard_header(size), os.urandom(size)) as reader:
            own.kill()
            thread = threading.Thread(target=tier.upload_shard, args=(NAMESPACE, reader))
            thread.start()
            assert failed.wait(HANG_SECONDS)
            own.revive()
            thread.join(HANG_SECONDS)
            assert not thread.is_alive()
            target = tmp_path / "target"
            target.mkdir()
            ref = reader.record.ref
            assert tier.download_shard(NAMESPACE, ref, CopyWriters(target)) == reader.record
        tier.close()
