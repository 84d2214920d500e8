"""Programs for crash tests: what a sidecar does to its node tier in one save, and a check of what is left.

usage: crash_programs.py kills|power|power-spares [MUTANT] | kills-spares | again |
       crash_programs.py fails|fails-for-ever ERRNO

The program prints a report as JSON. It must be a process of its own, because a tracer waits for all of its
children.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.support.crash.crash import (
    Report,
    cut_power,
    cut_power_after_a_restart,
    fail_at_every_call,
    kill_at_every_call,
    record,
)
from tests.support.crash.traced import Announce
from tests.support.crash.write_orders import Acknowledged, Link, Op, Rename, Sync
from tests.support.shards.builders import (
    JOB,
    JOB_UID,
    BytesSource,
    build_manifest,
    payload,
    rank_layout_and_plan,
    shard_file,
    shard_header,
)
from tests.support.tiers.candidates import candidates

from holdfast_core.errors import HoldfastError
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.payload import PayloadPlan
from holdfast_core.format.rank_layout import layout_digests
from holdfast_core.ids import CheckpointId, Rank, RestartRound, ShardRef, Step
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.file import ShardHeader
from holdfast_sidecar.upkeep.prune import delete_steps

WORLD = 2
ROWS = 1000
KEPT = 2
ROUND = RestartRound(3)


def opened(directory: Path) -> DiskNodeTier:
    tier = DiskNodeTier(directory / "node", capacity_bytes=64 << 20)
    tier.open()
    return tier


@functools.cache
def plan_of(rank: int) -> tuple[bytes, PayloadPlan]:
    return rank_layout_and_plan(rank=rank, world_size=WORLD, rows_per_rank=ROWS)


@functools.cache
def bytes_of(step: int, rank: int) -> bytes:
    """Return a payload. Its first half is the same at every step."""
    size = plan_of(rank)[1].total_bytes
    return payload(size // 2, seed=rank) + payload(size - size // 2, seed=100 * step + rank)


def header_of(step: int, rank: int) -> ShardHeader:
    return shard_header(
        len(bytes_of(step, rank)),
        round=ROUND,
        step=step,
        rank=rank,
        world_size=WORLD,
        layout=digest_of(plan_of(rank)[0]),
        chunk_bytes=4096,
    )


def save(tier: DiskNodeTier, step: int, announce: Announce, order: str = "") -> None:
    """Write the shard of this pod's rank 0 and a peer's copy of rank 1, commit, and prune."""
    layouts = [plan_of(rank)[0] for rank in range(WORLD)]
    headers = [header_of(step, rank) for rank in range(WORLD)]
    files = [shard_file(headers[rank], bytes_of(step, rank)) for rank in range(WORLD)]
    shards = [(record, layout_digests(layouts[rank])) for rank, (_, record) in enumerate(files)]
    checkpoint = files[0][1].checkpoint
    manifest = build_manifest(JOB, shards, parent=None)
    for layout in layouts:
        tier.put_layout(layout)
    if order == "manifest-before-shards":
        tier.put_manifest(JOB_UID, checkpoint, manifest)
    tier.write_shard(headers[0], BytesSource(bytes_of(step, 0)))
    file, record = files[1]
    if tier.find(record.ref) is None:
        writer = tier.begin_copy(record.ref, len(file))
        writer.write(file)
        writer.commit()
    tier.put_manifest(JOB_UID, checkpoint, manifest)
    announce(f"committed {step}")
    old = Step(step - KEPT)
    if order == "shards-deleted-first":
        for found in tier.list_shards():
            if found.header.step == old:
                tier.delete_shard(found.ref)
    delete_steps(tier, JOB_UID, frozenset({old}))


def first_saves(directory: Path) -> None:
    tier = opened(directory)
    tier.records.write_round(RestartRound(2), 7)
    for step in (1, 2):
        save(tier, step, lambda _: None)


def next_save(directory: Path, announce: Announce, order: str = "") -> None:
    """Save step 3 as a restarted sidecar in a new round does. This is the save that is killed."""
    tier = opened(directory)
    tier.records.write_round(ROUND, 1)
    announce(f"round {ROUND}")
    save(tier, 3, announce, order)


def saves_before_spares(directory: Path) -> None:
    """Save three steps, of which the first is pruned. Its two files are spare then."""
    tier = opened(directory)
    for step in (1, 2, 3):
        save(tier, step, lambda _: None)
    expect_spare_files(directory, 2)


def overwriting_save(directory: Path, announce: Announce) -> None:
    """Save as a restarted sidecar does, in the files of the step that was pruned before."""
    tier = opened(directory)
    before = spare_files(directory)
    save(tier, 4, announce)
    after = spare_files(directory)
    if before & after or len(after) != len(before):
        raise AssertionError(f"inodes {before} were spare files, and {after} are")


def life_with_spares(directory: Path, announce: Announce) -> None:
    """Delete one of two shards of a step that was never committed, and save into its file."""
    tier = opened(directory)
    deleted, _ = [
        tier.write_shard(header_of(1, rank), BytesSource(bytes_of(1, rank)))
        for rank in range(WORLD)
    ]
    tier.delete_shard(deleted.ref)
    expect_spare_files(directory, 1)
    save(tier, 2, announce)
    expect_spare_files(directory, 0)
    save(tier, 3, announce)


def spare_files(directory: Path) -> frozenset[int]:
    return frozenset(path.stat().st_ino for path in (directory / "node" / "spare").iterdir())


def expect_spare_files(directory: Path, count: int) -> None:
    if len(spare_files(directory)) != count:
        raise AssertionError(f"{len(spare_files(directory))} spare files, expected {count}")


def struck_save(directory: Path, announce: Announce) -> None:
    """Save while one call fails. The operation succeeds in another way, or it fails and is repeated."""
    tiers: list[DiskNodeTier] = []

    def attempt() -> None:
        if not tiers:
            tiers.append(opened(directory))
        (tier,) = tiers
        tier.records.write_round(ROUND, 1)
        announce(f"round {ROUND}")
        save(tier, 3, announce)

    before = len(os.listdir("/proc/self/fd"))
    try:
        attempt()
    except HoldfastError:
        attempt()
    if len(os.listdir("/proc/self/fd")) != before:
        raise AssertionError("a descriptor stays open")
    if leftovers(directory):
        raise AssertionError(f"{leftovers(directory)} of a living process")


def stuck_save(directory: Path, announce: Announce) -> None:
    """Save while all calls fail from a certain one on."""
    try:
        next_save(directory, announce)
    except HoldfastError:
        return


def whole_life(directory: Path, announce: Announce, order: str = "") -> None:
    tier = opened(directory)
    tier.records.write_round(ROUND, 1)
    announce(f"round {ROUND}")
    for step in (1, 2, 3):
        save(tier, step, announce, order)


def check(directory: Path, acknowledged: Sequence[str]) -> list[str]:
    """Return what is wrong after a crash: I1, I2, I7 and the order of steps, in a fresh process that then
    saves again."""
    tier = DiskNodeTier(directory / "node", capacity_bytes=64 << 20)
    report = tier.open()
    problems = [f"quarantined: {why}" for why in report.quarantined]
    problems += [f"skipped: {why}" for why in report.skipped]
    problems += leftovers(directory)
    rounds = [int(text.split()[1]) for text in acknowledged if text.startswith("round")]
    if rounds and (tier.records.read_round() or (-1, 0))[0] < max(rounds):
        problems.append(
            f"round {max(rounds)} was acknowledged, the disk says {tier.records.read_round()}"
        )
    problems += restorable(
        tier, [int(w.split()[1]) for w in acknowledged if w.startswith("committed")]
    )
    last = max((c.step for _, c in tier.list_manifests()), default=Step(0))
    for step in (last + 1, last + 2):  # the crash may have interrupted the first of them
        save(tier, step, lambda _: None)
    older = frozenset(r.header.step for r in tier.list_shards() if r.header.step <= last)
    delete_steps(tier, JOB_UID, older)
    problems += restorable(opened(directory), [last + 1, last + 2])
    kept = {record.header.step for record in tier.list_shards()}
    if kept != {last + 1, last + 2}:
        problems.append(f"shards of steps {sorted(kept)} are left after the next saves")
    return problems + leftovers(directory)


def restorable(tier: DiskNodeTier, committed: Sequence[int]) -> list[str]:
    """Return what is wrong with the checkpoints. Each manifest must belong to a complete checkpoint, and
    the newest must not be older than the last acknowledged step."""
    problems: list[str] = []

    def skipped(checkpoint: CheckpointId, why: str) -> None:
        problems.append(f"{checkpoint} cannot be restored: {why}")

    found = list(candidates(tier, JOB_UID, skipped=skipped))
    newest = max((c.manifest.step for c in found), default=Step(0))
    if newest < max(committed, default=0):
        problems.append(f"step {max(committed)} was acknowledged, step {newest} is the newest left")
    for candidate in found:
        for rank in range(WORLD):
            ref: ShardRef = candidate.manifest.ref(Rank(rank))
            with tier.open_shard(ref) as reader:
                data = b"".join(bytes(piece) for piece in reader.read_payload())
            if data != bytes_of(ref.step, rank):
                problems.append(f"rank {rank} of step {ref.step} holds other bytes")
    return problems


def leftovers(directory: Path) -> list[str]:
    return [f"left behind: {p.name}" for p in directory.rglob("*") if p.name.startswith(".tmp")]


# ---------------------------------------------------------------------- mutants


def without_directory_fsync(log: Sequence[Op]) -> list[Op]:
    files = {op.inode for op in log if isinstance(op, Rename | Link)}
    return [op for op in log if not isinstance(op, Sync) or op.inode in files]


def without_file_fsync(log: Sequence[Op]) -> list[Op]:
    files = {op.inode for op in log if isinstance(op, Rename | Link)}
    return [op for op in log if not isinstance(op, Sync) or op.inode not in files]


def rename_before_fsync(log: Sequence[Op]) -> list[Op]:
    """Move the fsync of each file from before its publication to right after it."""
    result: list[Op] = []
    late: dict[int, Sync] = {}
    files = {op.inode for op in log if isinstance(op, Rename | Link)}
    for op in log:
        if isinstance(op, Sync) and op.inode in files:
            late[op.inode] = op
            continue
        result.append(op)
        if isinstance(op, Rename | Link) and op.inode in late:
            result.append(late.pop(op.inode))
    return result


def acknowledged_early(log: Sequence[Op]) -> list[Op]:
    """Acknowledge one durable change too early, before the last fsync."""
    result: list[Op] = []
    for op in log:
        result.append(op)
        if isinstance(op, Acknowledged):
            last = max(n for n, before in enumerate(result) if isinstance(before, Sync))
            result.insert(last, result.pop())
    return result


def overwritten_before_deleted(log: Sequence[Op]) -> list[Op]:
    """Drop the fsync that makes the deletion of a shard durable before its file is a spare one."""
    result: list[Op] = []
    deleted: Rename | None = None
    for op in log:
        if isinstance(op, Rename) and op.name.endswith(".shard"):
            deleted = op
        elif deleted is not None and isinstance(op, Sync) and op.inode == deleted.parent:
            deleted = None
            continue
        result.append(op)
    return result


LOG_MUTANTS = {
    "overwritten-before-deleted": overwritten_before_deleted,
    "no-directory-fsync": without_directory_fsync,
    "no-file-fsync": without_file_fsync,
    "rename-before-fsync": rename_before_fsync,
    "acknowledged-early": acknowledged_early,
}


def main(what: str, mutant: str = "") -> Report:
    if what == "kills":
        killed = lambda directory, announce: next_save(directory, announce, mutant)  # noqa: E731
        return kill_at_every_call(first_saves, killed, check, enough=1 if mutant else 20)
    if what == "kills-spares":
        return kill_at_every_call(saves_before_spares, overwriting_save, check)
    if what in ("power", "power-spares"):
        order = "" if mutant in LOG_MUTANTS else mutant
        life = lambda d, announce: whole_life(d, announce, order)  # noqa: E731
        log = record(life_with_spares if what == "power-spares" else life)
        mutated = LOG_MUTANTS.get(mutant, list)(log)
        return cut_power(mutated, check, enough=1 if mutant else 20)
    if what in ("fails", "fails-for-ever"):
        return fail_at_every_call(
            first_saves,
            struck_save if what == "fails" else stuck_save,
            check,
            error=getattr(errno, mutant),
            for_ever=what == "fails-for-ever",
        )
    if what == "again":
        return cut_power_after_a_restart(first_saves, next_save, check)
    raise SystemExit(f"unknown: {what}")


if __name__ == "__main__":
    print(json.dumps(asdict(main(*sys.argv[1:]))))
