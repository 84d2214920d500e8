"""How one sidecar uploads one shard to a real store: its requests, and its behaviour without the replies."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.servers.minio_server import MinioServer
from tests.support.shards.builders import JOB, JOB_UID, BytesSource, payload, shard_header, weights
from tests.support.sidecar.contracts import contract_with
from tests.support.sidecar.rounds import accepted, round_message
from tests.support.tiers.stores import s3_tier

from holdfast_core.clock import SystemClock
from holdfast_core.errors import AlreadyExistsError, UnavailableError
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.keys import job_prefix, shard_key
from holdfast_core.format.manifest import Manifest, manifest_shards
from holdfast_core.format.rank_layout import RankLayout, TensorSlice, layout_digests
from holdfast_core.ids import ByteRange, CheckpointId, Digest, Rank, RestartRound, ShardRef, Step
from holdfast_core.messages.schema import Member, PersistRequest, RestorePoint, StoredAs
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.file import CHUNK_BYTES, Trailer
from holdfast_core.shards.pack import PackIndex
from holdfast_core.store.commit import ShardUploader
from holdfast_core.store.tier import ObjectTier
from holdfast_sidecar.save.incoming import OtherTables

pytestmark = pytest.mark.integration
SIZE = 9 << 20
RANKS = 4
"""Two in each of two pods. The tests upload the shards of the first pod."""


def layout_of(rank: int) -> bytes:
    whole = TensorSlice("F32", (SIZE // 4,), (0,), (SIZE // 4,), ByteRange(0, SIZE))
    return RankLayout(Rank(rank), {"w": whole}, {}, SIZE).to_bytes()


LAYOUTS = [layout_of(rank) for rank in range(RANKS)]


def own_bytes(rank: int, data: bytes) -> bytes:
    found = bytearray(data)
    found[::CHUNK_BYTES] = bytes([rank]) * len(found[::CHUNK_BYTES])
    return bytes(found)


class Peers:
    """Serves chunk tables of the other pod, and records the ranks whose tables were requested."""

    def __init__(self) -> None:
        self.tables: dict[ShardRef, Trailer] = {}
        self.asked: list[int] = []

    def fetch_table(self, member: Member, ref: ShardRef) -> Trailer:
        self.asked.append(ref.rank)
        if ref not in self.tables:
            raise UnavailableError(f"{member.pod} does not answer")
        return self.tables[ref]


class Pod:
    """Worker 0's node tier with the shards of its ranks, and the manifests of the whole gang."""

    def __init__(self, root: Path, tier: ObjectTier, prefix: str) -> None:
        self.root = root
        self.tier = tier
        self.prefix = prefix
        self.peers = Peers()
        self.node = DiskNodeTier(root / "here", capacity_bytes=1 << 30)
        self.node.open()
        self.elsewhere = DiskNodeTier(root / "there", capacity_bytes=1 << 30)
        self.elsewhere.open()
        self.state = accepted(round_message(), procs_per_worker=2)
        self.manifests: dict[int, Manifest] = {}
        contract = contract_with(procs_per_worker=2)
        peers: Any = self.peers
        tables = OtherTables(lambda: self.state, peers, SystemClock(), procs_per_worker=2)
        self.uploader = ShardUploader(
            contract.namespace, self.node, tier, own_ranks=2, other_tables=tables.fetch
        )

    def save(self, step: int, data: bytes, *, alike: bool = True) -> Manifest:
        """Save on every rank and commit the manifest.

        If not `alike`, each rank has other bytes at the beginning of each chunk.
        """
        shards = []
        for rank in range(RANKS):
            node = self.node if rank < 2 else self.elsewhere
            header = shard_header(SIZE, step=step, rank=rank, layout=digest_of(LAYOUTS[rank]))
            own = data if alike else own_bytes(rank, data)
            record = node.write_shard(header, BytesSource(own))
            digests = layout_digests(LAYOUTS[rank])
            shards.append((record.info, digests))
            node.put_layout(LAYOUTS[rank])
        manifest = Manifest(JOB, Step(step), RestartRound(0), RANKS, None, manifest_shards(shards))
        self.node.put_manifest(JOB_UID, manifest.checkpoint, manifest.to_bytes())
        self.manifests[step] = manifest
        return manifest

    def answer(self, step: int) -> None:
        """Make the tables of the other pod available."""
        for rank in (2, 3):
            ref = self.manifests[step].ref(Rank(rank))
            with self.elsewhere.open_shard(ref) as reader:
                self.peers.tables[ref] = Trailer(reader.record, reader.table)

    def upload(self, step: int, rank: int = 0, **fields: Any) -> StoredAs:
        request = PersistRequest(CheckpointId(Step(step), RestartRound(0)), **fields)
        return self.uploader.upload(self.manifests[step].ref(Rank(rank)), request)

    def index(self, step: int, rank: int = 0) -> PackIndex | None:
        return self.tier.stored("team-a", self.manifests[step].ref(Rank(rank))).index

    def places(self, step: int, rank: int = 0) -> set[tuple[int, int]] | None:
        """Return (step, rank) of every object that the pack refers to.

        Return None where the shard is stored whole.
        """
        index = self.index(step, rank)
        return None if index is None else {(s.step, s.rank) for s in index.sources}

    def persisted(self, step: int) -> RestorePoint:
        manifest = self.manifests[step]
        self.tier.put_manifest("team-a", JOB_UID, manifest.checkpoint, manifest.to_bytes())
        return RestorePoint(Step(step), RestartRound(0), digest_of(manifest.to_bytes()))


