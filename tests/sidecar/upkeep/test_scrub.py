"""The scrub reads stored bytes of the node again, quarantines bad files, and fetches them again."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.sidecar.one_rank import DOCUMENT, HEADER, LAYOUT, MANIFEST, PAYLOAD, fetcher_of
from tests.support.clock import ManualClock
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import JOB, BytesSource
from tests.support.shards.shard_files import flip_bit
from tests.support.sidecar.contracts import contract_with
from tests.support.sidecar.rounds import accepted, round_message
from tests.support.tiers.faulty import Fault, Faults, Faulty
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.clock import Clock, SystemClock
from holdfast_core.errors import TierError, UnavailableError
from holdfast_core.format.canonical import hex_of
from holdfast_core.ids import Digest, ShardRef, Step, TierName, Worker
from holdfast_core.messages.schema import (
    Member,
)
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.tiers.base import NodeTier
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.telemetry import Failures, Metrics, Telemetry
from holdfast_sidecar.base.tiers import Pools, Tiers
from holdfast_sidecar.upkeep.replace import Replacer
from holdfast_sidecar.upkeep.scrub import Scrubber, ScrubPace, Verifier, bad_documents

STATE = accepted(round_message(1))


class Peer:
    """The other member, which has the checkpoint and can be unreachable."""

    def __init__(self, node: DiskNodeTier) -> None:
        self.node = node
        self.is_away = False
        self._memory = ScratchTier()
        self._memory.write_shard(HEADER, BytesSource(PAYLOAD))

    def copy(self, member: Member, ref: ShardRef) -> Any:
        if self.is_away:
            raise UnavailableError("connection refused")
        with self._memory.open_shard(ref) as reader:
            writer = self.node.begin_copy(ref, reader.record.file_bytes)
            for piece in range(0, reader.record.file_bytes, 4096):
                writer.write(os.pread(reader.fd, 4096, piece))
            return SimpleNamespace(received_bytes=writer.commit().file_bytes)

    async def manifest(self, *_: object, **options: Any) -> bytes:
        if self.is_away:
            raise UnavailableError("connection refused")
        return DOCUMENT

    async def layout(self, worker: Worker, digest: Digest) -> bytes:
        if self.is_away:
            raise UnavailableError("connection refused")
        return LAYOUT

    def get_manifest(self, *name: object) -> bytes:
        raise UnavailableError("the store is away")

    get_layout = download_shard = get_manifest


class World:
    """A node tier with one committed checkpoint that is scrubbed repeatedly."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node = DiskNodeTier(folder / "node", capacity_bytes=1 << 30)
        self.node.open()
        self.record = self.node.write_shard(HEADER, BytesSource(PAYLOAD))
        self.node.put_layout(LAYOUT)
        self.node.put_manifest(JOB.uid, MANIFEST.checkpoint, DOCUMENT)
        self.peer = Peer(self.node)
        self.pools = Pools(disk=1, fetch=1, store=1)
        self.metrics = Metrics()
        self.is_busy = False
        self.scrubber = self.scrubber_of(
            Settings(contract_with(), scrub_pass_seconds=0.01, scrub_rest_seconds=0.001)
        )

    def scrubber_of(
        self,
        settings: Settings,
        *,
        node: NodeTier | None = None,
        failures: Failures | None = None,
        clock: Clock | None = None,
        busy: Callable[[], bool] | None = None,
        replacer: Any = None,
    ) -> Scrubber:
        return Scrubber(
            Pod(settings, clock or SystemClock(), CurrentRound(STATE)),
            Tiers(node or self.node, None, self.pools),
            replacer or self.replacer(),
            Telemetry(self.metrics, failures or Failures(lambda: None)),
            busy=busy or (lambda: self.is_busy),
            throttle=lambda length: None,
        )

    def verifier_of(
        self, node: Any, failures: Failures, replacer: Replacer | None = None
    ) -> Verifier:
        tiers = Tiers(node, None, self.pools)
        return Verifier(tiers, replacer or self.replacer(), Telemetry(self.metrics, failures))

    def replacer(self) -> Replacer:
        _, fetcher = fetcher_of(STATE, self.node, self.peer, self.pools, ManualClock())
        return Replacer(Tiers(self.node, None, self.pools), fetcher, lambda: STATE)

    def counted(self, line: str) -> float:
        lines = self.metrics.render().decode().splitlines()
        return next((float(t.split()[-1]) for t in lines if t.startswith(f"{line} ")), 0.0)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while not condition():
                await SystemClock().sleep(0.01)

    def quarantined(self) -> list[str]:
        return [p.name for p in (self.folder / "node" / "quarantine").glob("*.reason")]


