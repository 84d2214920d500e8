"""Bytes and orphans of a store, as one listing shows them, and the sweep of what no checkpoint needs."""

from __future__ import annotations

import json
import tracemalloc
from datetime import timedelta

import pytest
from tests.support.shards.builders import JOB_UID, manifest, payload, shard_file, shard_header
from tests.support.tiers.objects import MemoryObjectStore

from holdfast_core.contract import UsageContract
from holdfast_core.errors import ConfigError
from holdfast_core.ids import CheckpointId, JobUid, RestartRound, ShardRef, Step
from holdfast_core.shards.file import ShardRecord
from holdfast_core.store.rules import abandoned
from holdfast_core.store.tier import ObjectTier, Total
from holdfast_core.store.upload import Document
from holdfast_core.store.usage import (
    JobUsage,
    Orphan,
    StoredJobName,
    StoreUsage,
    sweep,
    usage_of,
)
from holdfast_core.tiers.objects import Listed, Page

NAMESPACE = "team-a"
JOB = StoredJobName(NAMESPACE, JOB_UID)
BASE = f"p/{NAMESPACE}/{JOB_UID}/"
DAY = timedelta(hours=24)
HOUR = timedelta(hours=1)


class Bucket:
    """A store in memory with a prefix."""

    def __init__(self) -> None:
        self.store = MemoryObjectStore(page_keys=3)
        self.tier = ObjectTier(self.store, "p")

    def put(self, key: str, size: int = 10) -> None:
        self.store.write(key, Document(payload(size)))

    def shard(self, step: int, round_: int = 0, *, committed: bool = True) -> ShardRecord:
        """Put shard and layout of a checkpoint of one rank, and its manifest."""
        header = shard_header(1000, step=step, round=round_, world_size=1)
        record = shard_file(header, payload(1000, seed=step))[1]
        self.put(BASE + key_of(record.ref, "shard"), 1000)
        self.put(BASE + key_of(record.ref, "layout"), 50)
        if committed:
            document = manifest([record]).to_bytes()
            self.tier.put_manifest(NAMESPACE, JOB_UID, record.ref.checkpoint, document)
        return record

    def age(self, by: timedelta) -> None:
        self.store.now += by

    def usage(self) -> StoreUsage:
        return usage_of(self.tier)

    def sweep(self, ended: tuple[JobUid, ...] = (), running: tuple[JobUid, ...] = ()) -> StoreUsage:
        return sweep(self.tier, self.usage(), DAY, ended=ended, running=running)

    def steps(self) -> set[int]:
        """Return the steps of which shards are stored."""
        keys = [key.split("/shards/s") for key in self.store.objects]
        return {int(found[1][:12]) for found in keys if len(found) == 2}


def key_of(ref: ShardRef, end: str) -> str:
    folder = f"s{ref.step:012d}-r{ref.round:06d}"
    return f"shards/{folder}/rank{ref.rank:06d}-{ref.blake3[3:19]}.{end}"


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


def orphans(usage: StoreUsage) -> dict[Orphan, tuple[int, int]]:
    return {
        kind: (total.objects, total.size_bytes)
        for kind, total in usage.orphans.items()
        if total.objects
    }


def test_the_usage_is_what_the_listing_says(bucket: Bucket) -> None:
    bucket.shard(10)
    bucket.shard(20)
    bucket.put(f"p/team-b/{'b' * 36}/runs/r000001.json", 7)
    bucket.put("p/team-b/bbb/shards/s000000000001-r000000/rank000000-0123456789abcdef.pack", 500)
    bucket.put("p/.holdfast-probe/x/y", 3)
    bucket.put("p/readme", 4)
    bucket.put("p/other/program/file", 5)
    bucket.put("elsewhere", 6)
    usage = bucket.usage()
    below = [data for key, (data, _) in bucket.store.objects.items() if key.startswith("p/")]
    assert (usage.total.objects, usage.total.size_bytes) == (len(below), sum(map(len, below)))
    assert set(usage.jobs) == {JOB, StoredJobName("team-b", JobUid("bbb"))}
    of_job = [d for key, (d, _) in bucket.store.objects.items() if key.startswith(BASE)]
    job = usage.jobs[JOB]
    assert (job.total.objects, job.total.size_bytes) == (len(of_job), sum(map(len, of_job)))
    assert job.checkpoints == 2
    assert {name: total.size_bytes for name, total in usage.namespaces().items()} == {
        NAMESPACE: job.total.size_bytes,
        "team-b": 500,
    }
    assert orphans(usage) == {}


