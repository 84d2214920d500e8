"""Programs for crash tests: what the persister of a folder does in one save of two ranks.

usage: directory_crash_programs.py kills|starts|power|again|training

The program prints a report as JSON. It must be a process of its own, because a tracer waits for all of its
children.
"""

from __future__ import annotations

import functools
import json
import queue
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

from tests.support.crash.crash import (
    Report,
    beside,
    cut_power,
    cut_power_after_a_restart,
    kill_at_every_call,
    record,
)
from tests.support.crash.traced import Announce
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import payload, rank_layout_and_plan

from holdfast.directory.choice import candidates, load_choice
from holdfast.directory.commit import Committer
from holdfast.directory.folder_store import FolderStore
from holdfast.directory.open_folder import ServiceOptions
from holdfast.directory.persister import DirectoryService
from holdfast_core.format.canonical import digest_of, unsealed
from holdfast_core.ids import Level, Rank, Step
from holdfast_core.messages.schema import Fill, Policy, Stage, StepOutcome
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shm.shared_files import LayoutFiles
from holdfast_core.shm.slot_file import HEADER_BYTES, SlotFile, SlotHeader, SlotState, slot_name
from holdfast_core.store_url import parse_store_url

WORLD = 2
ROWS = 1000
CAPACITY = 64 << 10
NOT_DURABLE = ("ckpt/records", "ckpt/.prune")
"""Files that are not synced, so a power cut may tear or remove them: see test_directory_commit.py."""


@functools.cache
def layout_and_size(rank: int) -> tuple[bytes, int]:
    layout, plan = rank_layout_and_plan(rank=rank, world_size=WORLD, rows_per_rank=ROWS)
    return layout, plan.total_bytes


@functools.cache
def bytes_of(step: int, rank: int) -> bytes:
    return payload(layout_and_size(rank)[1], seed=100 * step + rank)


class Gang:
    """Two ranks and their persister. Shared memory is not watched, because it is not durable."""

    def __init__(self, directory: Path, memory: Path) -> None:
        self.memory = memory
        self.levels: queue.SimpleQueue[StepOutcome] = queue.SimpleQueue()
        for rank in range(WORLD):
            (memory / slot_name(Rank(rank), 0)).write_bytes(bytes(HEADER_BYTES + CAPACITY))
            self.slot(rank).write_header(SlotHeader(SlotState.FREE, Rank(rank), CAPACITY))
        self.service = DirectoryService.start(
            ServiceOptions(
                root=directory / "ckpt",
                slots_dir=memory,
                layouts_dir=memory / "layouts",
                world_size=WORLD,
                own_ranks=range(WORLD),
                policy=Policy(interval_steps=1, keep_last=2),
            )
        )

    def slot(self, rank: int) -> SlotFile:
        return SlotFile.open(self.memory, slot_name(Rank(rank), 0))

    def save(self, step: int, announce: Announce) -> None:
        self.stage(step)
        for _ in range(WORLD):
            message = self.levels.get(timeout=HANG_SECONDS)
            while message.failed or message.level is not Level.LOCAL:
                message = self.levels.get(timeout=HANG_SECONDS)
        announce(f"committed {step}")

    def stage(self, step: int) -> None:
        for rank in range(WORLD):
            layout, size = layout_and_size(rank)
            LayoutFiles(self.memory / "layouts").ensure(layout, digest_of(layout))
            slot = self.slot(rank)
            slot.write_payload(0, memoryview(bytes_of(step, rank)))
            slot.write_header(
                SlotHeader(
                    SlotState.FULL, Rank(rank), CAPACITY, self.service.round, Step(step), size
                )
            )
            slot.close()
            stage = Stage(
                self.service.round, Step(step), Rank(rank), slot.name, size, digest_of(layout)
            )
            self.service.handle(stage, self.levels.put)

    def filled(self, rank: int) -> bytes:
        """Restore into the rank's slot and return the payload."""
        offer = slot_name(Rank(rank), 0)
        filled = self.service.handle(Fill(self.service.round, Rank(rank), (offer,)), print)
        data = bytearray(filled.payload_bytes)
        slot = self.slot(rank)
        slot.read_into(0, memoryview(data))
        slot.close()
        return bytes(data)


def train(directory: Path, announce: Announce, *steps: int) -> None:
    """Run one training over the folder: save and commit the steps."""
    with beside(directory) as memory:
        gang = Gang(directory, memory)
        announce(f"round {gang.service.round}")
        for step in steps:
            gang.save(step, announce)
        gang.service.finish(HANG_SECONDS)


def leave_prepared(directory: Path, step: int) -> None:
    """Save a step whose shards are durable when the run ends, but which is not committed."""
    with beside(directory) as memory:
        gang = Gang(directory, memory)
        gang.stage(step)
        gang.service.finish(0)


