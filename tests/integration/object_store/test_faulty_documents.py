"""Manifests, lists and other replies of a store that fails or lies."""

from __future__ import annotations

import pytest
from tests.support.servers.hostile_s3 import (
    Action,
    Answer,
    CutReply,
    CutRequest,
    DripReply,
    DropRequestHeader,
    FlipReply,
    Hang,
    HostileProxy,
    LoseReply,
    Matches,
    Replace,
)
from tests.support.shards.builders import JOB_UID
from tests.support.tiers.store_bench import (
    ANYTHING,
    CHECKPOINT,
    COMPLETE,
    FIRST_RUN,
    FOREVER,
    GET,
    HEAD,
    LIST,
    NAMESPACE,
    PUT_WHOLE,
    Bench,
)

from holdfast_core.errors import (
    AlreadyExistsError,
    ConfigError,
    CorruptionError,
    NotFoundError,
    TierError,
)

pytestmark = pytest.mark.integration


@pytest.mark.fault("The bucket is deleted")
def test_a_bucket_that_is_gone_is_named_by_a_read(bench: Bench) -> None:
    bench.proxy.add(GET, Answer(404, "NoSuchBucket"), FOREVER)
    with pytest.raises(NotFoundError, match="create the bucket"):
        bench.tier.get_manifest(NAMESPACE, JOB_UID, CHECKPOINT)


DOCUMENTS: list[tuple[str, Matches, Action]] = [
    ("503", PUT_WHOLE, Answer(503, "SlowDown")),
    ("reply-lost", PUT_WHOLE, LoseReply()),
    ("silence", PUT_WHOLE, Hang()),
    ("reset", PUT_WHOLE, CutRequest(3)),
    ("409", PUT_WHOLE, Answer(409, "OperationAborted")),
    ("412-yet-nothing", PUT_WHOLE, Answer(412, "PreconditionFailed")),
    ("404-after-put", HEAD, Answer(404)),
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
    ids=["503", "404", "lost", "cut", "cut-and-lying", "flip"],
)
def test_getting_a_manifest_gets_over_it(bench: Bench, action: Action) -> None:
    bench.honest.put_manifest(NAMESPACE, JOB_UID, CHECKPOINT, b'{"step":100}')
    fault = bench.proxy.add(GET, action)
    assert bench.tier.get_manifest(NAMESPACE, JOB_UID, CHECKPOINT) == b'{"step":100}'
    assert fault.applied == 1


@pytest.mark.fault("The store returns a flipped bit in the body of an object")
def test_a_manifest_that_is_wrong_twice_is_corrupt(bench: Bench) -> None:
    bench.honest.put_manifest(NAMESPACE, JOB_UID, CHECKPOINT, b'{"step":100}')
    bench.proxy.add(GET, FlipReply(3), FOREVER)
    with pytest.raises(CorruptionError, match="expected CRC32C"):
        bench.tier.get_manifest(NAMESPACE, JOB_UID, CHECKPOINT)


@pytest.mark.fault("The store ignores the condition of a conditional PUT")
def test_without_the_condition_a_later_writer_still_does_not_overwrite(bench: Bench) -> None:
    bench.proxy.add(PUT_WHOLE, DropRequestHeader("If-None-Match"), FOREVER)
    bench.tier.put_manifest(NAMESPACE, JOB_UID, CHECKPOINT, b'{"a":1}')
    with pytest.raises(AlreadyExistsError):
        bench.tier.put_manifest(NAMESPACE, JOB_UID, CHECKPOINT, b'{"a":2}')
    assert bench.honest.get_manifest(NAMESPACE, JOB_UID, CHECKPOINT) == b'{"a":1}'


@pytest.mark.fault("A store fails three of ten requests")
def test_a_flipped_bit_in_a_list_is_read_again(bench: Bench) -> None:
    bench.honest.put_manifest(NAMESPACE, JOB_UID, CHECKPOINT, b"{}")
    fault = bench.proxy.add(LIST, FlipReply(60))
    assert bench.tier.list_manifests(NAMESPACE, JOB_UID) == (CHECKPOINT,)
    assert fault.applied == 1


def test_a_list_of_something_else_names_the_endpoint(bench: Bench) -> None:
    bench.proxy.add(LIST, Replace(200, b"<html>nginx</html>"), FOREVER)
    with pytest.raises(TierError, match="check that this is an S3 endpoint"):
        bench.tier.list_manifests(NAMESPACE, JOB_UID)


@pytest.mark.fault("The store returns an old listing")
def test_a_stale_list_is_a_hint_only(bench: Bench) -> None:
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


@pytest.mark.parametrize("drip", [DripReply(0.5)], ids=["drip"])
@pytest.mark.parametrize("way", ["upload", "download", "manifest"])
def test_a_store_that_only_drips_is_given_up_and_asked_again(
    bench: Bench, way: str, drip: DripReply
) -> None:
    if way != "upload":
        bench.honest.upload_shard(NAMESPACE, bench.parts)
        bench.honest.put_manifest(NAMESPACE, JOB_UID, CHECKPOINT, b'{"step":100}')
    matches = {"upload": COMPLETE, "download": FIRST_RUN, "manifest": GET}[way]
    fault = bench.proxy.add(matches, drip)
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
