"""Shards of four ranks on this node, at members and in a store, for tests of fills by ranges."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

from tests.support.clock import ManualClock
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import BytesSource, build_manifest
from tests.support.shards.placements import Tensor, layout_of, objects_of
from tests.support.shards.shard_files import flip_bit
from tests.support.tiers.faulty import Faults, Faulty

from holdfast_core.errors import HoldfastError
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.manifest import JobIdentity, parse_manifest
from holdfast_core.format.rank_layout import RankLayout, layout_digests
from holdfast_core.ids import Digest, JobUid, Rank, RestartRound, ShardRef, Step, TierName, Worker
from holdfast_core.messages.schema import Member
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.reshard.plan import payload_plan
from holdfast_core.shards.file import CHUNK_BYTES, ShardHeader, ShardRecord, Trailer, head_bytes
from holdfast_core.shm.slot_file import HEADER_BYTES, SlotFile, SlotHeader, SlotState, slot_name
from holdfast_core.store.directory import DirectoryObjectStore
from holdfast_core.store.tier import ObjectTier
from holdfast_core.tasks import Backoff
from holdfast_core.tiers.base import ShardSource
from holdfast_core.tiers.sources import ReaderSource
from holdfast_sidecar.base.pod import Patience
from holdfast_sidecar.base.telemetry import Metrics
from holdfast_sidecar.base.tiers import Pools, Tiers
from holdfast_sidecar.restore.fetch import PodPlaces
from holdfast_sidecar.restore.slot_reader import FillTarget, fill

NAMESPACE = "ns"
JOB = JobIdentity(NAMESPACE, "job", JobUid("job"))
ROWS = 1 << 18
TENSORS = {"w": Tensor("F32", (ROWS, 4), [None, 0])}
WHOLE = bytes(range(251)) * (ROWS * 16 // 251 + 1)
WANTED = layout_of({"w": Tensor("F32", (ROWS, 4), [0])}, [3], 1)
"""The second third of the rows: the end of what ranks 0 and 2 have, and the beginning of what 1 and 3
have. The plan reads these rows from ranks 2 and 1."""


def payload_of(layout: RankLayout, saved_by: int) -> bytes:
    item = layout.tensors["w"]
    start = item.offsets[0] * 16
    rows = WHOLE[start : start + item.byte_range.length_bytes]
    return payload_plan(layout).header + rows + objects_of(saved_by)


class World:
    """Shards of four ranks (two copies of two halves), on this node, at two members, and in a store.

    Also stands for BulkPeers and Fetcher, and records their requests.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.metrics = Metrics()
        self.node = self._tier("node")
        self.members = {Worker(w): self._tier(f"member{w}") for w in (4, 5)}
        self.store_faults = Faults()
        self.faults: dict[Worker, Faults] = {w: Faults() for w in self.members}
        self.forged: dict[Worker, Trailer] = {}
        self.reported_copies: list[tuple[Worker, int]] = []
        self.asked: list[tuple[str, int]] = []
        self.clock = Turning()
        self.waits: list[str] = []
        """What fills have reported of sources that do not answer."""
        self.gate: Gate | None = None
        """Gate for the next source of a member that is opened."""
        self.layouts = [layout_of(TENSORS, [2, 2], rank) for rank in range(4)]
        source = self._tier("source")
        self.records = [source.write_shard(*self._shard(layout)) for layout in self.layouts]
        self.objects = DirectoryObjectStore(root / "store")
        self.store = ObjectTier(self.objects)
        self.source = source
        documents = [layout.to_bytes() for layout in self.layouts]
        shards = zip(self.records, map(layout_digests, documents), strict=True)
        document = build_manifest(JOB, shards, parent=None)
        self.manifest = parse_manifest(document)
        self.layout_errors: dict[Rank, HoldfastError] = {}
        """Why the layout of a rank cannot be read."""
        self.layouts_read: list[Rank] = []

    def _tier(self, name: str) -> DiskNodeTier:
        tier = DiskNodeTier(self.root / name, fill_limit=1.0)
        tier.open()
        return tier

    def _shard(self, layout: RankLayout) -> tuple[ShardHeader, BytesSource]:
        header = ShardHeader(
            JOB.uid,
            RestartRound(0),
            Step(5),
            layout.rank,
            4,
            digest_of(layout.to_bytes()),
            layout.payload_bytes,
        )
        return header, BytesSource(payload_of(layout, layout.rank))

    def put(self, tier: DiskNodeTier, *ranks: int) -> None:
        for rank in ranks:
            tier.write_shard(*self._shard(self.layouts[rank]))

    def upload(self, *ranks: int) -> None:
        for rank in ranks:
            with self.source.open_shard(self.records[rank].ref) as reader:
                self.store.upload_shard(NAMESPACE, reader)

    def spoil(self, place: str, rank: int, payload_offset: int = CHUNK_BYTES + 9) -> None:
        """Flip one bit of the payload."""
        (path,) = (self.root / place).rglob(f"rank{rank:06d}-*.shard")
        flip_bit(path, head_bytes(self.records[rank].header) + payload_offset)

    # -------------------------------------------------------------- as BulkPeers and Fetcher

    async def layout(self, ref: ShardRef, digest: Digest, namespace: str) -> bytes:
        document = self.layouts[ref.rank].to_bytes()
        assert (namespace, digest) == (NAMESPACE, digest_of(document))
        self.layouts_read.append(ref.rank)
        if ref.rank in self.layout_errors:
            raise self.layout_errors[ref.rank]
        return document

    def open(self, member: Member, ref: ShardRef) -> ShardSource:
        self.asked.append((f"worker {member.worker}", ref.rank))
        inner = ReaderSource(self.members[member.worker].open_shard(ref))
        gate, self.gate = self.gate, None
        if gate is not None:
            return Gated(inner, gate)
        source = Faulty(inner, self.faults[member.worker])
        forged = self.forged.get(member.worker)
        return source if forged is None else Forged(source, forged)

    def others(self) -> tuple[Member, ...]:
        return tuple(Member(worker, f"pod-{worker}", "") for worker in self.members)

    def report_bad_copy(self, member: Member, ref: ShardRef) -> None:
        self.reported_copies.append((member.worker, ref.rank))

    # -------------------------------------------------------------- for the tests

    def slot(self, directory: Path, capacity_bytes: int) -> Path:
        """Create a slot of rank 1 that contains bytes of an older step."""
        size = capacity_bytes
        header = SlotHeader(SlotState.FREE, Rank(1), size, RestartRound(0), Step(4), size)
        path = directory / slot_name(Rank(1), 0)
        path.write_bytes(header.pack().ljust(HEADER_BYTES, b"\0") + bytes(size))
        return path

    def places(self, pools: Pools, node: Any = None) -> PodPlaces:
        store = ObjectTier(Faulty(self.objects, self.store_faults))
        tiers = Tiers(node or self.node, store, pools)
        own: Any = self
        return PodPlaces(self.manifest, NAMESPACE, tiers, own, own, self.metrics, 1)

    def fill(
        self, wanted: RankLayout = WANTED, slot: SlotFile | None = None
    ) -> tuple[TierName, bytes]:
        """Fill a slot. Return the farthest tier that was read, and the payload."""
        record, tier, data = self._fill(wanted, wanted.payload_bytes, slot)
        assert record is None
        return tier, data

    def fill_shard(self) -> tuple[TierName, bytes]:
        """Fill a slot with the shard of rank 1. Return as `fill`."""
        record, tier, data = self._fill(None, self.layouts[1].payload_bytes)
        assert record == self.records[1]
        return tier, data

    def _fill(
        self, wanted: RankLayout | None, payload_bytes: int, slot: SlotFile | None = None
    ) -> tuple[ShardRecord | None, TierName, bytes]:
        path = self.slot(self.root, payload_bytes)

        async def scenario() -> tuple[ShardRecord | None, TierName, bytes]:
            pools = Pools(disk=1, fetch=1, store=1)
            target = FillTarget(Rank(1))
            target.take(slot or SlotFile.open(self.root, path.name))
            try:
                patience, waits = self.clock.patience, self.waits.append
                places = self.places(pools)
                record, tier = await fill(places, target, Rank(1), wanted, 3, patience, waits)
            finally:
                target.stop("it is over")
                pools.close()
            return record, tier, path.read_bytes()[HEADER_BYTES:]

        return asyncio.run(scenario())

    def counted(self, name: str) -> dict[str, int]:
        """Return a counter of the metrics, by tier."""
        found = {}
        for line in self.metrics.render().decode().splitlines():
            if line.startswith(f'{name}_total{{tier="'):
                tier = line.split('"')[1]
                found[tier] = int(float(line.split()[-1]))
        return {tier: count for tier, count in found.items() if count}


