"""The behaviour of the object tier in any store. A test class subclasses ObjectTierContract."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.shards.builders import (
    JOB_UID,
    manifest,
    payload,
    rank_layout,
    shard_file,
    shard_header,
    weights,
)
from tests.support.shards.replicas import NAMESPACE, Compressing
from tests.support.shards.shard_files import CopyWriters, flip_bit, write_shard

from holdfast.testing.object_store_contract import everything
from holdfast_core.errors import AlreadyExistsError, CorruptionError, FormatError, NotFoundError
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import CheckpointId, Digest, Rank, RestartRound, ShardRef, Step
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.file import CHUNK_BYTES
from holdfast_core.store.commit import commit
from holdfast_core.store.tier import ObjectTier
from holdfast_core.store.upload import Document
from holdfast_core.tiers.objects import ObjectStore, Page

MIB = 1 << 20
PREFIX = "some/prefix"
SIZES = {
    "empty": 0,
    "small": 70_001,
    "one part": 4 * MIB,
    "a chunk and a byte": CHUNK_BYTES + 1,
    "three parts": 11 * MIB + 4097,
}


def checkpoint(step: int, restart_round: int = 0) -> CheckpointId:
    return CheckpointId(Step(step), RestartRound(restart_round))


class ObjectTierContract:
    """Tests of the object tier.

    The module of a subclass `TestX(ObjectTierContract)` has the fixture `objects`: a store without objects.
    """

    @pytest.fixture
    def tier(self, objects: ObjectStore) -> Iterator[ObjectTier]:
        tier = ObjectTier(objects, PREFIX)
        yield tier
        tier.close()

    @pytest.fixture
    def gang(self, tmp_path: Path, tier: ObjectTier) -> Iterator[Compressing]:
        found = Compressing(tmp_path, tier)
        yield found
        found.close()

    @pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
    def test_a_whole_shard_reads_back(
        self, tmp_path: Path, tier: ObjectTier, objects: ObjectStore, size: int
    ) -> None:
        source, target = tmp_path / "source", tmp_path / "target"
        source.mkdir()
        target.mkdir()
        with write_shard(source, shard_header(size), os.urandom(size)) as reader:
            tier.upload_shard(NAMESPACE, reader)
            tier.upload_shard(NAMESPACE, reader)
            ref = reader.record.ref
            assert tier.has_whole(NAMESPACE, ref)
            assert tier.download_shard(NAMESPACE, ref, CopyWriters(target)) == reader.record
        (before,), (after,) = source.iterdir(), target.iterdir()
        assert after.read_bytes() == before.read_bytes()
        assert [item.key for item in everything(objects, "")] == [
            f"{PREFIX}/{NAMESPACE}/{JOB_UID}/shards/s000000000010-r000000/"
            f"rank000000-{ref.blake3[3:19]}.shard"
        ]

    def test_a_shard_moves_from_one_node_tier_to_another(
        self, tmp_path: Path, gang: Compressing
    ) -> None:
        gang.write(1, payload(9 * MIB), payload(9 * MIB))
        node = DiskNodeTier(tmp_path / "node", capacity_bytes=1 << 30)
        node.open()
        for rank in range(2):
            assert gang.upload(1, rank) > 0
        for rank in range(2):
            ref = gang.ref(1, rank)
            gang.tier.download_shard(NAMESPACE, ref, node.begin_copy)
            with node.open_shard(ref) as reader:
                reader.verify()

    def test_ranges_of_a_whole_shard_read_back(self, gang: Compressing) -> None:
        gang.write(1, payload(9 * MIB + 1))
        gang.tier.upload_shard(NAMESPACE, gang.readers[1, 0])
        gang.assert_ranges_come_back(1, 0, [range(0, 1), range(3, 20), range(36, 37)])

    @pytest.mark.parametrize("size", [200_000, 11 * MIB], ids=["one part", "three parts"])
    def test_a_shard_that_is_damaged_on_the_node_is_not_stored(
        self, tmp_path: Path, tier: ObjectTier, objects: ObjectStore, size: int
    ) -> None:
        """The checksums of the parts are those of the tensors, and not of the damaged file."""
        with write_shard(tmp_path, shard_header(size), os.urandom(size)) as reader:
            flip_bit(next(tmp_path.glob("*.shard")), 4096 + 1000)
            with pytest.raises(CorruptionError, match="chunk"):
                tier.upload_shard(NAMESPACE, reader)
        assert everything(objects, "") == []
        assert list(objects.unfinished("")) == []

    def test_replicas_and_later_steps_store_common_chunks_once(
        self, gang: Compressing, objects: ObjectStore
    ) -> None:
        """Plain and compressed packs refer to each other, within a step and to the step before."""
        frozen = weights(14 * MIB)
        compressed = {(1, 0), (2, 1), (3, 0), (3, 1)}
        for step, base in ((1, None), (2, 1), (3, 2)):
            gang.write(step, *(frozen + weights(MIB + 100, seed=step) for _ in range(2)))
            for rank in range(2):
                if (step, rank) in compressed:
                    gang.compress(step, rank, base)
                else:
                    assert gang.upload(step, rank, base) > 0
        for step in (1, 2, 3):
            for rank in range(2):
                index = gang.tier.stored(NAMESPACE, gang.ref(step, rank)).index
                assert index is not None
                assert {(s.step, s.rank) for s in index.sources} >= {(step, 1 - rank)}
                gang.assert_comes_back(step, rank)
                last = len(index.places) - 1
                gang.assert_ranges_come_back(
                    step, rank, [range(1, 3), range(14, 35), range(50, last), range(last, last + 1)]
                )
        stored = sum(objects.size(item.key) or 0 for item in everything(objects, ""))
        assert stored < 1.5 * 17 * MIB, "the state has 15 MiB in each of two ranks and three steps"

    def test_another_pack_of_the_same_shard_does_not_replace_the_first(
        self, gang: Compressing
    ) -> None:
        gang.write(1, payload(9 * MIB), payload(9 * MIB))
        for rank in range(2):
            gang.upload(1, rank)
        with pytest.raises(AlreadyExistsError):
            gang.tier.upload_pack(NAMESPACE, gang.readers[1, 0], gang.alone(1, 0))
        with pytest.raises(AlreadyExistsError):
            gang.put(1, 0, gang.alone(1, 0))
        gang.assert_comes_back(1, 0)

    def test_a_pack_whose_source_is_gone_is_corrupt(self, gang: Compressing) -> None:
        gang.write(1, payload(9 * MIB), payload(9 * MIB))
        gang.upload(1, 0)
        with pytest.raises(CorruptionError, match=r"needs chunks of .*rank=1"):
            gang.assert_comes_back(1, 0)
        gang.tier.upload_shard(NAMESPACE, gang.readers[1, 0])
        gang.assert_comes_back(1, 0)

    def test_absent_objects_are_reported(self, tmp_path: Path, tier: ObjectTier) -> None:
        digest = Digest("b3:" + "0" * 64)
        ref = ShardRef(JOB_UID, Step(1), RestartRound(0), shard_header(0).rank, digest)
        writers = CopyWriters(tmp_path)
        with pytest.raises(NotFoundError, match="no such shard, and no pack"):
            tier.download_shard(NAMESPACE, ref, writers)
        assert writers.opened == []
        with pytest.raises(NotFoundError, match="no such shard"):
            tier.open_shard(NAMESPACE, ref)
        with pytest.raises(NotFoundError):
            tier.stored(NAMESPACE, ref, sure=False)
        with pytest.raises(NotFoundError):
            tier.get_manifest(NAMESPACE, JOB_UID, checkpoint(1))
        assert tier.get_references(NAMESPACE, JOB_UID, checkpoint(1)) == {}
        with pytest.raises(NotFoundError):
            tier.get_layout(NAMESPACE, ref, digest)
        assert not tier.has_whole(NAMESPACE, ref)
        assert tier.list_manifests(NAMESPACE, JOB_UID) == ()
        tier.delete_checkpoint(NAMESPACE, JOB_UID, checkpoint(1))

    def test_a_manifest_is_put_once(self, tier: ObjectTier) -> None:
        first = tier.put_manifest(NAMESPACE, JOB_UID, checkpoint(7), b'{"a":1}')
        assert tier.put_manifest(NAMESPACE, JOB_UID, checkpoint(7), b'{"a":1}') == first
        with pytest.raises(AlreadyExistsError):
            tier.put_manifest(NAMESPACE, JOB_UID, checkpoint(7), b'{"a":2}')
        assert tier.get_manifest(NAMESPACE, JOB_UID, checkpoint(7)) == b'{"a":1}'

    def test_manifests_are_listed_in_order(self, tier: ObjectTier) -> None:
        wanted = [checkpoint(step, step % 3) for step in range(0, 60, 3)]
        for found in reversed(wanted):
            tier.put_manifest(NAMESPACE, JOB_UID, found, b"{}")
        assert tier.list_manifests(NAMESPACE, JOB_UID) == tuple(wanted)
        assert tier.list_manifests("team-b", JOB_UID) == ()

    def test_a_layout_is_an_object_of_its_checkpoint(
        self, tmp_path: Path, tier: ObjectTier, objects: ObjectStore
    ) -> None:
        put_step(tmp_path, tier, 1, needs={})
        ref = shard_file(shard_header(10, step=1), b"x" * 10)[1].ref
        tier.put_layout(NAMESPACE, ref, rank_layout())
        tier.put_layout(NAMESPACE, ref, rank_layout())
        assert tier.get_layout(NAMESPACE, ref, digest_of(rank_layout())) == rank_layout()
        assert len(shards_of(objects, 1)) == 2
        tier.delete_checkpoint(NAMESPACE, JOB_UID, checkpoint(1))
        assert everything(objects, "") == []

    def test_a_layout_without_a_manifest_is_swept(
        self, tier: ObjectTier, objects: ObjectStore
    ) -> None:
        ref = shard_file(shard_header(10, step=1), b"x" * 10)[1].ref
        tier.put_layout(NAMESPACE, ref, rank_layout())
        assert sweep(tier) == {checkpoint(1)}
        assert everything(objects, "") == []

    def test_references_keep_the_objects_of_a_deleted_checkpoint(
        self, tmp_path: Path, tier: ObjectTier, objects: ObjectStore
    ) -> None:
        for step in (1, 2):
            put_step(tmp_path, tier, step, needs={} if step == 1 else {checkpoint(1): 10})
        tier.delete_checkpoint(NAMESPACE, JOB_UID, checkpoint(1))
        assert tier.list_manifests(NAMESPACE, JOB_UID) == (checkpoint(2),)
        assert len(shards_of(objects, 1)) == 1
        assert sweep(tier) == frozenset(), "the second checkpoint needs the shard"
        tier.delete_checkpoint(NAMESPACE, JOB_UID, checkpoint(2))
        assert shards_of(objects, 2) == []
        assert sweep(tier) == {checkpoint(1)}
        assert everything(objects, "") == []

    def test_references_are_markers_of_both_checkpoints(
        self, tier: ObjectTier, objects: ObjectStore
    ) -> None:
        one, two, three = (checkpoint(step) for step in (1, 2, 3))
        tier.put_references(NAMESPACE, JOB_UID, three, {one: 5})
        tier.put_references(NAMESPACE, JOB_UID, three, {one: 7, two: 9})
        assert tier.get_references(NAMESPACE, JOB_UID, three) == {one: 7, two: 9}
        assert tier.get_references(NAMESPACE, JOB_UID, one) == {}
        tier.delete_checkpoint(NAMESPACE, JOB_UID, three)
        assert everything(objects, "") == []

    def test_the_markers_of_an_upload_that_never_ended_keep_objects_until_a_sweep(
        self, tmp_path: Path, tier: ObjectTier, objects: ObjectStore
    ) -> None:
        put_step(tmp_path, tier, 1, needs={})
        tier.put_references(NAMESPACE, JOB_UID, checkpoint(2), {checkpoint(1): 10})
        objects.delete([item.key for item in everything(objects, "") if "/needs-" in item.key])
        tier.delete_checkpoint(NAMESPACE, JOB_UID, checkpoint(1))
        assert len(shards_of(objects, 1)) == 1
        job = NAMESPACE, JOB_UID, RestartRound(1)
        assert tier.sweep(*job, timedelta(hours=1), tuple) == frozenset(), "the marker is young"
        assert tier.sweep(*job, timedelta(0), lambda: {checkpoint(2)}) == frozenset()
        assert tier.sweep(*job, timedelta(0), tuple) == {checkpoint(1)}
        assert [item.key for item in everything(objects, "")] == []

    def test_a_sweep_asks_the_store_for_checkpoints_and_not_for_their_objects(
        self, tier: ObjectTier, objects: ObjectStore
    ) -> None:
        """What a sweep costs must not grow with the ranks of the checkpoints that exist."""
        base = f"{PREFIX}/{NAMESPACE}/{JOB_UID}"
        for step in range(1, 4):
            tier.put_manifest(NAMESPACE, JOB_UID, checkpoint(step), b"{}")
            for rank in range(20):
                name = f"shards/s{step:012d}-r000000/rank{rank:06d}-{'0' * 16}.pack"
                objects.write(f"{base}/{name}", Document(b"x"))
        counted = Counting(objects)
        job = NAMESPACE, JOB_UID, RestartRound(1)
        assert ObjectTier(counted, PREFIX).sweep(*job, timedelta(0), tuple) == frozenset()
        assert counted.listed <= 2 * 3, "three folders of objects, and three manifests"

    def test_a_sweep_leaves_young_and_uploading_checkpoints(
        self, tmp_path: Path, tier: ObjectTier, objects: ObjectStore
    ) -> None:
        with write_shard(tmp_path, shard_header(10, step=1), b"x" * 10) as reader:
            tier.upload_shard(NAMESPACE, reader)
        quiet, one = timedelta(hours=1), checkpoint(1)
        job = NAMESPACE, JOB_UID, RestartRound(1)
        assert tier.sweep(*job, quiet, tuple) == frozenset()
        assert tier.sweep(*job, timedelta(0), lambda: {one}) == frozenset()
        assert len(shards_of(objects, 1)) == 1
        assert tier.sweep(*job, timedelta(0), tuple) == {one}
        assert everything(objects, "") == []

    def test_a_commit_without_its_base_is_refused_until_nothing_needs_it(
        self, tmp_path: Path, tier: ObjectTier
    ) -> None:
        _, record = shard_file(shard_header(10, step=2), b"x" * 10)
        own = manifest([record])
        needs = {checkpoint(1): 10}
        assert not commit(tier, NAMESPACE, own, needs, {checkpoint(1)})
        assert tier.list_manifests(NAMESPACE, JOB_UID) == ()
        assert commit(tier, NAMESPACE, own, {}, set())
        assert commit(tier, NAMESPACE, own, needs, {checkpoint(1)}), "it is committed"

    @pytest.mark.parametrize(
        "call",
        [
            lambda tier: tier.list_manifests("../other", JOB_UID),
            lambda tier: tier.get_manifest("team-a", "../../x", checkpoint(1)),
            lambda tier: tier.get_layout(
                "team-a",
                ShardRef(JOB_UID, Step(1), RestartRound(0), Rank(0), Digest("b3:../../../x")),
                digest_of(b""),
            ),
        ],
        ids=["namespace", "job uid", "digest"],
    )
    def test_names_that_would_leave_the_prefix_are_refused(
        self, tier: ObjectTier, call: Callable[[ObjectTier], object]
    ) -> None:
        with pytest.raises(FormatError):
            call(tier)


class Counting:
    """ObjectStore that counts what its listings return. It has no other method of the contract."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self.listed = 0

    def list(self, prefix: str, page: str = "", *, folders: bool = False) -> Page:
        found = self._inner.list(prefix, page, folders=folders)
        self.listed += len(found.objects) + len(found.folders)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def put_step(folder: Path, tier: ObjectTier, step: int, needs: dict[CheckpointId, int]) -> None:
    """Store a checkpoint of one rank whose references name these checkpoints."""
    with write_shard(folder, shard_header(10, step=step), b"x" * 10) as reader:
        tier.upload_shard(NAMESPACE, reader)
        own = manifest([reader.record])
    assert commit(tier, NAMESPACE, own, needs, set(needs))


def shards_of(objects: ObjectStore, step: int) -> list[str]:
    return [item.key for item in everything(objects, "") if f"/shards/s{step:012d}-" in item.key]


def sweep(tier: ObjectTier) -> frozenset[CheckpointId]:
    return tier.sweep(NAMESPACE, JOB_UID, RestartRound(1), timedelta(0), tuple)
