"""Saves that a persister has not yet written when the next run of its folder takes over the memory."""

from __future__ import annotations

from pathlib import Path

from tests.support.crash.failpoints import failpoints
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import payload, rank_layout_and_plan

from holdfast.directory.choice import JOB_UID
from holdfast.directory.open_folder import ServiceOptions
from holdfast.directory.persister import DirectoryService
from holdfast.slots.staging import SlotRing
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.manifest import parse_manifest
from holdfast_core.ids import CheckpointId, Rank, RestartRound, Step
from holdfast_core.messages.schema import Policy, Stage
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shm.shared_files import LayoutFiles

LAYOUT, PLAN = rank_layout_and_plan(rank=0, world_size=1, rows_per_rank=100)
SIZE = PLAN.total_bytes


def bytes_of(step: int) -> bytes:
    return payload(SIZE, seed=step)


def test_a_queued_save_keeps_its_bytes_when_its_slot_is_replaced(tmp_path: Path) -> None:
    slots = tmp_path / "slots"
    service = DirectoryService.start(
        ServiceOptions(
            root=tmp_path / "ckpt",
            slots_dir=slots,
            layouts_dir=tmp_path / "layouts",
            world_size=1,
            own_ranks=range(1),
            policy=Policy(interval_steps=1, keep_last=3),
        )
    )
    LayoutFiles(tmp_path / "layouts").ensure(LAYOUT, digest_of(LAYOUT))
    ring = SlotRing(slots, Rank(0), 2)
    ring.ensure(SIZE, service.round)
    with failpoints(f"directory.write_shard=wait:{tmp_path}/go"):
        for step in (1, 2):  # step 1 is being written, step 2 waits
            slot = ring.acquire()
            slot.begin(service.round, Step(step), SIZE)
            slot.payload[:SIZE] = list(bytes_of(step))
            slot.complete()
            stage = Stage(service.round, Step(step), Rank(0), slot.name, SIZE, digest_of(LAYOUT))
            service.handle(stage, lambda _: None)
        next_ring = SlotRing(slots, Rank(0), 2)
        next_ring.ensure(SIZE, RestartRound(service.round + 1))
        assert all(slot.header().step is None for slot in next_ring.slots)
        (tmp_path / "go").touch()
        service.finish(HANG_SECONDS)
    tier = DiskNodeTier(tmp_path / "ckpt/tier", fill_limit=1.0)
    tier.open()
    for step in (1, 2):
        checkpoint = CheckpointId(Step(step), service.round)
        manifest = parse_manifest(tier.get_manifest(JOB_UID, checkpoint))
        with tier.open_shard(manifest.ref(Rank(0))) as reader:
            assert b"".join(bytes(p) for p in reader.read_payload()) == bytes_of(step)
    ring.close()
    next_ring.close()
