"""A checkpoint is committed or refused while another process deletes or sweeps what it refers to.

The other process runs between two requests, at each of them in turn. `test_interleavings.py` searches for
longer stories.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from tests.support.shards.builders import JOB_UID, manifest, shard_file, shard_header
from tests.support.tiers.objects import MemoryObjectStore

from holdfast_core.format.canonical import digest_of
from holdfast_core.format.keys import job_prefix, shard_key
from holdfast_core.ids import CheckpointId, Rank, RestartRound, ShardRef, Step
from holdfast_core.store.commit import commit
from holdfast_core.store.tier import ObjectTier
from holdfast_core.store.upload import Document
from holdfast_core.tiers.objects import ObjectSource, Page

NAMESPACE = "team-a"
HOUR = timedelta(hours=1)
MANIFEST = manifest([shard_file(shard_header(100, step=20, world_size=1), bytes(100))[1]])


def at(step: int) -> CheckpointId:
    return CheckpointId(Step(step), RestartRound(0))


class Interrupted(MemoryObjectStore):
    """A store in which another process acts right before one of the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self.stop_at: int | None = None
        self.other: Callable[[], object] = lambda: None

    def _request(self) -> None:
        self.requests += 1
        if self.requests == self.stop_at:
            self.stop_at = None
            self.other()

    def write(self, key: str, source: ObjectSource, *, replace: bool = False) -> None:
        self._request()
        super().write(key, source, replace=replace)

    def get(self, key: str) -> bytes:
        self._request()
        return super().get(key)

    def list(self, prefix: str, page: str = "", *, folders: bool = False) -> Page:
        self._request()
        return super().list(prefix, page, folders=folders)

    def put_shard(self, checkpoint: CheckpointId, rank: int = 0) -> None:
        ref = ShardRef(
            JOB_UID, checkpoint.step, checkpoint.round, Rank(rank), digest_of(b"%d" % rank)
        )
        key = job_prefix(NAMESPACE, JOB_UID) + shard_key(ref)
        MemoryObjectStore.write(self, key, Document(b"shard"))

    def shards(self, checkpoint: CheckpointId) -> int:
        return sum(f"/shards/s{checkpoint.step:012d}-" in key for key in self.objects)


@pytest.fixture
def store() -> Interrupted:
    return Interrupted()


@pytest.mark.parametrize("request_number", range(1, 8))
def test_a_base_that_is_deleted_meanwhile_keeps_its_shards_or_the_commit_is_refused(
    store: Interrupted, request_number: int
) -> None:
    tier = ObjectTier(store)
    store.put_shard(at(10))
    tier.put_manifest(NAMESPACE, JOB_UID, at(10), b"{}")
    store.requests, store.stop_at = 0, request_number
    store.other = lambda: tier.delete_checkpoint(NAMESPACE, JOB_UID, at(10))
    committed = commit(tier, NAMESPACE, MANIFEST, {at(10): 50}, [at(10)])
    assert committed == (MANIFEST.checkpoint in tier.list_manifests(NAMESPACE, JOB_UID))
    assert not committed or store.shards(at(10)) == 1
    tier.close()


@pytest.mark.parametrize("request_number", range(1, 5))
def test_a_sweep_leaves_an_upload_that_begins_meanwhile(
    store: Interrupted, request_number: int
) -> None:
    """The coordinator records an upload before its first object is stored."""
    tier = ObjectTier(store)
    store.put_shard(at(5))
    for step in (10, 30):
        tier.put_manifest(NAMESPACE, JOB_UID, at(step), b"{}")
    uploading = set[CheckpointId]()

    def begin() -> None:
        uploading.add(at(20))
        store.put_shard(at(20))

    store.requests, store.stop_at, store.other = 0, request_number, begin
    tier.sweep(NAMESPACE, JOB_UID, RestartRound(0), timedelta(0), lambda: tuple(uploading))
    assert uploading, "the upload began during the sweep"
    assert store.shards(at(20)) == 1
    assert store.shards(at(5)) == 0
    tier.close()


def test_a_sweep_leaves_a_checkpoint_with_one_young_object(store: Interrupted) -> None:
    """A coordinator that was replaced may still upload the other ranks' shards."""
    tier = ObjectTier(store)
    tier.put_manifest(NAMESPACE, JOB_UID, at(30), b"{}")
    store.put_shard(at(20), rank=0)
    store.now = HOUR
    store.put_shard(at(20), rank=1)

    def swept() -> frozenset[CheckpointId]:
        return tier.sweep(NAMESPACE, JOB_UID, RestartRound(0), HOUR, tuple)

    assert swept() == frozenset()
    assert store.shards(at(20)) == 2
    store.now = 2 * HOUR
    assert swept() == {at(20)}
    assert store.shards(at(20)) == 0
    tier.close()
