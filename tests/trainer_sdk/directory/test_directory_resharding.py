"""A payload that is assembled from other ranks' shard files in a directory is verified, also where one of
them is bad."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.support.shards.builders import BytesSource, build_manifest
from tests.support.shards.placements import Tensor, layout_of, objects_of

from holdfast.directory.choice import JOB_UID, NAMESPACE
from holdfast.directory.commit import Committer
from holdfast.directory.folder_store import FolderStore
from holdfast.directory.open_folder import OpenFolder, ServiceOptions
from holdfast.directory.persister import DirectoryService
from holdfast.directory.restore import FolderPlaces, ShardFetcher
from holdfast.slots.staging import SlotRing
from holdfast_core.errors import (
    NotFoundError,
    RefusedError,
    StateMismatchError,
    UnavailableError,
)
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.manifest import JobIdentity, Manifest, parse_manifest
from holdfast_core.format.rank_layout import RankLayout, layout_digests
from holdfast_core.ids import CheckpointId, Rank, RestartRound, ShardRef, Step
from holdfast_core.messages.schema import Fill, Policy, Restore
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.reading import Reader, run_blocking
from holdfast_core.reshard.plan import payload_plan
from holdfast_core.shards.file import ShardHeader, Trailer
from holdfast_core.shm.shared_files import LayoutFiles
from holdfast_core.shm.slot_file import SlotFile, SlotState
from holdfast_core.store.directory import DirectoryObjectStore
from holdfast_core.store.tier import ObjectTier
from holdfast_core.store_url import parse_store_url
from holdfast_core.tasks import Closing
from holdfast_core.tiers.base import ShardSource

MESH = [2, 2]
"""Two copies of two halves: ranks 0 and 2 have the first half, ranks 1 and 3 the second."""
ROWS = 1 << 16
TENSORS = {"w": Tensor("F32", (ROWS, 4), [None, 0])}
WHOLE = np.random.default_rng(1).integers(0, 256, (ROWS, 16), dtype=np.uint8)


def payload_of(layout: RankLayout, objects: bytes) -> bytes:
    item = layout.tensors["w"]
    rows = WHOLE[item.offsets[0] : item.offsets[0] + item.lengths[0]].tobytes()
    return payload_plan(layout).header + rows + objects


def saved(root: Path) -> tuple[DiskNodeTier, Manifest]:
    """Write and commit step 5 of four ranks."""
    tier = DiskNodeTier(root / "tier", fill_limit=1.0)
    tier.open()
    layouts = [layout_of(TENSORS, MESH, rank) for rank in range(4)]
    records = []
    for layout in layouts:
        header = ShardHeader(
            JOB_UID,
            RestartRound(0),
            Step(5),
            layout.rank,
            4,
            digest_of(layout.to_bytes()),
            layout.payload_bytes,
        )
        tier.put_layout(layout.to_bytes())
        data = payload_of(layout, objects_of(layout.rank))
        records.append(tier.write_shard(header, BytesSource(data)))
    digests = [layout_digests(layout.to_bytes()) for layout in layouts]
    document = build_manifest(
        JobIdentity("standalone", "run", JOB_UID), zip(records, digests, strict=True), parent=None
    )
    tier.put_manifest(JOB_UID, records[0].checkpoint, document)
    return tier, parse_manifest(document)


def slot_in(root: Path, rank: int, payload_bytes: int) -> SlotFile:
    ring = SlotRing(root / "slots", Rank(rank), 1)
    ring.ensure(payload_bytes, RestartRound(1))
    return SlotFile.open(root / "slots", ring.slots[0].name)


def held(slot: SlotFile, payload_bytes: int) -> bytes:
    data = bytearray(payload_bytes)
    slot.read_into(0, memoryview(data))
    return bytes(data)


def assemble(fetcher: ShardFetcher, manifest: Manifest, wanted: RankLayout, slot: SlotFile) -> int:
    """Assemble a payload for one of two ranks. Return the number of bytes read."""
    reader = Reader(FolderPlaces(fetcher, manifest), slot)
    run_blocking(reader.fill(slot, wanted.rank, wanted, 2))
    return reader.read_bytes.total()


def damage(root: Path, rank: int) -> None:
    (path,) = root.rglob(f"rank{rank:06d}-*.shard")
    with open(path, "r+b") as file:
        file.seek(100_000)
        byte = file.read(1)
        file.seek(100_000)
        file.write(bytes([byte[0] ^ 1]))


def quarantined(root: Path) -> list[str]:
    found = (root / "tier/quarantine").glob("*.shard")
    return sorted(path.name.rpartition("--")[2][:10] for path in found)


@pytest.mark.parametrize("rank", range(3))
def test_a_payload_is_assembled_from_the_parts_of_several_ranks(tmp_path: Path, rank: int) -> None:
    _, manifest = saved(tmp_path)
    wanted = layout_of({"w": Tensor("F32", (ROWS, 4))}, [3], rank)
    slot = slot_in(tmp_path, rank, wanted.payload_bytes)
    read = assemble(ShardFetcher(folder_of(tmp_path)), manifest, wanted, slot)
    assert held(slot, wanted.payload_bytes) == payload_of(wanted, objects_of(rank))
    assert read <= 1.2 * wanted.payload_bytes
    slot.close()


def test_a_bad_shard_is_quarantined_and_its_copy_read(tmp_path: Path) -> None:
    _, manifest = saved(tmp_path)
    damage(tmp_path, 1)
    wanted = layout_of({"w": Tensor("F32", (ROWS, 4))}, [2], 0)
    slot = slot_in(tmp_path, 0, wanted.payload_bytes)
    assemble(ShardFetcher(folder_of(tmp_path)), manifest, wanted, slot)
    assert held(slot, wanted.payload_bytes) == payload_of(wanted, objects_of(0))
    assert quarantined(tmp_path) == ["rank000001"]
    slot.close()


@pytest.mark.fault("A disk that refuses writes has a damaged shard, of which others have the bytes")
def test_a_bad_shard_that_cannot_be_quarantined_is_read_from_its_copy(tmp_path: Path) -> None:
    """The disk may be full, or read-only since its last error."""
    _, manifest = saved(tmp_path)
    damage(tmp_path, 1)
    wanted = layout_of({"w": Tensor("F32", (ROWS, 4))}, [2], 0)
    slot = slot_in(tmp_path, 0, wanted.payload_bytes)
    folder = folder_of(tmp_path)
    (tmp_path / "tier/quarantine").rmdir()
    (tmp_path / "tier/quarantine").touch()
    assemble(ShardFetcher(folder), manifest, wanted, slot)
    assert held(slot, wanted.payload_bytes) == payload_of(wanted, objects_of(0))
    slot.close()


def test_the_content_of_a_missing_shard_is_read_from_another(tmp_path: Path) -> None:
    _, manifest = saved(tmp_path)
    (path,) = tmp_path.rglob("rank000001-*.shard")
    path.unlink()
    wanted = layout_of({"w": Tensor("F32", (ROWS, 4))}, [2], 0)
    slot = slot_in(tmp_path, 0, wanted.payload_bytes)
    assemble(ShardFetcher(folder_of(tmp_path)), manifest, wanted, slot)
    assert held(slot, wanted.payload_bytes) == payload_of(wanted, objects_of(0))
    slot.close()


def test_an_error_names_both_bad_copies(tmp_path: Path) -> None:
    _, manifest = saved(tmp_path)
    damage(tmp_path, 1)
    damage(tmp_path, 3)
    wanted = layout_of({"w": Tensor("F32", (ROWS, 4))}, [2], 0)
    slot = slot_in(tmp_path, 0, wanted.payload_bytes)
    with pytest.raises(NotFoundError, match=r"(?s)CRC32C.*CRC32C.*w: 131072 of 262144 elements"):
        assemble(ShardFetcher(folder_of(tmp_path)), manifest, wanted, slot)
    assert quarantined(tmp_path) == ["rank000001", "rank000003"]
    slot.close()


def test_a_shard_that_does_not_match_the_manifest_is_not_read(tmp_path: Path) -> None:
    _, manifest = saved(tmp_path)
    shards = [
        msgspec.structs.replace(shard, chunk_table=digest_of(b"another"))
        if shard.rank == 1
        else shard
        for shard in manifest.shards
    ]
    wanted = layout_of({"w": Tensor("F32", (ROWS, 4))}, [2], 0)
    slot = slot_in(tmp_path, 0, wanted.payload_bytes)
    other = msgspec.structs.replace(manifest, shards=tuple(shards))
    assemble(ShardFetcher(folder_of(tmp_path)), other, wanted, slot)
    assert held(slot, wanted.payload_bytes) == payload_of(wanted, objects_of(0))
    assert quarantined(tmp_path) == ["rank000001"]
    slot.close()


def test_a_tensor_that_was_never_saved_quarantines_nothing(tmp_path: Path) -> None:
    _, manifest = saved(tmp_path)
    wanted = layout_of({"v": Tensor("F32", (2, 2))}, [1], 0)
    slot = slot_in(tmp_path, 0, wanted.payload_bytes)
    with pytest.raises(StateMismatchError, match=r"v: expected F32 \[2, 2\], found nothing"):
        assemble(ShardFetcher(folder_of(tmp_path)), manifest, wanted, slot)
    assert quarantined(tmp_path) == []
    slot.close()


class BreakingTier(ObjectTier):
    """A store that stops to answer during the first read of a shard."""

    has_broken = False

    def open_shard(self, namespace: str, ref: ShardRef) -> ShardSource:
        found = super().open_shard(namespace, ref)
        return found if self.has_broken else BreakingSource(found, self)


class BreakingSource(Closing):
    def __init__(self, source: ShardSource, tier: BreakingTier) -> None:
        self._source = source
        self._tier = tier

    @property
    def trailer(self) -> Trailer:
        return self._source.trailer

    def read(self, wanted: Iterable[range]) -> Generator[memoryview]:
        self._tier.has_broken = True
        yield from itertools.islice(self._source.read(wanted), 1)
        raise UnavailableError("the connection broke")

    def close(self) -> None:
        self._source.close()


class BreakingStore(FolderStore):
    def __init__(self, root: Path, bucket: Path) -> None:
        url = parse_store_url(f"file://{bucket}")
        super().__init__(url, {}, root / "store", "run", lambda seconds: False)
        self.breaking = BreakingTier(DirectoryObjectStore(bucket))

    @property
    def tier(self) -> BreakingTier:
        return self.breaking


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[BreakingStore]:
    """A store with step 5 of four ranks, of which two have each half."""
    tier, manifest = saved(tmp_path / "other")
    store = BreakingStore(tmp_path, tmp_path / "bucket")
    for shard in manifest.shards:
        ref = manifest.ref(shard.rank)
        store.tier.put_layout(NAMESPACE, ref, tier.get_layout(shard.layout))
        tier.look_up(ref)
        with tier.open_shard(ref) as reader:
            store.tier.upload_shard(NAMESPACE, reader)
    yield store
    store.close()
    store.tier.close()


def folder_of(root: Path, store: FolderStore | None = None) -> OpenFolder:
    options = ServiceOptions(
        root,
        root / "slots",
        root / "layouts",
        2,
        range(1),
        Policy(interval_steps=0),
        round=RestartRound(1),
        choose_restore=False,
    )
    return OpenFolder.open(options, store)


@pytest.mark.fault("The store stops to answer during a read of another number of ranks")
def test_a_store_that_stops_to_answer_during_a_read_is_waited_for(
    tmp_path: Path, stored: BreakingStore
) -> None:
    _, manifest = saved(tmp_path / "another")
    folder = folder_of(tmp_path, stored)
    wanted = layout_of({"w": Tensor("F32", (ROWS, 4))}, [2], 0)
    slot = slot_in(tmp_path, 0, wanted.payload_bytes)
    fetcher = ShardFetcher(folder)
    assemble(fetcher, manifest, wanted, slot)
    assert fetcher.has_read_store
    assert held(slot, wanted.payload_bytes) == payload_of(wanted, objects_of(0))
    assert stored.breaking.has_broken
    slot.close()


@pytest.mark.fault("All copies of a part in the folder are damaged and the store has it")
def test_damaged_shards_of_the_folder_are_read_from_its_store(
    tmp_path: Path, stored: BreakingStore
) -> None:
    stored.breaking.has_broken = True
    _, manifest = saved(tmp_path)
    folder = folder_of(tmp_path, stored)
    for rank in (1, 3):  # both that have this half
        damage(tmp_path / "tier", rank)
    wanted = layout_of({"w": Tensor("F32", (ROWS, 4))}, [2], 0)
    slot = slot_in(tmp_path, 0, wanted.payload_bytes)
    fetcher = ShardFetcher(folder)
    assemble(fetcher, manifest, wanted, slot)
    assert fetcher.has_read_store
    assert held(slot, wanted.payload_bytes) == payload_of(wanted, objects_of(0))
    slot.close()


@pytest.fixture
def service(tmp_path: Path) -> DirectoryService:
    saved(tmp_path)
    found = DirectoryService.start(
        ServiceOptions(
            root=tmp_path,
            slots_dir=tmp_path / "slots",
            layouts_dir=tmp_path / "layouts",
            world_size=2,
            own_ranks=range(1),
            policy=Policy(interval_steps=0),
        )
    )
    return found


def test_a_partly_filled_slot_names_no_step(tmp_path: Path, service: DirectoryService) -> None:
    """The header must not name a step, because the process may end where the read failed."""
    damage(tmp_path, 1)
    damage(tmp_path, 3)
    wanted = layout_of({"w": Tensor("F32", (ROWS, 4))}, [2], 0)
    document = wanted.to_bytes()
    LayoutFiles(tmp_path / "layouts").ensure(document, digest_of(document))
    ring = SlotRing(tmp_path / "slots", Rank(0), 1)
    ring.ensure(wanted.payload_bytes, RestartRound(1))
    (slot,) = ring.slots
    slot.begin(RestartRound(0), Step(5), 1)  # the slot held a shard before
    fill = Fill(service.round, Rank(0), (slot.name,), digest_of(document))
    with pytest.raises(NotFoundError):
        service.handle(fill, print)
    header = slot.header()
    assert (header.state, header.step, header.round) == (SlotState.FILLING, None, None)
    service.abort()


def test_a_missing_slot_does_not_quarantine_a_checkpoint(
    tmp_path: Path, service: DirectoryService
) -> None:
    """A NotFoundError would make the ranks reject the checkpoint."""
    wanted = layout_of({"w": Tensor("F32", (ROWS, 4))}, [2], 0)
    document = wanted.to_bytes()
    LayoutFiles(tmp_path / "layouts").ensure(document, digest_of(document))
    ring = SlotRing(tmp_path / "slots", Rank(0), 1)
    ring.ensure(wanted.payload_bytes, RestartRound(1))
    offer = ring.slots[0].name
    (tmp_path / "slots" / offer).unlink()
    ring.close()
    with pytest.raises(UnavailableError, match="slot"):
        service.handle(Fill(service.round, Rank(0), (offer,), digest_of(document)), print)
    service.abort()


def test_a_rank_of_another_world_must_send_its_layout(
    tmp_path: Path, service: DirectoryService
) -> None:
    reply = service.handle(Restore(service.round, Rank(0)), print)
    assert (reply.world_size, reply.payload_bytes, reply.rank_layout) == (4, 0, None)
    assert LayoutFiles(tmp_path / "layouts").read(reply.home)
    assert [*reply.layouts.values()] == [4]
    ring = SlotRing(tmp_path / "slots", Rank(0), 1)
    ring.ensure(1 << 22, RestartRound(1))
    with pytest.raises(
        RefusedError, match="saved by 4 ranks, expected 2: the request must name the layout"
    ):
        service.handle(Fill(service.round, Rank(0), (ring.slots[0].name,)), print)
    service.abort()


def test_the_first_rank_prunes_shards_of_ranks_that_no_longer_exist(tmp_path: Path) -> None:
    """No rank of the new world owns the shards of the old rank 3, so the leader deletes the uncommitted
    ones."""
    tier, manifest = saved(tmp_path)
    layout = layout_of(TENSORS, MESH, 3)
    digest = digest_of(layout.to_bytes())
    header = ShardHeader(
        JOB_UID, RestartRound(0), Step(6), Rank(3), 4, digest, layout.payload_bytes
    )
    tier.write_shard(header, BytesSource(payload_of(layout, objects_of(3))))
    newest = CheckpointId(Step(7), RestartRound(1))
    for leader, left in ((False, [5, 6]), (True, [5])):
        ranks = range(1) if leader else range(1, 2)
        committer = Committer(tier, tmp_path / "records", 2, ranks, 3)
        committer.prune(newest, (manifest.checkpoint,), leader=leader)
        assert sorted({record.checkpoint.step for record in tier.list_shards()}) == left
