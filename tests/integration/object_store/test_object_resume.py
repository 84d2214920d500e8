"""An interrupted upload resumes where it stopped, and sends no byte again that has arrived."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
from tests.integration.object_store.killed import kill_in_upload
from tests.support.hang import HANG_SECONDS
from tests.support.servers.hostile_s3 import (
    Action,
    Answer,
    FreezeRequest,
    Hang,
    HostileProxy,
    Matches,
    on,
)
from tests.support.servers.store_server import StoreServer
from tests.support.shards.builders import JOB_UID, shard_header
from tests.support.shards.shard_files import CopyWriters, FileCopyWriter, flip_bit, write_shard
from tests.support.tiers.stores import s3_tier

from holdfast_core.contract import StoreConfig
from holdfast_core.errors import CorruptionError, UnavailableError
from holdfast_core.format.canonical import crc32c
from holdfast_core.ids import ShardRef
from holdfast_core.node.shard_file import DiskShardReader
from holdfast_core.store.s3.client import (
    CHECKSUM_HEADER,
    PendingUpload,
    S3Client,
    S3Request,
    encode_crc,
)
from holdfast_core.store.s3.store import S3ObjectStore
from holdfast_core.store.tier import ObjectTier

pytestmark = pytest.mark.integration
MIB = 1 << 20
PART = 5 * MIB
NAMESPACE = "team-a"
PAYLOAD = 21 * MIB
PARTS = 5

CREATE = on("POST", query="uploads=")
PUT_PART = on("PUT", query="partNumber=")
COMPLETE = on("POST", query="uploadId=")
LIST_UPLOADS = on("GET", query="uploads=")


def part(number: int) -> Matches:
    return on("PUT", query=f"partNumber={number}&")


@dataclass
class Bench:
    server: StoreServer
    store: StoreConfig
    client: S3Client
    path: Path
    reader: DiskShardReader
    tier: ObjectTier

    @property
    def key(self) -> str:
        ref = self.reader.record.ref
        return (
            f"{self.store.prefix}/{NAMESPACE}/{JOB_UID}/shards/s{ref.step:012d}-r{ref.round:06d}/"
            f"rank{ref.rank:06d}-{ref.blake3[3:19]}.shard"
        )

    @property
    def file_bytes(self) -> int:
        return self.reader.record.file_bytes

    def unfinished(self) -> tuple[PendingUpload, ...]:
        return self.client.list_uploads(self.key)[0]

    def arrived(self) -> int:
        """Return the number of bytes of the parts that the store holds."""
        parts = [self.client.list_parts(self.key, u.upload_id) for u in self.unfinished()]
        return sum(part.size_bytes for of_one in parts for part in of_one)

    def part_bytes(self, number: int) -> bytes:
        return self.path.read_bytes()[(number - 1) * PART : number * PART]

    def leave_part(self, upload_id: str, number: int, data: bytes) -> None:
        self.client.send(
            S3Request(
                "PUT",
                self.key,
                {"partNumber": str(number), "uploadId": upload_id},
                {CHECKSUM_HEADER: encode_crc(crc32c(data))},
                data,
            )
        ).checked()

    def assert_stored(self, directory: Path) -> None:
        """Assert that the shard is stored with the right bytes, and that no unfinished upload is left."""
        directory.mkdir()
        ref = self.reader.record.ref
        assert self.tier.download_shard(NAMESPACE, ref, CopyWriters(directory)) == (
            self.reader.record
        )
        assert self.unfinished() == ()


@pytest.fixture
def bench(
    tmp_path: Path, server: StoreServer, store: StoreConfig, tier: ObjectTier
) -> Iterator[Bench]:
    source = tmp_path / "source"
    source.mkdir()
    with write_shard(source, shard_header(PAYLOAD), os.urandom(PAYLOAD)) as reader:
        (path,) = source.iterdir()
        client = S3Client(store, server.credentials)
        yield Bench(server, store, client, path, reader, tier)
        client.close()


KILLS: list[tuple[str, Matches, Action, int]] = [
    # name, request at which the process dies, its action, number of parts that have arrived by then
    ("begin", CREATE, Hang(), 0),
    *((f"part-{k}", part(k), FreezeRequest(3 * MIB), k - 1) for k in range(1, PARTS)),
    (f"part-{PARTS}", part(PARTS), FreezeRequest(1000), PARTS - 1),
    ("part-3-done-yet-unheard", part(3), Hang(), 3),
    ("before-completion", COMPLETE, FreezeRequest(0), PARTS),
    ("after-completion", COMPLETE, Hang(), PARTS),
]


@pytest.mark.parametrize(
    ("held", "action", "arrived"), [case[1:] for case in KILLS], ids=[case[0] for case in KILLS]
)
def test_a_killed_upload_sends_only_what_is_missing(
    tmp_path: Path,
    bench: Bench,
    proxy: HostileProxy,
    server: StoreServer,
    held: Matches,
    action: Action,
    arrived: int,
) -> None:
    config = server.config(bench.store.prefix, endpoint=proxy.endpoint)
    proxy.add(held, action)
    kill_in_upload(proxy, replace(config, max_concurrency=1), bench.reader)
    with HostileProxy(server.endpoint) as second:
        again = server.config(bench.store.prefix, endpoint=second.endpoint)
        tier = s3_tier(again, server.credentials)
        tier.upload_shard(NAMESPACE, bench.reader)
        tier.close()
        assert second.body_bytes(PUT_PART) == max(0, bench.file_bytes - arrived * PART)
    bench.assert_stored(tmp_path / "copy")


def test_four_parts_in_flight_when_the_process_dies(
    tmp_path: Path, bench: Bench, proxy: HostileProxy, server: StoreServer
) -> None:
    config = server.config(bench.store.prefix, endpoint=proxy.endpoint)
    proxy.add(part(4), FreezeRequest(MIB))
    kill_in_upload(proxy, config, bench.reader)
    there = bench.arrived()
    with HostileProxy(server.endpoint) as second:
        tier = s3_tier(
            server.config(bench.store.prefix, endpoint=second.endpoint), server.credentials
        )
        tier.upload_shard(NAMESPACE, bench.reader)
        tier.close()
        assert second.body_bytes(PUT_PART) <= bench.file_bytes - there
    bench.assert_stored(tmp_path / "copy")


def test_an_upload_stays_to_be_gone_on_with_when_the_tier_is_closed(
    tmp_path: Path, bench: Bench, server: StoreServer
) -> None:
    """The tier is closed while the first part is being sent and the others wait for the only worker."""

    def throttle(_length: int) -> None:
        # The worker itself closes the tier: the waiting parts are cancelled, then it cannot join itself.
        with contextlib.suppress(RuntimeError):
            tier.close()

    config = replace(bench.store, max_concurrency=1)
    tier = s3_tier(config, server.credentials, throttle=throttle)
    error = ended_with(lambda: tier.upload_shard(NAMESPACE, bench.reader))
    assert error is not None
    assert "being closed" in str(error)
    assert bench.arrived() == PART
    bench.tier.upload_shard(NAMESPACE, bench.reader)
    bench.assert_stored(tmp_path / "copy")


class Closing(FileCopyWriter):
    """Closes the tier when the first piece has arrived."""

    def __init__(self, tier: ObjectTier, path: Path, ref: ShardRef, file_bytes: int) -> None:
        super().__init__(path, ref, file_bytes)
        self._tier = tier

    def write(self, data: memoryview | bytes) -> None:
        self._tier.close()
        super().write(data)


def test_downloads_end_when_the_tier_is_closed(
    tmp_path: Path, bench: Bench, server: StoreServer
) -> None:
    """The tier is closed while other ranges wait for the only worker."""
    bench.tier.upload_shard(NAMESPACE, bench.reader)
    ref = bench.reader.record.ref
    config = replace(bench.store, max_concurrency=1)
    ranged, whole = (s3_tier(config, server.credentials) for _ in range(2))

    def ranges() -> None:
        for _ in ranged.open_shard(NAMESPACE, ref).read([range(n, n + 8) for n in (0, 8, 16, 24)]):
            ranged.close()

    def download() -> None:
        whole.download_shard(NAMESPACE, ref, functools.partial(Closing, whole, tmp_path / "copy"))

    for call in (ranges, download):
        error = ended_with(call)
        assert error is not None
        assert "being closed" in str(error)


def ended_with(call: Callable[[], object]) -> UnavailableError | None:
    """Return the UnavailableError that the call raised. Return None if it raised none within a minute."""
    raised: list[UnavailableError] = []

    def run() -> None:
        try:
            call()
        except UnavailableError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_SECONDS)
    return raised[0] if raised else None


def test_killed_again_and_again_it_still_arrives_and_no_part_twice(
    tmp_path: Path, bench: Bench, server: StoreServer
) -> None:
    sent = 0
    for number in range(1, PARTS + 1):
        with HostileProxy(server.endpoint) as proxy:
            config = server.config(bench.store.prefix, endpoint=proxy.endpoint)
            proxy.add(part(number + 1) if number < PARTS else COMPLETE, FreezeRequest(0))
            kill_in_upload(proxy, replace(config, max_concurrency=1), bench.reader)
            sent += proxy.body_bytes(part(number))
    assert sent == bench.file_bytes
    bench.tier.upload_shard(NAMESPACE, bench.reader)
    bench.assert_stored(tmp_path / "copy")


def test_parts_that_hold_other_bytes_are_sent_again(
    tmp_path: Path, bench: Bench, proxied: ObjectTier, proxy: HostileProxy
) -> None:
    upload_id = bench.client.create_upload(bench.key)
    good = bench.part_bytes(1)
    bench.leave_part(upload_id, 1, good)
    bench.leave_part(upload_id, 2, good)  # the right length, the wrong bytes
    bench.leave_part(upload_id, 3, bench.part_bytes(3)[:-1])
    bench.leave_part(upload_id, 9, b"a part that the plan does not have")
    proxied.upload_shard(NAMESPACE, bench.reader)
    assert proxy.count(CREATE) == 0
    assert proxy.body_bytes(PUT_PART) == bench.file_bytes - PART
    bench.assert_stored(tmp_path / "copy")


def test_the_upload_that_has_most_is_taken_and_the_others_are_ended(
    tmp_path: Path, bench: Bench, proxied: ObjectTier, proxy: HostileProxy
) -> None:
    for numbers in ([1], [1, 2, 4], [3], []):
        upload_id = bench.client.create_upload(bench.key)
        for number in numbers:
            bench.leave_part(upload_id, number, bench.part_bytes(number))
    proxied.upload_shard(NAMESPACE, bench.reader)
    assert proxy.body_bytes(PUT_PART) == bench.file_bytes - 3 * PART
    bench.assert_stored(tmp_path / "copy")


def test_an_upload_that_the_store_interrupted_goes_on(
    tmp_path: Path, bench: Bench, proxied: ObjectTier, proxy: HostileProxy
) -> None:
    """The store refuses one part until the retries are exhausted. The sidecar tries again later."""
    fault = proxy.add(part(PARTS), Answer(503, "SlowDown"), 5)
    with pytest.raises(UnavailableError, match="given up after 5"):
        proxied.upload_shard(NAMESPACE, bench.reader)
    there, before = bench.arrived(), proxy.body_bytes(PUT_PART)
    assert fault.applied == 5 and there > 0
    proxied.upload_shard(NAMESPACE, bench.reader)
    assert proxy.body_bytes(PUT_PART) - before == bench.file_bytes - there
    bench.assert_stored(tmp_path / "copy")


@pytest.mark.fault("The store loses a part of an upload, or another process aborts the upload")
def test_an_upload_that_was_taken_over_and_cannot_be_completed_is_given_up(
    tmp_path: Path, bench: Bench, proxied: ObjectTier, proxy: HostileProxy
) -> None:
    """Otherwise every retry would fail in a store that cannot assemble these parts."""
    upload_id = bench.client.create_upload(bench.key)
    bench.leave_part(upload_id, 1, bench.part_bytes(1))
    proxy.add(COMPLETE, Answer(500, "InternalError"), 5)
    with pytest.raises(UnavailableError, match="InternalError"):
        proxied.upload_shard(NAMESPACE, bench.reader)
    assert bench.unfinished() == ()
    proxied.upload_shard(NAMESPACE, bench.reader)
    bench.assert_stored(tmp_path / "copy")


@pytest.mark.parametrize("code", ["InvalidPart", "BadDigest"])
def test_parts_that_turn_out_bad_at_the_end_are_all_sent_again(
    tmp_path: Path, bench: Bench, proxied: ObjectTier, proxy: HostileProxy, code: str
) -> None:
    upload_id = bench.client.create_upload(bench.key)
    bench.leave_part(upload_id, 1, bench.part_bytes(1))
    proxy.add(COMPLETE, Answer(400, code))
    proxied.upload_shard(NAMESPACE, bench.reader)
    assert proxy.body_bytes(PUT_PART) == 2 * bench.file_bytes - PART
    bench.assert_stored(tmp_path / "copy")


def test_a_shard_that_went_bad_meanwhile_is_not_completed_from_good_parts(
    bench: Bench, proxied: ObjectTier, proxy: HostileProxy
) -> None:
    proxy.add(part(1), Answer(503, "SlowDown"), 5)
    with pytest.raises(UnavailableError):
        proxied.upload_shard(NAMESPACE, bench.reader)
    flip_bit(bench.path, 4096 + 100)
    with pytest.raises(CorruptionError, match="chunk"):
        proxied.upload_shard(NAMESPACE, bench.reader)
    assert bench.unfinished() == ()
    assert bench.client.head(bench.key) is None


@pytest.mark.parametrize(
    "answer", [Answer(403, "AccessDenied"), Answer(501, "NotImplemented")], ids=["403", "501"]
)
def test_where_uploads_cannot_be_listed_it_begins_anew(
    tmp_path: Path, bench: Bench, proxied: ObjectTier, proxy: HostileProxy, answer: Answer
) -> None:
    proxy.add(LIST_UPLOADS, answer, 10)
    proxied.upload_shard(NAMESPACE, bench.reader)
    assert proxy.body_bytes(PUT_PART) == bench.file_bytes
    bench.assert_stored(tmp_path / "copy")


def test_uploads_of_this_job_that_are_a_day_old_are_reaped(bench: Bench) -> None:
    mine = bench.client.create_upload(bench.key)
    other = bench.key.replace(str(JOB_UID), "another-job")
    bench.client.create_upload(other)
    objects = S3ObjectStore(bench.client)
    job = bench.key.partition("shards/")[0]

    def reap(older_than: timedelta) -> int:
        return objects.abort_stale([job, bench.key], older_than)

    assert reap(timedelta(hours=24)) == 0
    assert [upload.upload_id for upload in bench.unfinished()] == [mine]
    assert reap(timedelta(seconds=-5)) == 1
    assert bench.unfinished() == ()
    assert len(bench.client.list_uploads(other)[0]) == 1