def content_of(path: Path) -> bytes | None:
    """Return the bytes of a file that the scrub may move at any time, or None if it is missing."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[World]:
    world = World(folder)
    world.scrubber.start()
    try:
        yield world
    finally:
        await world.scrubber.close()
        world.pools.close()


class NotedFailures(Failures):
    """Failures that counts those that were noted."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.noted = 0

    def note(self, *error: Any, **step: Any) -> Any:
        self.noted += 1
        return super().note(*error, **step)


@asynccontextmanager
async def verifying(
    folder: Path, *faults: Fault, pass_seconds: float
) -> AsyncIterator[tuple[World, Verifier, NotedFailures]]:
    """Run a scrub, and a verifier whose reads have the faults."""
    world, failures = World(folder), NotedFailures()
    replacer = world.replacer()
    scrubber = world.scrubber_of(
        Settings(contract_with(), scrub_pass_seconds=pass_seconds, scrub_rest_seconds=0.001),
        failures=failures,
        replacer=replacer,
    )
    verifier = world.verifier_of(Faulty(world.node, Faults(faults)), failures, replacer)
    scrubber.start()
    try:
        yield world, verifier, failures
    finally:
        await scrubber.close()
        await verifier.close()
        world.pools.close()


CORRUPT = f'holdfast_corruptions_detected_total{{tier="{TierName.NODE}"}}'
SCRUBBED = "holdfast_scrubbed_bytes_total"