class Turning(ManualClock):
    """A clock that advances only while a task sleeps. `at` is called at the end of each sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        self.at: Callable[[int], None] = lambda waits: None

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        self.waits += 1
        self.at(self.waits)

    def patience(self) -> Patience:
        return Patience(self, Backoff(1.0, 10.0), 60.0)


class Gate:
    """A point at which a thread waits until the test opens it."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._open = threading.Event()

    def wait(self) -> None:
        """Report that the thread is here, and block it until the gate opens."""
        self._reached.set()
        assert self._open.wait(HANG_SECONDS)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, HANG_SECONDS)

    def open(self) -> None:
        self._open.set()


class Gated:
    """A member that is slow with its first bytes."""

    def __init__(self, inner: ShardSource, gate: Gate) -> None:
        self._inner = inner
        self._gate = gate
        self.trailer = inner.trailer
        self.close = inner.close

    def read(self, wanted: Iterable[range]) -> Generator[memoryview]:
        for view in self._inner.read(wanted):
            self._gate.wait()
            yield view

    def __enter__(self) -> Gated:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Forged:
    """A member that sends a forged chunk table."""

    def __init__(self, inner: ShardSource, trailer: Trailer) -> None:
        self.trailer = trailer
        self.read = inner.read
        self.close = inner.close

    def __enter__(self) -> Forged:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
