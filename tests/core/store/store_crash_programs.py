"""Programs for crash tests: what an upload to a folder writes, and a check of what is left.

usage: store_crash_programs.py kills|power|again

The program prints a report as JSON. It must be a process of its own, because a tracer waits for all of its
children.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from tests.support.crash.crash import (
    Report,
    beside,
    cut_power,
    cut_power_after_a_restart,
    kill_at_every_call,
    record,
)
from tests.support.crash.traced import Announce
from tests.support.shards.builders import (
    JOB_UID,
    manifest,
    payload,
    rank_layout,
    shard_file,
    shard_header,
)
from tests.support.shards.shard_files import CopyWriters, write_shard

from holdfast_core.format.manifest import parse_manifest
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.shards.file import ShardHeader, ShardRecord
from holdfast_core.store.directory import DirectoryObjectStore
from holdfast_core.store.tier import ObjectTier

NAMESPACE = "team-a"
WORLD = 2
SIZE = 20_000


def records(step: int) -> list[ShardRecord]:
    return [
        shard_file(header(step, rank), payload(SIZE, seed=10 * step + rank))[1]
        for rank in range(WORLD)
    ]


def header(step: int, rank: int) -> ShardHeader:
    return shard_header(SIZE, step=step, rank=rank, world_size=WORLD)


def persist(directory: Path, step: int, announce: Announce) -> None:
    """Put layouts, shards and manifest of a step. Then delete the checkpoints that are two or more steps
    older."""
    tier = ObjectTier(DirectoryObjectStore(directory / "store"))
    with beside(directory) as memory:
        for rank in range(WORLD):
            data = payload(SIZE, seed=10 * step + rank)
            with write_shard(memory, header(step, rank), data) as reader:
                tier.put_layout(NAMESPACE, reader.record.ref, rank_layout(rank=rank))
                tier.upload_shard(NAMESPACE, reader)
    found = manifest(records(step))
    tier.put_manifest(NAMESPACE, JOB_UID, found.checkpoint, found.to_bytes())
    announce(f"persisted {step}")
    for checkpoint in tier.list_manifests(NAMESPACE, JOB_UID):
        if checkpoint.step <= step - 2:
            tier.delete_checkpoint(NAMESPACE, JOB_UID, checkpoint)


def check(directory: Path, said: Sequence[str]) -> list[str]:
    """Return what is wrong after a crash. The layouts and the shards of every manifest must be complete, no
    acknowledged step may be missing, and further steps can be persisted."""
    persisted = [int(text.split()[1]) for text in said]
    problems = readable(directory, max(persisted, default=0))
    newest = max((c.step for c in listed(directory)), default=Step(0))
    for step in (newest + 1, newest + 2, newest + 3):  # the first may be the interrupted step
        persist(directory, step, lambda _: None)
    problems += readable(directory, newest + 3)
    tier = ObjectTier(DirectoryObjectStore(directory / "store"))
    for step in range(1, newest + 2):  # an interrupted delete is repeated
        tier.delete_checkpoint(NAMESPACE, JOB_UID, CheckpointId(Step(step), RestartRound(0)))
    tier.abort_stale(NAMESPACE, JOB_UID, timedelta(0))
    kept = {f"s{step:012d}-r000000" for step in (newest + 2, newest + 3)}
    for path in (directory / "store").rglob("shards/*/*"):
        if path.parent.name not in kept:
            problems.append(f"left behind: {path}")
    return problems


def listed(directory: Path) -> tuple[CheckpointId, ...]:
    return ObjectTier(DirectoryObjectStore(directory / "store")).list_manifests(NAMESPACE, JOB_UID)


def readable(directory: Path, at_least: int) -> list[str]:
    tier = ObjectTier(DirectoryObjectStore(directory / "store"))
    found = listed(directory)
    newest = max((c.step for c in found), default=Step(0))
    problems = [] if newest >= at_least else [f"step {at_least} was persisted, {newest} is left"]
    for checkpoint in found:
        held = parse_manifest(tier.get_manifest(NAMESPACE, JOB_UID, checkpoint))
        for record_ in records(checkpoint.step):
            layout = held.shards[record_.header.rank].layout
            assert tier.get_layout(NAMESPACE, record_.ref, layout)
            with beside(directory) as memory:
                tier.download_shard(NAMESPACE, record_.ref, CopyWriters(memory))
    return problems


def first(directory: Path) -> None:
    for step in (1, 2):
        persist(directory, step, lambda _: None)


def second(directory: Path, announce: Announce) -> None:
    persist(directory, 3, announce)


def whole_life(directory: Path, announce: Announce) -> None:
    for step in (1, 2, 3):
        persist(directory, step, announce)


def main(what: str) -> Report:
    match what:
        case "kills":
            return kill_at_every_call(first, second, check)
        case "power":
            return cut_power(record(whole_life), check)
        case "again":
            return cut_power_after_a_restart(first, second, check)
        case _:
            raise SystemExit(f"unknown: {what}")


if __name__ == "__main__":
    print(json.dumps(asdict(main(*sys.argv[1:]))))
