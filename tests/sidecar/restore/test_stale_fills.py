"""A fill whose thread wakes after its round, or after a newer fill of the rank, writes nothing more."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.sidecar.reshard_world import NAMESPACE, WANTED, Gate, World, payload_of
from tests.support.hang import HANG_SECONDS
from tests.support.sidecar.rounds import accepted, round_message
from tests.support.tiers.faulty import Fault, Faults

from holdfast_core.errors import CapacityError, RefusedError
from holdfast_core.format.canonical import digest_of, hex_of
from holdfast_core.ids import Rank, RestartRound, ShardRef, Step, TierName, Worker
from holdfast_core.messages.schema import Fill, Filled, RestorePoint
from holdfast_core.save.place import RankLayouts
from holdfast_core.shm.slot_file import HEADER_BYTES, SlotFile, SlotHeader, SlotState
from holdfast_core.tiers.base import ShardReader
from holdfast_sidecar.base.telemetry import RestoreFailures
from holdfast_sidecar.base.tiers import Pools, Tiers
from holdfast_sidecar.restore.fill import Filler
from holdfast_sidecar.restore.rehydrate import Restored

RANK = Rank(1)
SAVED = b"\xee"
"""The byte of which the rank's next save consists."""


class SlowNode:
    """The node tier, whose next reader waits at `gate` either before its chunks are compared or after it
    has read the first bytes of the payload."""

    def __init__(self, world: World) -> None:
        self._tier = world.node
        self.quarantine = world.node.quarantine
        self.gate: Gate | None = None
        self.at_open: Gate | None = None

    def open_shard(self, ref: ShardRef) -> Any:
        at_open, self.at_open = self.at_open, None
        if at_open is not None:
            at_open.wait()
        reader = self._tier.open_shard(ref)
        gate, self.gate = self.gate, None
        return reader if gate is None else SlowReader(reader, gate)


class SlowReader:
    def __init__(self, reader: ShardReader, gate: Gate) -> None:
        self._reader = reader
        self._gate = gate
        self.record = reader.record
        self.table = reader.table
        self.close = reader.close

    def read_payload_into(self, offset: int, buffer: memoryview) -> None:
        self._reader.read_payload_into(offset, buffer)
        self._gate.wait()

    def __enter__(self) -> SlowReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.close()


class Pod:
    """Worker 1, whose shard of four is in its node tier. Also stands for the Rehydrator and the Stager."""

    def __init__(self, root: Path) -> None:
        self.world = World(root)
        self.world.put(self.world.node, 1)
        self.world.put(self.world.members[Worker(4)], 0, 1, 2, 3)
        self.node = SlowNode(self.world)
        self.path = self.world.slot(root, self.world.layouts[1].payload_bytes)
        self.memory: dict[str, Any] = {}
        self.owned = set[tuple[int, int]]()
        """The files of this slot's name that the sidecar writes to its disk."""
        self.reported: list[str] = []
        self.failures: RestoreFailures = RestoreFailures(
            lambda: self.reported.append(self.failures.text)
        )
        manifest = self.world.manifest
        ref = self.world.records[1].ref
        self.restored = Restored(
            RestorePoint(manifest.step, manifest.restart_round),
            manifest,
            {RANK: ref},
            {RANK: self.world.layouts[1].payload_bytes},
            {RANK: TierName.NODE},
        )
        self.state = accepted(round_message(1, workers=4), worker=1)

    # -------------------------------------------------------------- as Stager and Rehydrator

    def owns(self, slot: SlotFile) -> bool:
        return slot.identity in self.owned

    def namespace_of(self, point: RestorePoint) -> str:
        return NAMESPACE

    # -------------------------------------------------------------- for the tests

    def filler(self, pools: Pools) -> Filler:
        directory = self.world.root / "layouts"
        directory.mkdir(exist_ok=True)
        document = WANTED.to_bytes()
        (directory / f"{hex_of(digest_of(document))}.json").write_bytes(document)
        as_any: Any = self
        pod: Any = SimpleNamespace(
            settings=SimpleNamespace(slots_dir=self.world.root),
            patience=self.world.clock.patience,
            namespace_of=self.namespace_of,
            state=SimpleNamespace(world_size=3),
        )
        node: Any = self.node
        saves: Any = SimpleNamespace(
            layouts=RankLayouts(directory, self.world.node, pools), stager=as_any
        )
        return Filler(
            pod,
            Tiers(node, None, pools),
            saves,
            as_any,
            lambda manifest, namespace: self.world.places(pools, node),
            self.world.metrics,
        )

    def message(self, *, whole: bool) -> Fill:
        digest = None if whole else digest_of(WANTED.to_bytes())
        return Fill(RestartRound(1), RANK, (self.path.name,), digest)

    def payload(self, whole: bool) -> bytes:
        return payload_of(self.world.layouts[1], 1) if whole else payload_of(WANTED, 1)

    def header(self) -> SlotHeader:
        return SlotHeader.unpack(self.path.read_bytes()[:HEADER_BYTES])

    def save(self) -> bytes:
        """Write the rank's next shard into the slot and stage it. Return the contents of the file."""
        size = self.path.stat().st_size - HEADER_BYTES
        header = SlotHeader(SlotState.OWNED, RANK, size, RestartRound(2), Step(9), size)
        self.path.write_bytes(header.pack().ljust(HEADER_BYTES, b"\0") + SAVED * size)
        return self.path.read_bytes()

    def gate(self, *, whole: bool) -> Gate:
        """Install a gate for the next fill and return it."""
        gate = Gate()
        if whole:
            self.node.gate = gate
        else:
            self.world.gate = gate
        return gate


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


