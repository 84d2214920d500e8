"""A process is killed at every step of a write. The next process finds the complete shard or none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.support import zygote
from tests.support.crash.failpoints import PANIC_EXIT_CODE, VARIABLE
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import (
    JOB_UID,
    BytesSource,
    payload,
    shard_file,
    shard_header,
)

from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.node.tier import DiskNodeTier, OpenReport

SIZE = 200_000
CHILD = Path(__file__).with_name("crash_writer.py")
CHECKPOINT = CheckpointId(Step(10), RestartRound(0))


def crash(root: Path, what: str, point: str) -> None:
    done = zygote.run(
        [sys.executable, str(CHILD), str(root), what],
        env={**os.environ, VARIABLE: f"{point}=panic"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == PANIC_EXIT_CODE, done.stderr


def reopened(root: Path) -> tuple[DiskNodeTier, OpenReport]:
    tier = DiskNodeTier(root, capacity_bytes=64 << 20)
    return tier, tier.open()


def temporaries(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.name.startswith(".tmp-")]


@pytest.mark.fault("A process is killed at any system call of a save")
@pytest.mark.parametrize("what", ["shard", "copy"])
@pytest.mark.parametrize(
    ("point", "visible"),
    [
        ("node.before_temp", False),
        ("node.after_create", False),
        ("node.write", False),
        ("node.before_fsync", False),
        ("node.after_fsync", False),
        ("node.after_rename", True),
        ("node.after_dirsync", True),
    ],
    ids=[
        "before-temporary",
        "created",
        "writing",
        "before-fsync",
        "after-fsync",
        "renamed",
        "durable",
    ],
)
def test_a_killed_write_leaves_a_whole_shard_or_none(
    tmp_path: Path, what: str, point: str, visible: bool
) -> None:
    root = tmp_path / "node"
    crash(root, what, point)
    tier, report = reopened(root)
    assert (report.shards, report.quarantined, report.skipped) == (int(visible), (), ())
    assert temporaries(root) == []
    for record in tier.list_shards():
        with tier.open_shard(record.ref) as reader:
            reader.verify()
    record = tier.write_shard(shard_header(SIZE), BytesSource(payload(SIZE)))
    assert tier.list_shards() == (record,)
    assert tier.volume.budget.used_bytes == record.file_bytes


@pytest.mark.fault("A process is killed in the middle of a write")
def test_a_write_killed_in_its_middle_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "node"
    crash(root, "shard", "node.mid_write")
    tier, report = reopened(root)
    assert (report.shards, report.removed_temporaries) == (0, 1)
    assert temporaries(root) == []
    assert tier.volume.budget.used_bytes == 0


@pytest.mark.parametrize(
    ("point", "visible"),
    [
        ("node.after_create", False),
        ("node.write", False),
        ("node.after_fsync", False),
        ("node.after_rename", True),
        ("node.after_dirsync", True),
    ],
)
def test_a_killed_put_leaves_a_whole_manifest_or_none(
    tmp_path: Path, point: str, visible: bool
) -> None:
    root = tmp_path / "node"
    crash(root, "manifest", point)
    tier, _ = reopened(root)
    assert temporaries(root) == []
    assert tier.list_manifests() == (((JOB_UID, CHECKPOINT),) if visible else ())
    tier.put_manifest(JOB_UID, CHECKPOINT, b'{"a":1}')
    assert tier.get_manifest(JOB_UID, CHECKPOINT) == b'{"a":1}'


@pytest.mark.fault("A process is killed while it deletes a checkpoint")
@pytest.mark.parametrize(
    ("point", "manifest_left", "shards_left"),
    [
        ("node.before_tombstone", 1, 2),
        ("node.after_tombstone", 0, 2),
        ("node.before_delete", 0, 2),
    ],
    ids=["before", "manifest-is-gone", "before-delete"],
)
def test_a_killed_delete_has_taken_the_manifest_first(
    tmp_path: Path, point: str, manifest_left: int, shards_left: int
) -> None:
    root = tmp_path / "node"
    tier, _ = reopened(root)
    for rank in range(2):
        tier.write_shard(shard_header(SIZE, rank=rank), BytesSource(payload(SIZE, seed=rank)))
    tier.put_manifest(JOB_UID, CHECKPOINT, b"{}")
    crash(root, "delete", point)
    tier, report = reopened(root)
    assert len(tier.list_manifests()) == manifest_left
    assert report.shards == shards_left
    tier.delete_checkpoint(JOB_UID, CHECKPOINT)
    assert (tier.list_manifests(), tier.list_shards(), tier.volume.budget.used_bytes) == ((), (), 0)
    assert list(root.rglob("*.shard")) == []


@pytest.mark.parametrize("point", ["node.after_create", "node.write", "node.after_rename"])
def test_a_killed_round_is_the_old_or_the_new_one(tmp_path: Path, point: str) -> None:
    root = tmp_path / "node"
    tier, _ = reopened(root)
    tier.records.write_round(RestartRound(4), 1)
    crash(root, "round", point)
    tier, _ = reopened(root)
    assert tier.records.read_round() == ((5, 2) if point == "node.after_rename" else (4, 1))


def test_a_temporary_of_a_living_process_stays(tmp_path: Path) -> None:
    root = tmp_path / "node"
    tier, _ = reopened(root)
    file, record = shard_file(shard_header(SIZE), payload(SIZE))
    writer = tier.begin_copy(record.ref, len(file))
    writer.write(file)
    _, report = reopened(root)
    assert report.removed_temporaries == 0
    assert writer.commit() == record