def test_orphans_of_each_kind_are_found_by_their_class(bucket: Bucket) -> None:
    kept = bucket.shard(10)
    bucket.shard(5, committed=False)
    bucket.tier.put_references(
        NAMESPACE, JOB_UID, CheckpointId(Step(7), RestartRound(0)), {kept.ref.checkpoint: 3}
    )
    second = shard_file(shard_header(900, step=10, world_size=1), payload(900, seed=99))[1]
    bucket.put(BASE + key_of(second.ref, "pack"), 900)
    assert orphans(bucket.usage()) == {}, "all of it may belong to an upload under way"
    bucket.age(HOUR)
    usage = bucket.usage()
    assert orphans(usage) == {
        Orphan.SHARDS: (2, 1900),
        Orphan.LAYOUTS: (1, 50),
        Orphan.MARKERS: (2, 0),
    }
    assert usage.orphans[Orphan.SHARDS].oldest == HOUR


def test_what_an_existing_checkpoint_needs_is_no_orphan(bucket: Bucket) -> None:
    base, user = bucket.shard(10).ref.checkpoint, bucket.shard(20).ref.checkpoint
    bucket.tier.put_references(NAMESPACE, JOB_UID, user, {base: 3})
    bucket.tier.delete_checkpoint(NAMESPACE, JOB_UID, base)
    bucket.age(DAY)
    assert bucket.steps() == {10, 20}
    assert orphans(bucket.usage()) == {}
    bucket.sweep(ended=(JOB_UID,))
    assert bucket.steps() == {10, 20}


@pytest.mark.parametrize(
    ("ended", "running", "left"),
    [
        ((), (), {20, 30}),
        ((JOB_UID,), (), {20}),
        ((), (JOB_UID,), {10, 20, 30}),
        ((JOB_UID,), (JOB_UID,), {10, 20, 30}),
    ],
    ids=["unknown job", "ended job", "running job", "contradiction"],
)
def test_a_sweep_deletes_only_what_nobody_can_commit(
    bucket: Bucket, ended: tuple[JobUid, ...], running: tuple[JobUid, ...], left: set[int]
) -> None:
    """Step 10 is of a round before the newest committed one; step 30 may be an upload of days."""
    bucket.shard(10, committed=False)
    bucket.shard(20, round_=1)
    bucket.shard(30, round_=1, committed=False)
    bucket.age(DAY * 30)
    usage = bucket.sweep(ended, running)
    assert bucket.steps() == left
    assert usage.swept.size_bytes == 1050 * (3 - len(left))
    kept = {Orphan.SHARDS: (len(left) - 1, 1000 * (len(left) - 1))} if len(left) > 1 else {}
    assert {k: v for k, v in orphans(usage).items() if k is Orphan.SHARDS} == kept
    listed = sum(len(data) for data, _ in bucket.store.objects.values())
    assert usage.total.size_bytes == listed, "the report is of the store after the sweep"


@pytest.mark.fault("A job was deleted before its first upload ended")
def test_a_job_without_a_manifest_is_left_to_those_who_know_it(bucket: Bucket) -> None:
    bucket.shard(10, committed=False)
    bucket.age(DAY * 30)
    bucket.sweep()
    assert bucket.steps() == {10}
    bucket.sweep(ended=(JOB_UID,))
    assert bucket.store.objects == {}


def test_a_sweep_leaves_what_is_younger_than_the_grace(bucket: Bucket) -> None:
    bucket.shard(10, committed=False)
    bucket.shard(20, round_=1)
    bucket.age(DAY - timedelta(seconds=1))
    bucket.sweep()
    assert bucket.steps() == {10, 20}
    bucket.age(timedelta(seconds=1))
    bucket.sweep()
    assert bucket.steps() == {20}


def test_a_shard_that_a_manifest_does_not_name_is_swept(bucket: Bucket) -> None:
    named = bucket.shard(10)
    other = shard_file(shard_header(900, step=10, world_size=1), payload(900, seed=99))[1]
    bucket.put(BASE + key_of(other.ref, "shard"), 900)
    bucket.age(DAY)
    usage = bucket.sweep()
    assert usage.swept == Total(1, 900, DAY)
    assert BASE + key_of(named.ref, "shard") in bucket.store.objects
    assert orphans(usage) == {}