def check(directory: Path, said: Sequence[str]) -> list[str]:
    """Return what is wrong after a crash.

    A new run must restore the last acknowledged step or a newer one, bit by bit, and then save two more.
    """
    committed = [int(text.split()[1]) for text in said if text.startswith("committed")]
    rounds = [int(text.split()[1]) for text in said if text.startswith("round")]
    problems: list[str] = []
    with beside(directory) as memory:
        gang = Gang(directory, memory)
        restored = gang.service.restore_point.step
        if (restored or 0) < max(committed, default=0):
            problems.append(f"step {max(committed)} was acknowledged, {restored} is restored")
        if gang.service.round <= max(rounds, default=-1):
            problems.append(f"round {gang.service.round} begins again: {rounds} were there")
        if restored is not None:
            for rank in range(WORLD):
                if gang.filled(rank) != bytes_of(restored, rank):
                    problems.append(f"rank {rank} of step {restored} got other bytes")
        problems += whole(directory)
        last = restored or 0
        for step in (last + 1, last + 2):
            gang.save(step, lambda _: None)
        gang.service.finish(HANG_SECONDS)
    problems += whole(directory)
    kept = sorted(p.parent.name for p in (directory / "ckpt/tier").rglob("manifests/*/*.json"))
    shards = sorted(
        {p.parent.name.partition("-")[0] for p in (directory / "ckpt/tier").rglob("*.shard")}
    )
    wanted = {f"s{step:012d}" for step in (last + 1, last + 2)}
    if not wanted <= set(kept) or set(kept) != set(shards):
        problems.append(f"manifests of {kept} and shards of {shards} are left, wanted {wanted}")
    own = f"r{gang.service.round:06d}-standalone"
    left = [p.name for p in (directory / "ckpt/records").rglob("*") if p.name != own]
    problems += [f"left behind: {name}" for name in left]
    return problems


def whole(directory: Path) -> list[str]:
    """Return what is wrong with the folder. Each manifest must belong to a complete checkpoint, and no
    file may be quarantined or left over."""
    tier = DiskNodeTier(directory / "ckpt/tier", fill_limit=1.0)
    report = tier.open()
    problems = [*report.quarantined, *report.skipped]
    for checkpoint in candidates(tier):
        manifest = load_choice(tier, checkpoint).manifest
        for rank in range(WORLD):
            with tier.open_shard(manifest.ref(Rank(rank))) as reader:
                data = b"".join(bytes(piece) for piece in reader.read_payload())
            if data != bytes_of(checkpoint.step, rank):
                problems.append(f"rank {rank} of {checkpoint} holds other bytes")
    names = [p.name for p in (directory / "ckpt/tier").rglob("*")]
    return problems + [f"left behind: {name}" for name in names if name.startswith(".tmp")]


def adopt(directory: Path, announce: Announce) -> None:
    """Record which training the store of the folder belongs to."""
    with beside(directory) as bucket:
        url = parse_store_url(f"file://{bucket}")
        store = FolderStore(url, {}, directory / "ckpt/store", "run", lambda seconds: True)
        store.adopt(has_checkpoints=False, is_writable=True)
        announce(unsealed((directory / "ckpt/store/training").read_bytes(), "training").decode())
        store.close()


def check_training(directory: Path, said: Sequence[str]) -> list[str]:
    record = directory / "ckpt/store/training"
    found = unsealed(record.read_bytes(), "training").decode() if record.exists() else None
    if said and found != said[-1]:
        return [f"the folder names the training {found}, it was {said[-1]}"]
    return []


def main(what: str) -> Report:
    def first(directory: Path) -> None:
        train(directory, lambda _: None, 1, 2)

    def second(directory: Path, announce: Announce) -> None:
        train(directory, announce, 3)

    def first_without_commit(directory: Path) -> None:
        first(directory)
        with patch.object(Committer, "commit", side_effect=OSError("killed here")):
            leave_prepared(directory, 3)

    def start(directory: Path, announce: Announce) -> None:
        announce("committed 3")  # all ranks had made step 3 durable
        train(directory, announce)

    match what:
        case "kills":
            return kill_at_every_call(first, second, check)
        case "starts":
            return kill_at_every_call(first_without_commit, start, check)
        case "power":
            return cut_power(
                record(lambda d, announce: train(d, announce, 1, 2, 3), ignored=NOT_DURABLE), check
            )
        case "again":
            return cut_power_after_a_restart(first, second, check, ignored=NOT_DURABLE)
        case "training":
            return cut_power(record(adopt), check_training)
        case _:
            raise SystemExit(f"unknown: {what}")


if __name__ == "__main__":
    print(json.dumps(asdict(main(*sys.argv[1:]))))
