"""A payload of other ranks' shards in the sidecar: what is bad or missing is had elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from holdfast_core.errors import NotFoundError, StateMismatchError
from holdfast_core.format.digest import digest_of
from holdfast_core.format.layout import merge_layouts
from holdfast_core.format.manifest import JobIdentity, parse_manifest
from holdfast_core.format.rank_layout import RankLayout
from holdfast_core.format.record import ShardHeader
from holdfast_core.format.slot import HEADER_BYTES, SlotHeader, SlotState, slot_name
from holdfast_core.ids import JobUid, Rank, RestartRound, ShardRef, Step, TierName
from holdfast_core.reshard.plan import payload_plan
from holdfast_core.slot_file import SlotFile
from holdfast_core.store import build_manifest
from holdfast_core.testing.builders import BytesSource
from holdfast_core.testing.placements import Tensor, layout_of, objects_of
from holdfast_core.tiers.node import DiskNodeTier
from holdfast_sidecar.metrics import Metrics
from holdfast_sidecar.pools import Pools
from holdfast_sidecar.reshard import Resharder, Saved

JOB = JobIdentity("ns", "job", JobUid("job"))
ROWS = 4096
TENSORS = {"w": Tensor("F32", (ROWS, 4), [None, 0])}
WHOLE = bytes(range(256)) * (ROWS * 16 // 256)
WANTED = layout_of({"w": Tensor("F32", (ROWS, 4))}, [2], 0)


def payload_of(layout: RankLayout) -> bytes:
    item = layout.tensors["w"]
    start = item.offsets[0] * 16
    rows = WHOLE[start : start + item.byte_range.length_bytes]
    return payload_plan(layout).header + rows + objects_of(layout.rank)


class Elsewhere:
    """Stands for the Rehydrator: shards of four ranks that lie on another node."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.far = DiskNodeTier(root / "far", fill_limit=1.0)
        self.node = DiskNodeTier(root / "near", fill_limit=1.0)
        self.far.open()
        self.node.open()
        self.brought: list[int] = []
        self.gone: set[int] = set()
        self.spoils = 0
        """Copies that turn bad on this node, after they were verified."""
        layouts = [layout_of(TENSORS, [2, 2], rank) for rank in range(4)]
        records = [self._save(layout) for layout in layouts]
        merged = merge_layouts(layout.to_bytes() for layout in layouts)
        document = build_manifest(JOB, records, parent=None, layout=merged.to_bytes())
        self.saved = Saved(parse_manifest(document), merged)

    def _save(self, layout: RankLayout) -> Any:
        digest = digest_of(layout.to_bytes())
        header = ShardHeader(
            JOB.uid, RestartRound(0), Step(5), layout.rank, 4, digest, layout.payload_bytes
        )
        return self.far.write_shard(header, BytesSource(payload_of(layout)))

    async def bring(self, ref: ShardRef) -> TierName:
        if self.node.find(ref) is not None:
            return TierName.NODE
        if ref.rank in self.gone:
            raise NotFoundError(f"rank {ref.rank}: nobody has it")
        self.brought.append(ref.rank)
        with self.far.open_shard(ref) as reader:
            size = reader.record.file_bytes
            writer = self.node.begin_copy(ref, size)
            writer.write((Path("/proc/self/fd") / str(reader.fd)).read_bytes())
            writer.commit()
        if self.spoils:
            self.spoils -= 1
            (path,) = self.root.glob(f"near/job/shards/*/*/rank{ref.rank:06d}-*.shard")
            data = bytearray(path.read_bytes())
            data[9000] ^= 1
            path.write_bytes(data)
        return TierName.PEER


@pytest.fixture
def elsewhere(tmp_path: Path) -> Elsewhere:
    return Elsewhere(tmp_path)


def fill(elsewhere: Elsewhere, root: Path, wanted: RankLayout = WANTED) -> tuple[TierName, bytes]:
    name = slot_name(Rank(0), 0)
    capacity = wanted.payload_bytes
    before = SlotHeader(SlotState.FREE, Rank(0), capacity, RestartRound(0), Step(4), capacity)
    (root / name).write_bytes(before.pack().ljust(HEADER_BYTES, b"\0") + bytes(capacity))

    async def scenario() -> tuple[TierName, bytes]:
        pools = Pools(disk=1, copy=1, store=1)
        resharder = Resharder(elsewhere.node, elsewhere, pools, Metrics())  # type: ignore[arg-type]
        slot = SlotFile.open(root, name)
        try:
            tier = await resharder.fill(elsewhere.saved, wanted, slot)
        finally:
            slot.close()
            pools.close()
        return tier, (root / name).read_bytes()[HEADER_BYTES:]

    return asyncio.run(scenario())


def header_in(root: Path) -> SlotHeader:
    return SlotHeader.unpack((root / slot_name(Rank(0), 0)).read_bytes()[:HEADER_BYTES])


def test_only_what_the_plan_names_is_brought(elsewhere: Elsewhere, tmp_path: Path) -> None:
    assert fill(elsewhere, tmp_path) == (TierName.PEER, payload_of(WANTED))
    assert elsewhere.brought == [0, 1]
    header = header_in(tmp_path)
    assert (header.state, header.step, header.payload_bytes) == (SlotState.FREE, None, 0)
    assert fill(elsewhere, tmp_path) == (TierName.NODE, payload_of(WANTED))


def test_a_copy_that_turned_bad_is_brought_again(elsewhere: Elsewhere, tmp_path: Path) -> None:
    elsewhere.spoils = 2
    assert fill(elsewhere, tmp_path) == (TierName.PEER, payload_of(WANTED))
    assert elsewhere.brought == [0, 0, 0, 1]


def test_a_disk_that_spoils_everything_is_given_up(elsewhere: Elsewhere, tmp_path: Path) -> None:
    elsewhere.spoils = 1000
    with pytest.raises(NotFoundError, match="rank 0: 8 copies in a row were bad"):
        fill(elsewhere, tmp_path)


def test_another_holder_serves_for_a_shard_that_is_gone(
    elsewhere: Elsewhere, tmp_path: Path
) -> None:
    elsewhere.gone = {1}
    assert fill(elsewhere, tmp_path) == (TierName.PEER, payload_of(WANTED))
    assert elsewhere.brought == [0, 3]


def test_what_is_nowhere_is_named_and_the_slot_is_nobodys(
    elsewhere: Elsewhere, tmp_path: Path
) -> None:
    elsewhere.gone = {1, 3}
    with pytest.raises(
        NotFoundError, match=r"(?s)rank 1: nobody.*rank 3: nobody.*w: 8192 of 16384"
    ):
        fill(elsewhere, tmp_path)
    header = header_in(tmp_path)
    assert (header.state, header.step, header.payload_bytes) == (SlotState.FILLING, None, 0)


def test_other_tensors_are_a_mismatch(elsewhere: Elsewhere, tmp_path: Path) -> None:
    with pytest.raises(StateMismatchError, match="v: expected F32"):
        fill(elsewhere, tmp_path, layout_of({"v": Tensor("F32", (2,))}, [1], 0))
    assert elsewhere.brought == []