@pytest.fixture
def pod(tmp_path: Path, minio: MinioServer) -> Iterator[Pod]:
    config = minio.config(f"p/{secrets.token_hex(6)}")
    tier = s3_tier(config, minio.credentials)
    yield Pod(tmp_path, tier, config.prefix)
    tier.close()


def test_shared_chunks_are_found_on_the_own_disk_and_at_members_that_answer(pod: Pod) -> None:
    pod.save(2, payload(SIZE))
    pod.answer(2)
    assert pod.upload(2) == StoredAs()
    assert pod.places(2) == {(2, 1), (2, 2)}
    assert pod.peers.asked == [2, 3], "rank 1's table is on this node"


def test_a_member_that_does_not_answer_is_called_once_and_uploads_nothing_for_others(
    pod: Pod,
) -> None:
    pod.save(2, payload(SIZE))
    pod.upload(2)
    assert pod.places(2) == {(2, 1)}
    assert pod.peers.asked == [2]


def test_chunks_that_the_base_stores_are_not_sent_and_refer_to_it(pod: Pod) -> None:
    pod.save(2, payload(SIZE))
    for rank in (0, 1):
        pod.upload(2, rank)
    pod.save(4, payload(SIZE))
    stored = pod.upload(4, base=pod.persisted(2))
    at = CheckpointId(Step(2), RestartRound(0))
    # Blocks have 4 MiB: the first belongs to rank 0, the second to rank 1. The members of the third do not
    # answer, but the base contains it as well.
    assert stored == StoredAs(at, ((at, 5 << 20),))
    assert pod.places(4) == {(2, 0), (4, 1)}


def test_the_object_of_an_earlier_attempt_is_kept_and_reported(pod: Pod) -> None:
    """The second attempt has more tables, but the pack of the first attempt is equally valid."""
    pod.save(2, payload(SIZE))
    pod.upload(2)
    pod.answer(2)
    pod.upload(2)
    assert pod.places(2) == {(2, 1)}
    pod.save(4, payload(SIZE))
    base = pod.persisted(2)
    assert pod.upload(4) == StoredAs()
    assert pod.upload(4, base=base) == StoredAs()


def test_another_object_with_the_name_of_the_whole_shard_is_an_error(
    pod: Pod, minio: MinioServer, tmp_path: Path
) -> None:
    """Readers look for the whole shard first, so a pack beside it would be committed and never read."""
    pod.save(2, payload(SIZE))
    ref = pod.manifests[2].ref(Rank(0))
    key = f"{pod.prefix}/{job_prefix('team-a', JOB_UID)}{shard_key(ref)}"
    (tmp_path / "bad").write_bytes(b"half a shard")
    minio.admin().fput_object(minio.bucket, key, str(tmp_path / "bad"))
    with pytest.raises(AlreadyExistsError):
        pod.upload(2)


def test_a_whole_shard_is_uploaded_on_request_although_a_pack_exists(pod: Pod) -> None:
    pod.save(2, payload(SIZE))
    pod.upload(2)
    assert pod.upload(2, whole=True) == StoredAs()
    assert pod.places(2) is None