@pytest.mark.fault("A manifest of the store is damaged while its objects are judged")
def test_a_damaged_manifest_makes_no_orphans(bucket: Bucket) -> None:
    checkpoint = bucket.shard(10).ref.checkpoint
    other = shard_file(shard_header(900, step=10, world_size=1), payload(900, seed=99))[1]
    bucket.put(BASE + key_of(other.ref, "shard"), 900)
    key = f"{BASE}manifests/s{checkpoint.step:012d}/r000000.json"
    bucket.store.objects[key] = (b"damaged", timedelta(0))
    bucket.age(DAY)
    before = set(bucket.store.objects)
    assert orphans(bucket.sweep(ended=(JOB_UID,))) == {}
    assert set(bucket.store.objects) == before


def test_the_report_of_many_jobs_fits_into_a_termination_message() -> None:
    usage = StoreUsage(total=Total(objects=5000, size_bytes=1 << 50))
    for number in range(300):
        name = StoredJobName(f"{'n' * 58}-{number % 40:03d}", JobUid(f"{number:036d}"))
        usage.jobs[name] = JobUsage(Total(objects=10, size_bytes=(1 << 40) + number))
    text = usage.to_json()
    assert len(text) <= 4000
    found = json.loads(text)
    assert (found["bytes"], found["jobCount"]) == (1 << 50, 300)
    assert found["jobs"][0][1:] == [f"{299:036d}", (1 << 40) + 299, 10], "the largest ones stay"
    assert len(found["jobs"]) >= 8
    assert len(found["namespaces"]) >= 8


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"sweep_after_seconds": 60}',
        '{"sweep_after_seconds": true}',
        '{"sweep_after_seconds": "1d"}',
        '{"ended": 3}',
        '{"grace": 3600}',
    ],
)
def test_a_bad_request_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="HOLDFAST_USAGE"):
        UsageContract.from_json(text)


def test_a_request_comes_back() -> None:
    request = UsageContract(86400, (JobUid("a"),), (JobUid("b"), JobUid("c")))
    assert UsageContract.from_json(request.to_json()) == request
    assert UsageContract.from_json("") == UsageContract()


def test_nothing_of_the_newest_round_is_abandoned() -> None:
    old, new, newest = (
        CheckpointId(Step(step), RestartRound(round_)) for step, round_ in ((5, 0), (3, 2), (9, 2))
    )
    assert abandoned([old, new], [newest], ended=False) == {old}
    assert abandoned([old, new, newest], [newest], ended=True) == {old, new}
    assert abandoned([old, new], [], ended=False) == frozenset()


def test_memory_does_not_grow_with_the_objects_of_10_000_checkpoints() -> None:
    """Two ranks of each. The listing is made up page by page."""
    usage_of(Bucket().tier)
    tracemalloc.start()
    usage = usage_of(ObjectTier(_Made(checkpoints=10_000, ranks=2), "p"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert usage.jobs[JOB].checkpoints == 10_000
    assert usage.total.objects == 10_000 * 5
    assert peak < 8 << 20


class _Made(MemoryObjectStore):
    """A store whose listing is computed: only the keys of one page exist at a time."""

    def __init__(self, checkpoints: int, ranks: int) -> None:
        super().__init__()
        self._checkpoints = checkpoints
        self._ranks = ranks

    def list(self, prefix: str, page: str = "", *, folders: bool = False) -> Page:
        start = int(page or 0)
        count = self._checkpoints * (1 + 2 * self._ranks)
        made = (self._key(number) for number in range(start, min(start + 1000, count)))
        listed = tuple(Listed(key, HOUR, 10) for key in made)
        return Page(listed, str(start + 1000) if start + 1000 < count else "")

    def _key(self, number: int) -> str:
        if number < self._checkpoints:
            return f"{BASE}manifests/s{number:012d}/r000000.json"
        step, place = divmod(number - self._checkpoints, 2 * self._ranks)
        end = "shard" if place % 2 else "layout"
        name = f"rank{place // 2:06d}-0123456789abcdef.{end}"
        return f"{BASE}shards/s{step:012d}-r000000/{name}"