@pytest.fixture(params=[False, True], ids=["of other ranks' shards", "of the own shard"])
def whole(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_a_fill_that_outlives_its_round_leaves_the_next_rounds_save_alone(
    pod: Pod, whole: bool
) -> None:
    pools = Pools(disk=2, fetch=2, store=1)
    filler, gate = pod.filler(pools), pod.gate(whole=whole)
    old = asyncio.create_task(filler.fill(pod.state, pod.message(whole=whole)))
    await gate.reached()
    filler.stop("round 2 is sealed")
    filled = await filler.fill(pod.state, pod.message(whole=whole))
    assert pod.path.read_bytes()[HEADER_BYTES:][: filled.payload_bytes] == pod.payload(whole)
    saved = pod.save()
    gate.open()
    with pytest.raises(RefusedError, match="round 2 is sealed"):
        await old
    pools.close()
    assert pod.path.read_bytes() == saved
    assert pod.reported == []


async def test_a_fill_that_the_rank_asked_for_again_writes_no_more(pod: Pod, whole: bool) -> None:
    """The rank's connection broke, and the rank reconnected in the same round."""
    pools = Pools(disk=2, fetch=2, store=1)
    filler, gate = pod.filler(pools), pod.gate(whole=whole)
    old = asyncio.create_task(filler.fill(pod.state, pod.message(whole=whole)))
    await gate.reached()
    filled = await filler.fill(pod.state, pod.message(whole=whole))
    assert isinstance(filled, Filled)
    saved = pod.save()
    gate.open()
    with pytest.raises(RefusedError, match="sent another request"):
        await old
    pools.close()
    assert pod.path.read_bytes() == saved


async def test_a_cancelled_fill_writes_into_no_other_file(
    pod: Pod, whole: bool, tmp_path: Path
) -> None:
    """After the cancellation, another file may get the number of the slot's descriptor."""
    pools = Pools(disk=2, fetch=2, store=1)
    filler, gate = pod.filler(pools), pod.gate(whole=whole)
    task = asyncio.create_task(filler.fill(pod.state, pod.message(whole=whole)))
    await gate.reached()
    before = pod.path.read_bytes()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # Open enough files that one of them gets the number of the slot's descriptor.
    victims = [os.open(tmp_path / f"victim{i}", os.O_RDWR | os.O_CREAT, 0o600) for i in range(32)]
    gate.open()
    assert await pools.fill.drain(HANG_SECONDS)
    assert await pools.fetch.drain(HANG_SECONDS)
    sizes = {os.fstat(victim).st_size for victim in victims}
    for victim in victims:
        os.close(victim)
    pools.close()
    assert sizes == {0}
    assert pod.path.read_bytes() == before


async def test_missing_bytes_of_a_stopped_fill_are_not_reported_for_the_next_round(
    pod: Pod,
) -> None:
    pools = Pools(disk=2, fetch=2, store=1)
    filler, gate = pod.filler(pools), pod.gate(whole=False)
    old = asyncio.create_task(filler.fill(pod.state, pod.message(whole=False)))
    await gate.reached()
    for rank in range(4):
        pod.world.members[Worker(4)].delete_shard(pod.world.records[rank].ref)
    filler.stop("round 2 is sealed")
    gate.open()
    with pytest.raises(RefusedError, match="round 2 is sealed"):
        await old
    pools.close()
    assert pod.reported == []
    assert len(pod.world.asked) == 1, "no other shard is asked for"


def test_a_fill_that_waits_for_a_source_ends_with_its_round(pod: Pod) -> None:
    pod.world.faults[Worker(4)] = Faults([Fault("read")])

    async def scenario() -> None:
        pools = Pools(disk=2, fetch=2, store=1)
        filler = pod.filler(pools)

        def sealed(waits: int) -> None:
            if pod.reported:
                filler.stop("round 2 is sealed")

        pod.world.clock.at = sealed
        with pytest.raises(RefusedError, match="round 2 is sealed"):
            await filler.fill(pod.state, pod.message(whole=False))
        pools.close()

    asyncio.run(scenario())
    (text,) = pod.reported
    assert text.startswith("rank 1: ")


def test_bytes_that_arrived_late_are_no_failure_of_the_fill(pod: Pod) -> None:
    pod.world.faults[Worker(4)] = Faults([Fault("read")])

    def back(waits: int) -> None:
        if pod.reported:
            pod.world.faults[Worker(4)].clear()

    pod.world.clock.at = back

    async def scenario() -> None:
        pools = Pools(disk=2, fetch=2, store=1)
        await pod.filler(pools).fill(pod.state, pod.message(whole=False))
        pools.close()

    asyncio.run(scenario())
    assert len(pod.reported) == 2
    assert pod.reported[1] == ""


async def test_a_slot_that_was_compared_too_long_is_not_freed_under_a_save(pod: Pod) -> None:
    """The slot contained the restore point when the comparison began, in the round before."""
    record = pod.world.records[1]
    header = record.header
    kept = replace(
        pod.header(),
        round=header.round,
        step=header.step,
        payload_bytes=header.payload_bytes,
    )
    pod.path.write_bytes(kept.pack().ljust(HEADER_BYTES, b"\0") + pod.payload(True))
    pools = Pools(disk=2, fetch=2, store=1)
    filler, gate = pod.filler(pools), Gate()
    pod.node.at_open = gate
    old = asyncio.create_task(filler.fill(pod.state, pod.message(whole=True)))
    await gate.reached()
    filler.stop("round 2 is sealed")
    assert (await filler.fill(pod.state, pod.message(whole=True))).tier is TierName.MEMORY
    filling = replace(kept, state=SlotState.FILLING)
    with pod.path.open("r+b") as file:
        file.write(filling.pack())
    gate.open()
    with pytest.raises(RefusedError, match="round 2 is sealed"):
        await old
    pools.close()
    assert pod.header().state is SlotState.FILLING


@pytest.mark.fault("A gang restarts while a slow disk still writes the slots of the round before")
async def test_a_fill_takes_the_new_file_of_a_slot_that_is_still_written(pod: Pod) -> None:
    """The rank has created its slots anew. A refusal would end it, and each gang after it."""
    pools = Pools(disk=2, fetch=2, store=1)
    filler = pod.filler(pools)
    written = SlotFile.open(pod.path.parent, pod.path.name)
    pod.owned = {written.identity}
    with pytest.raises(CapacityError, match="in use"):
        await filler.fill(pod.state, pod.message(whole=True))
    pod.path.unlink()
    pod.world.slot(pod.path.parent, pod.world.layouts[1].payload_bytes)
    filled = await filler.fill(pod.state, pod.message(whole=True))
    assert pod.path.read_bytes()[HEADER_BYTES:][: filled.payload_bytes] == pod.payload(True)
    written.close()
    pools.close()


@pytest.mark.fault("The copy on this node is damaged when it is put into a slot")
async def test_a_shard_that_another_place_had_to_serve_is_recorded_as_lost(pod: Pod) -> None:
    """The replacer fetches it again, so that this node has a copy for the next restore."""
    pod.world.spoil("node", 1)
    pools = Pools(disk=2, fetch=2, store=1)
    filler, lost = pod.filler(pools), list[ShardRef]()
    filler.lost.subscribe(lost.append)
    filled = await filler.fill(pod.state, pod.message(whole=True))
    pools.close()
    assert filled.tier is TierName.PEER
    assert pod.path.read_bytes()[HEADER_BYTES:][: filled.payload_bytes] == pod.payload(True)
    assert lost == [pod.world.records[1].ref]
    assert not any(pod.reported)