BASES = {
    "never there": lambda point: replace(point, step=Step(1)),
    "another manifest": lambda point: replace(point, manifest=Digest("b3:" + "0" * 64)),
    "another job's": lambda point: replace(point, job_uid=JOB_UID),
}


@pytest.mark.parametrize("change", BASES.values(), ids=BASES.keys())
def test_a_base_that_is_not_what_it_should_be_is_not_used(pod: Pod, change: Any) -> None:
    pod.save(2, payload(SIZE))
    pod.upload(2)
    pod.save(4, payload(SIZE))
    assert pod.upload(4, base=change(pod.persisted(2))) == StoredAs()
    assert pod.places(4) == {(4, 1)}


def test_a_base_whose_pack_is_gone_is_not_used(pod: Pod) -> None:
    pod.save(2, payload(SIZE))
    pod.save(4, payload(SIZE))
    assert pod.upload(4, base=pod.persisted(2)) == StoredAs()
    checkpoint = CheckpointId(Step(2), RestartRound(0))
    assert checkpoint in pod.tier.list_manifests("team-a", JOB_UID)
    assert pod.places(4) == {(4, 1)}


# ------------------------------------------------------------------ compressed


def widths(pod: Pod, step: int) -> set[int] | None:
    """Return the widths of the chunks that the pack stores, or None where nothing is compressed."""
    index = pod.index(step)
    if index is None or index.coding is None:
        return None
    here = zip(index.places, index.coding.widths, strict=True)
    return {width for place, width in here if place == 0}


def test_the_chunks_of_a_pack_are_compressed_by_the_width_of_their_numbers(pod: Pod) -> None:
    pod.save(2, weights(SIZE))
    pod.answer(2)
    assert pod.upload(2, compress=True) == StoredAs()
    assert pod.places(2) == {(2, 1), (2, 2)}
    assert widths(pod, 2) == {4}


def test_a_shard_that_shares_nothing_is_compressed(pod: Pod) -> None:
    """It is stored as a pack without references."""
    pod.save(2, weights(SIZE), alike=False)
    pod.answer(2)
    assert pod.upload(2, compress=True) == StoredAs()
    assert pod.places(2) == set()
    assert widths(pod, 2) == {4}
    pod.save(4, weights(SIZE), alike=False)
    at = CheckpointId(Step(2), RestartRound(0))
    stored = pod.upload(4, base=pod.persisted(2), compress=True)
    assert stored == StoredAs(at, ((at, SIZE),))


def test_a_later_upload_refers_to_the_checkpoint_that_stores_the_chunks(pod: Pod) -> None:
    pod.save(2, weights(SIZE), alike=False)
    pod.upload(2)
    pod.save(4, weights(SIZE), alike=False)
    base = pod.persisted(2)
    pod.upload(4, base=base)
    assert pod.places(4) == {(2, 0)}
    pod.save(6, weights(SIZE), alike=False)
    older = (CheckpointId(Step(2), RestartRound(0)),)
    pod.upload(6, base=pod.persisted(4), older=older)
    assert pod.places(6) == {(2, 0)}


def test_a_whole_shard_is_not_compressed(pod: Pod) -> None:
    pod.save(2, weights(SIZE))
    assert pod.upload(2, compress=True, whole=True) == StoredAs()
    assert pod.places(2) is None


def test_without_its_layout_a_shard_is_uploaded_uncompressed(pod: Pod) -> None:
    manifest = pod.save(2, weights(SIZE))
    (
        pod.root / "here" / "layouts" / f"{manifest.shards[0].layout.removeprefix('b3:')}.json"
    ).unlink()
    assert pod.upload(2, compress=True) == StoredAs()
    assert widths(pod, 2) is None
    assert pod.places(2) == {(2, 1)}, "the manifest alone says which ranks have the same bytes"


@pytest.mark.parametrize("first", [True, False], ids=["compressed first", "plain first"])
def test_the_object_of_an_earlier_attempt_is_kept_compressed_or_not(pod: Pod, first: bool) -> None:
    pod.save(2, weights(SIZE))
    pod.upload(2, compress=first)
    found = pod.index(2)
    assert pod.upload(2, compress=not first) == StoredAs()
    assert pod.index(2) == found
    assert (widths(pod, 2) is not None) is first