async def test_intact_files_are_read_again_in_every_pass(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        once = len(PAYLOAD) + len(DOCUMENT) + len(LAYOUT)
        await world.until(lambda: world.counted(SCRUBBED) >= 2 * once)
        assert world.counted(CORRUPT) == 0
        assert world.quarantined() == []


@pytest.mark.fault("A shard at rest on a node changes")
async def test_a_shard_that_changed_is_quarantined_and_fetched_again(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        flip_bit(world.node.shard_path(world.record.ref), 4096 + len(PAYLOAD) // 2)
        await world.until(lambda: len(world.quarantined()) == 1)
        await world.until(lambda: world.node.find(world.record.ref) is not None)
        with world.node.open_shard(world.record.ref) as reader:
            reader.verify()
        assert world.counted(CORRUPT) == 1


@pytest.mark.fault(
    "A member has received bad bytes of a shard, and this node finds its copy damaged"
)
async def test_a_copy_that_a_member_found_bad_is_fetched_again(tmp_path: Path) -> None:
    async with verifying(tmp_path, pass_seconds=1e6) as (world, verifier, _):
        await world.until(lambda: world.counted(SCRUBBED) > len(PAYLOAD))
        flip_bit(world.node.shard_path(world.record.ref), 4096 + len(PAYLOAD) // 2)
        verifier.suspect(world.record.ref)
        await world.until(lambda: len(world.quarantined()) == 1)
        await world.until(lambda: world.node.find(world.record.ref) is not None)


@pytest.mark.fault("A disk cannot read a shard once, of which a member has received bad bytes")
async def test_a_verification_that_failed_is_a_failure_until_all_has_been_read(
    tmp_path: Path,
) -> None:
    """Else the job would show it until its next round, although every save succeeds."""
    fault = Fault("open_shard", TierError("reading shard /node/x: Input/output error"), times=1)
    async with verifying(tmp_path, fault, pass_seconds=0.01) as (world, verifier, failures):
        verifier.suspect(world.record.ref)
        await world.until(lambda: failures.noted > 0)
        await world.until(lambda: not failures.current)


@pytest.mark.fault("Many ranks have received bad bytes of one shard")
async def test_a_shard_is_verified_once_for_all_reports_that_come_meanwhile(
    tmp_path: Path,
) -> None:
    world, faults = World(tmp_path), Faults()
    verifier = world.verifier_of(Faulty(world.node, faults), Failures(lambda: None))
    for _ in range(100):
        verifier.suspect(world.record.ref)
    await asyncio.sleep(0)
    await world.pools.scrub.run(lambda: None)  # what was queued before has been done
    assert faults.calls("open_shard") == 1
    await verifier.close()
    world.pools.close()


@pytest.mark.fault("A shard on a node is deleted by another program")
async def test_a_shard_that_another_program_deleted_is_fetched_again(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        path = world.node.shard_path(world.record.ref)
        path.unlink()
        await world.until(lambda: path.exists() and world.node.find(world.record.ref) is not None)
        with world.node.open_shard(world.record.ref) as reader:
            reader.verify()


@pytest.mark.fault("The disk cannot read one shard or list (EIO) during a scrub")
@pytest.mark.parametrize("operation", ["open_shard", "read_payload", "list_manifests"])
async def test_an_unreadable_file_does_not_stop_the_scrub_of_the_others(
    tmp_path: Path, operation: str
) -> None:
    """A file has a bad sector. The pass reads all other files and then reports the one that it could not
    read."""
    world = World(tmp_path)
    other = replace(HEADER, step=Step(HEADER.step + 1))
    world.node.write_shard(other, BytesSource(PAYLOAD))
    error = TierError("reading shard /node/x: Input/output error")
    faults = Faults([Fault(operation, error, times=1)])
    failures = Failures(lambda: None)
    scrubber = world.scrubber_of(
        Settings(contract_with(), scrub_pass_seconds=1e6, scrub_rest_seconds=0.001),
        node=Faulty(world.node, faults),
        failures=failures,
    )
    scrubber.start()
    try:
        await world.until(lambda: bool(failures.current))
        assert [failure.message for failure in failures.current] == [str(error)]
        documents = len(DOCUMENT) + len(LAYOUT)
        all_others = len(PAYLOAD) + documents
        if operation == "list_manifests":
            all_others = 2 * len(PAYLOAD)
        assert world.counted(SCRUBBED) == all_others
    finally:
        await scrubber.close()
        world.pools.close()


@pytest.mark.fault("The source of a replacement for a bad copy is away")
async def test_a_source_that_is_away_is_asked_again_later(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        world.peer.is_away = True
        flip_bit(world.node.shard_path(world.record.ref), 4096 + len(PAYLOAD) // 2)
        await world.until(lambda: len(world.quarantined()) == 1)
        assert world.node.find(world.record.ref) is None
        world.peer.is_away = False
        await world.until(lambda: world.node.find(world.record.ref) is not None)


@pytest.mark.fault("A shard is pruned while its bad copy waits for a replacement")
async def test_a_shard_that_was_pruned_meanwhile_is_not_fetched_again(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        world.peer.is_away = True
        flip_bit(world.node.shard_path(world.record.ref), 4096 + len(PAYLOAD) // 2)
        await world.until(lambda: len(world.quarantined()) == 1)
        world.node.delete_checkpoint(JOB.uid, MANIFEST.checkpoint)
        world.peer.is_away = False
        before = world.counted(SCRUBBED)
        newer = replace(HEADER, step=Step(HEADER.step + 1))
        other = world.node.write_shard(newer, BytesSource(PAYLOAD))
        await world.until(lambda: world.counted(SCRUBBED) >= before + 3 * len(PAYLOAD))
        await world.until(lambda: world.node.list_shards() == (other,))
        assert world.node.list_manifests() == ()


@pytest.mark.fault("A manifest or layout at rest on a node changes")
@pytest.mark.parametrize("document", ["manifest", "layout"])
async def test_a_document_that_changed_is_replaced(tmp_path: Path, document: str) -> None:
    async with running(tmp_path) as world:
        root = tmp_path / "node"
        if document == "manifest":
            (path,) = root.rglob("manifests/*/*.json")
        else:
            path = root / "layouts" / f"{hex_of(HEADER.layout)}.json"
        good = path.read_bytes()
        flip_bit(path, 20)
        await world.until(lambda: world.counted(CORRUPT) >= 1)
        await world.until(lambda: content_of(path) == good)


@pytest.mark.fault("The disk refuses to quarantine one of the damaged documents of a node")
async def test_a_document_that_the_disk_refuses_keeps_no_other_from_its_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scrub meets the manifest first, and so does each attempt to replace what is missing."""
    world, failures = World(tmp_path), Failures(lambda: None)
    (manifest,) = (tmp_path / "node").rglob("manifests/*/*.json")
    quarantine = world.node.volume.quarantine

    def refusing(path: Path, reason: str) -> None:
        if path == manifest:
            raise TierError("quarantining a manifest: Read-only file system")
        quarantine(path, reason)

    monkeypatch.setattr(world.node.volume, "quarantine", refusing)
    layout = tmp_path / "node" / "layouts" / f"{hex_of(HEADER.layout)}.json"
    good = layout.read_bytes()
    for path in (manifest, layout):
        flip_bit(path, 20)
    scrubber = world.scrubber_of(
        Settings(contract_with(), scrub_pass_seconds=1e6, scrub_rest_seconds=0.001),
        failures=failures,
    )
    scrubber.start()
    try:
        await world.until(lambda: content_of(layout) == good)
        await world.until(lambda: bool(failures.current))
        assert "Read-only file system" in failures.current[0].message
    finally:
        await scrubber.close()
        world.pools.close()


@pytest.mark.fault("A scrub meets saves, restores and the end of its process")
def test_a_pass_waits_for_saves_and_still_ends_in_time() -> None:
    schedule = ScrubPace(total_bytes=1000, pass_seconds=100.0, started=0.0)
    assert not schedule.is_late(49.0), "half of the time it may wait"
    schedule.done_bytes = 300
    assert not schedule.is_late(64.0)
    assert schedule.is_late(66.0)
    schedule.done_bytes = 1000
    assert not schedule.is_late(500.0)


def test_idle_reads_take_half_of_a_pass() -> None:
    total = 1 << 40
    schedule = ScrubPace(total, 43_200.0, 0.0)
    assert schedule.pause_seconds(total) == pytest.approx(21_600.0)
    assert ScrubPace(10, 43_200.0, 0.0).pause_seconds(4 << 20) == 1.0, "not slower than that"


@pytest.mark.fault("A save or a restore runs when a scrub is due")
async def test_nothing_is_read_while_a_save_or_a_restore_runs(tmp_path: Path) -> None:
    """The pass has a long period, so that it is never late."""
    world = World(tmp_path)
    world.is_busy = True
    asked = asyncio.Event()

    def busy() -> bool:
        asked.set()
        return world.is_busy

    settings = Settings(contract_with(), scrub_pass_seconds=1e6, scrub_rest_seconds=0.0)
    clock = ManualClock()
    scrubber = world.scrubber_of(settings, clock=clock, busy=busy)
    documents = len(DOCUMENT) + len(LAYOUT)
    scrubber.start()
    try:
        await asyncio.sleep(0)
        clock.advance(0.1)
        await asyncio.wait_for(asked.wait(), HANG_SECONDS)
        assert world.counted(SCRUBBED) == documents
        world.is_busy = False
        async with asyncio.timeout(HANG_SECONDS):
            while world.counted(SCRUBBED) < documents + len(PAYLOAD):
                clock.advance(1.0)
                await SystemClock().sleep(0.01)
    finally:
        await scrubber.close()
        world.pools.close()


@pytest.mark.fault("One document cannot be read during a scrub")
def test_an_unreadable_document_hides_no_other(tmp_path: Path) -> None:
    world = World(tmp_path)
    damaged = tmp_path / "node" / JOB.uid / "manifests/s000000000099/r000000.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"no manifest")
    error = TierError("reading manifest /node/x: Input/output error")
    faults = Faults([Fault("get_manifest", error, times=1)])
    found = bad_documents(Faulty(world.node, faults), lambda length: None)
    assert next(found).manifest is not None
    with pytest.raises(TierError, match="Input/output error"):
        next(found)
    world.pools.close()


@pytest.mark.fault("A copy cannot be replaced during a scrub")
async def test_an_error_while_a_copy_is_replaced_does_not_end_the_scrub(tmp_path: Path) -> None:
    """The failure ends when it succeeds again, and not with the next pass, half a day later."""

    class FailingReplacer:
        calls = 0
        fails = True

        async def replace_missing(self) -> None:
            self.calls += 1
            if self.fails:
                raise OSError(errno.EIO, "Input/output error")

    world, replacer, failures = World(tmp_path), FailingReplacer(), Failures(lambda: None)
    scrubber = world.scrubber_of(
        Settings(contract_with(), scrub_pass_seconds=1e6, scrub_rest_seconds=0.001),
        failures=failures,
        replacer=replacer,
    )
    scrubber.start()
    try:
        await world.until(lambda: replacer.calls >= 3)
        assert "Input/output error" in failures.current[0].message
        replacer.fails = False
        await world.until(lambda: not failures.current)
    finally:
        await scrubber.close()
        world.pools.close()
