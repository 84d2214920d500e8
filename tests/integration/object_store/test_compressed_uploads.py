"""Uploads that are compressed on the fly, to real stores that fail, lose data, or already hold the object."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.integration.object_store.killed import kill_in_upload
from tests.support.hang import HANG_SECONDS
from tests.support.servers.hostile_s3 import (
    Answer,
    FlipRequest,
    FreezeRequest,
    HostileProxy,
    LoseReply,
    Seen,
    on,
)
from tests.support.servers.store_server import StoreServer
from tests.support.shards.builders import payload, weights
from tests.support.shards.replicas import NAMESPACE, WIDTH, Compressing, key_of, stored_objects
from tests.support.shards.shard_files import flip_bit
from tests.support.tiers.stores import s3_tier
from tests.support.trainer.launched import until

from holdfast_core.contract import StoreConfig
from holdfast_core.errors import AlreadyExistsError, CorruptionError, UnavailableError
from holdfast_core.format.canonical import crc32c
from holdfast_core.node.files import BufferPool
from holdfast_core.node.shard_file import DiskShardReader
from holdfast_core.shards.file import CHUNK_BYTES
from holdfast_core.shards.pack import pack_index
from holdfast_core.store.s3.client import CHECKSUM_HEADER, S3Client, S3Request, encode_crc
from holdfast_core.store.s3.errors import Retrier
from holdfast_core.store.s3.upload import MAX_BUFFERED_BYTES, Transport, Upload
from holdfast_core.store.tier import ObjectTier
from holdfast_core.store.upload import CompressedPack, WhileWanted

pytestmark = pytest.mark.integration
MIB = 1 << 20


def test_what_is_there_is_looked_at_by_the_caller(
    gang: Compressing, proxied: ObjectTier, proxy: HostileProxy
) -> None:
    """The check for an existing object neither compresses nor sends anything."""
    gang.write(1, weights(9 * MIB))
    stored = gang.compress(1, 0)
    gang.tier = proxied
    with pytest.raises(AlreadyExistsError, match="expected nothing"):
        gang.compress(1, 0)
    assert [seen.method for seen in proxy.requests] == ["HEAD"]
    assert gang.tier.stored(NAMESPACE, gang.ref(1, 0)).index == stored


def test_bytes_that_went_bad_on_the_node_are_not_stored(
    gang: Compressing, server: StoreServer, store: StoreConfig
) -> None:
    """The last of several parts has the wrong bytes. The store must not keep the parts before it."""
    gang.write(1, weights(23 * MIB))
    reader = gang.readers[1, 0]
    flip_bit(Path(os.readlink(f"/proc/self/fd/{reader.fd}")), 4096 + 22 * MIB)
    with pytest.raises(CorruptionError, match="chunk 88"):
        gang.compress(1, 0)
    assert stored_objects(server, store) == {}
    client = S3Client(store, server.credentials)
    assert client.list_uploads(key_of(store, gang.ref(1, 0)))[0] == ()


# ------------------------------------------------------------------ memory of uploads


@contextlib.contextmanager
def memory() -> Iterator[Callable[[], tuple[int, int]]]:
    """Return a function for the bytes that are allocated now, and their peak.

    The garbage collector is disabled, because it frees cycles at unpredictable times: memory counts as free
    only if no reference is left.
    """
    gc.disable()
    tracemalloc.start()
    try:
        yield tracemalloc.get_traced_memory
    finally:
        tracemalloc.stop()
        gc.enable()


def four_wait(then: Callable[[int], object]) -> Callable[[int], None]:
    """Return a throttle that delays the first eight parts until groups of four wait.

    Each of them then calls `then` with the number of earlier groups, one after the other: VersityGW answers
    500 to a list of uploads during an abort.
    """
    waiting, begun, alone = threading.Barrier(4), itertools.count(), threading.Lock()

    def throttle(_length: int) -> None:
        number = next(begun)
        if number < 8:
            waiting.wait(HANG_SECONDS)
            with alone:
                then(number // 4)

    return throttle


def four_at_once(store: StoreConfig) -> StoreConfig:
    return replace(store, part_size_mib=32, max_concurrency=4)


@pytest.mark.parametrize("vanishes", [False, True], ids=["made once", "made again"])
def test_what_waits_for_the_store_is_bounded(
    gang: Compressing, server: StoreServer, store: StoreConfig, vanishes: bool
) -> None:
    """The bound also holds when another client aborts the upload while parts wait."""
    gang.write(1, payload(96 * MIB))
    key, client = key_of(store, gang.ref(1, 0)), S3Client(store, server.credentials)
    aborted: list[str] = []

    def abort(before: int) -> None:
        for pending in client.list_uploads(key)[0] if vanishes and not before else ():
            client.abort_upload(key, pending.upload_id)
            aborted.append(pending.upload_id)

    gang.tier = s3_tier(four_at_once(store), server.credentials, throttle=four_wait(abort))
    with memory() as held:
        stored = gang.compress(1, 0)
        _, peak = held()
    assert bool(aborted) is vanishes
    assert stored.stored_bytes == 96 * MIB
    assert 32 * MIB < peak < MAX_BUFFERED_BYTES + 4 * MIB
    gang.assert_comes_back(1, 0)
    gang.tier.close()


class Lingering(ThreadPoolExecutor):
    """Workers that keep references to each call and its result, as a thread does that does not run yet."""

    def __init__(self) -> None:
        super().__init__(4)
        self.calls: list[object] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        self.calls.append((fn, args, kwargs, future))
        return future


@pytest.mark.fault("A part of a compressed upload is still referred to after it was sent")
@pytest.mark.parametrize("vanishes", [False, True], ids=["made once", "made again"])
def test_the_bytes_of_a_part_that_was_sent_are_free_before_the_next_is_made(
    gang: Compressing, server: StoreServer, store: StoreConfig, vanishes: bool
) -> None:
    """The bytes are also free while the threads that sent them have not returned.

    Three parts wait or are sent while the fourth is made, which takes twice its bytes.
    """
    gang.write(1, payload(96 * MIB))
    reader = gang.readers[1, 0]
    key, client = key_of(store, gang.ref(1, 0)), S3Client(four_at_once(store), server.credentials)

    def abort(before: int) -> None:
        for pending in client.list_uploads(key)[0] if vanishes and not before else ():
            client.abort_upload(key, pending.upload_id)

    with Lingering() as workers:
        transport = Transport(client, Retrier(), workers, four_wait(abort))
        source = CompressedPack(reader, gang.alone(1, 0), bytes([WIDTH] * 384))
        with memory() as held:
            Upload(transport, key, source).run()
            _, peak = held()
    client.close()
    assert len(workers.calls) > 12
    assert 32 * MIB < peak < MAX_BUFFERED_BYTES - 4 * MIB
    gang.assert_comes_back(1, 0)


def test_a_source_that_may_end_keeps_no_part(gang: Compressing) -> None:
    gang.write(1, payload(23 * MIB))
    pack = CompressedPack(gang.readers[1, 0], gang.alone(1, 0), bytes([WIDTH] * 92))
    with memory() as held:
        parts = WhileWanted(pack, threading.Event()).parts(8 * MIB)
        assert not next(parts).is_last
        kept, _ = held()
        assert kept < 10 * MIB, "the bytes of which the next part is made, and no part"


def test_an_upload_that_failed_holds_nothing(
    gang: Compressing, server: StoreServer, store: StoreConfig
) -> None:
    """The upload is retried while the store is unavailable, and must not keep memory between attempts."""
    gang.write(1, payload(96 * MIB))

    def fail(_before: int) -> None:
        raise UnavailableError("the store is away")

    gang.tier = s3_tier(four_at_once(store), server.credentials, throttle=four_wait(fail))
    with memory() as held:
        failed = ""
        try:
            gang.compress(1, 0)
        except UnavailableError as error:
            failed = str(error)
        _, peak = held()
        # A thread of the tier that is not running right now has not returned from its call yet.
        until(lambda: held()[0] < MIB, "the memory of the attempt is free")
    assert failed == "the store is away"
    assert peak > 32 * MIB
    gang.tier.close()


class Closing(DiskShardReader):
    """Closes the tier when chunk 70 is read."""

    tier: ObjectTier

    def read_payload_into(self, offset: int, buffer: memoryview) -> None:
        if offset == 70 * CHUNK_BYTES:
            self.tier.close()
        super().read_payload_into(offset, buffer)


def test_an_upload_that_is_interrupted_by_the_end_stays_to_be_gone_on_with(
    gang: Compressing, server: StoreServer, store: StoreConfig
) -> None:
    gang.write(1, payload(24 * MIB))
    config = replace(store, part_size_mib=5, max_concurrency=1)
    gang.tier = s3_tier(config, server.credentials)
    reader = gang.readers[1, 0]
    path = Path(os.readlink(f"/proc/self/fd/{reader.fd}"))
    with Closing.open(path, reader.record.ref, BufferPool(MIB, keep=2)) as closing:
        closing.tier = gang.tier
        with pytest.raises(UnavailableError, match="being closed"):
            gang.tier.upload_encoded(NAMESPACE, closing, gang.alone(1, 0), bytes([WIDTH] * 96))
    client = S3Client(store, server.credentials)
    (pending,), _ = client.list_uploads(key_of(store, gang.ref(1, 0)))
    assert [part.number for part in client.list_parts(pending.key, pending.upload_id)] == [1, 2, 3]


UPLOAD_FAULTS = {
    "a part that the store has no time for": (on("PUT", query="partNumber=2&"), Answer(503)),
    "a bit that flips on the way": (on("PUT", query="partNumber=2&"), FlipRequest(1000)),
    "a reply to a part that is lost": (on("PUT", query="partNumber=1&"), LoseReply()),
    "a reply to the completion that is lost": (on("POST", query="uploadId="), LoseReply()),
    "an upload that vanished": (on("PUT", query="partNumber=2&"), Answer(404, "NoSuchUpload")),
}


@pytest.mark.parametrize(("matches", "fault"), UPLOAD_FAULTS.values(), ids=UPLOAD_FAULTS.keys())
def test_an_upload_gets_over_it(
    gang: Compressing,
    proxied: ObjectTier,
    proxy: HostileProxy,
    tier: ObjectTier,
    matches: Callable[[Seen], bool],
    fault: Answer | FlipRequest | LoseReply,
) -> None:
    gang.write(1, weights(23 * MIB))
    gang.tier = proxied
    struck = proxy.add(matches, fault)
    gang.compress(1, 0)
    assert struck.applied == 1
    gang.tier = tier
    gang.assert_comes_back(1, 0)


def test_an_upload_that_was_killed_goes_on(
    gang: Compressing, server: StoreServer, store: StoreConfig, proxy: HostileProxy
) -> None:
    """SIGKILL arrives in the third part.

    Compression is deterministic, so the first two parts are not sent again.
    """
    gang.write(1, weights(24 * MIB))
    config = replace(
        server.config(store.prefix, endpoint=proxy.endpoint), part_size_mib=5, max_concurrency=1
    )
    proxy.add(on("PUT", query="partNumber=3&"), FreezeRequest(MIB))
    kill_in_upload(proxy, config, gang.readers[1, 0], "", str(WIDTH))
    sent: list[int] = []
    config = replace(store, part_size_mib=5)
    gang.tier = s3_tier(config, server.credentials, sent=sent.append)
    stored = gang.compress(1, 0)
    gang.tier.close()
    body = stored.stored_bytes + len(pack_index(stored)) - 10 * MIB
    assert body <= sum(sent) < body + 10_000  # the rest is the request that completes the upload
    gang.tier = s3_tier(store, server.credentials)
    gang.assert_comes_back(1, 0)
    gang.tier.close()


def test_parts_of_another_attempt_are_not_mixed_in(
    gang: Compressing, server: StoreServer, store: StoreConfig
) -> None:
    """The other attempt did not compress, or used another release of zstd.

    It left more parts, of equal lengths. Only the one part with equal bytes is kept.
    """
    gang.write(1, weights(24 * MIB))
    alone = gang.compress(1, 0)
    key, client = key_of(store, gang.ref(1, 0)), S3Client(store, server.credentials)
    with client.stream_range(key, 0, 5 * MIB) as reply:
        same = reply.read(5 * MIB)
    client.delete([key])
    upload_id = client.create_upload(key)
    for number in range(1, 8):
        data = same if number == 1 else payload(5 * MIB, seed=number)
        query = {"partNumber": str(number), "uploadId": upload_id}
        checksum = {CHECKSUM_HEADER: encode_crc(crc32c(data))}
        client.send(S3Request("PUT", key, query, checksum, data)).checked()
    sent: list[int] = []
    config = replace(store, part_size_mib=5)
    gang.tier = s3_tier(config, server.credentials, sent=sent.append)
    assert gang.compress(1, 0) == alone
    assert client.list_uploads(key)[0] == ()
    body = alone.stored_bytes + len(pack_index(alone)) - 5 * MIB
    assert body <= sum(sent) < body + 10_000  # the rest is the request that completes the upload
    gang.assert_comes_back(1, 0)
    gang.tier.close()


def test_of_two_that_are_made_at_the_same_time_the_first_stays(
    gang: Compressing,
    proxied: ObjectTier,
    proxy: HostileProxy,
    tier: ObjectTier,
    server: StoreServer,
    store: StoreConfig,
) -> None:
    """Another attempt, without compression, completes just before this one."""
    gang.write(1, weights(23 * MIB))
    alone = gang.alone(1, 0)

    def other_wins(seen: Seen) -> bool:
        if seen.method == "POST" and "uploadId=" in seen.query:
            tier.upload_pack(NAMESPACE, gang.readers[1, 0], alone)
        return False

    proxy.add(other_wins, Answer(500))
    gang.tier = proxied
    # One server refuses. The other reports success, although the stored object is not the one that was
    # sent.
    with pytest.raises((AlreadyExistsError, UnavailableError), match=r"expected \d+ bytes"):
        gang.compress(1, 0)
    with pytest.raises(AlreadyExistsError, match="expected nothing"):
        gang.compress(1, 0)
    assert tier.stored(NAMESPACE, gang.ref(1, 0)).index == alone
    client = S3Client(store, server.credentials)
    assert client.list_uploads(key_of(store, gang.ref(1, 0)))[0] == ()
    gang.assert_comes_back(1, 0)
