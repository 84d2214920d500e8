"""Layouts that no shard and no manifest names any more are deleted, and no others."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support import zygote
from tests.support.clock import ManualClock
from tests.support.crash.failpoints import PANIC_EXIT_CODE, VARIABLE, failpoints
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import (
    JOB_UID,
    BytesSource,
    manifest,
    payload,
    rank_layout,
    shard_header,
)
from tests.support.trainer.launched import until

from holdfast_core.errors import CorruptionError
from holdfast_core.ids import CheckpointId, Digest, RestartRound, Step
from holdfast_core.node.documents import UNUSED_SECONDS, UnusedLayouts
from holdfast_core.node.files import BufferPool
from holdfast_core.node.shard_file import WRITE_BYTES
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.shards.file import ShardRecord

CHILD = Path(__file__).with_name("crash_writer.py")
SIZE = 5000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "node"


def opened(root: Path) -> DiskNodeTier:
    tier = DiskNodeTier(root, capacity_bytes=64 << 20)
    tier.open()
    return tier


def document(number: int = 1) -> bytes:
    """Return a layout. Each number gives another one."""
    return rank_layout(rows_per_rank=number)


class Looker:
    """A process that looks for unused layouts, with a clock that the test moves."""

    def __init__(self, root: Path) -> None:
        self._clock = ManualClock()
        self._unused = UnusedLayouts(root, BufferPool(WRITE_BYTES, keep=1), self._clock.monotonic)

    def look(self, after: float = UNUSED_SECONDS, known: frozenset[Digest] = frozenset()) -> int:
        self._clock.advance(after)
        return self._unused.look(known)


def unused_layout(root: Path, *lookers: Looker) -> Digest:
    """Put a layout that nothing names, and that the lookers delete when they look again."""
    digest = opened(root).put_layout(document())
    for one in lookers:
        one.look()
    return digest


def layouts(root: Path) -> set[str]:
    return {f"b3:{path.stem}" for path in (root / "layouts").iterdir()}


def save(tier: DiskNodeTier, layout: Digest, step: int = 10) -> ShardRecord:
    header = shard_header(SIZE, layout=layout, step=step, world_size=1)
    return tier.write_shard(header, BytesSource(payload(SIZE)))


def test_a_layout_that_nothing_names_at_two_looks_is_deleted(root: Path) -> None:
    tier, looker = opened(root), Looker(root)
    unused = tier.put_layout(document())
    size = tier.volume.budget.used_bytes
    assert looker.look() == 0
    assert looker.look(after=UNUSED_SECONDS / 2) == 0
    recent = tier.put_layout(document(2))
    assert looker.look(after=UNUSED_SECONDS / 2) == size
    assert layouts(root) == {recent}
    looker.look()
    assert layouts(root) == set()
    assert tier.put_layout(document()) == unused
    assert tier.get_layout(unused) == document()


@pytest.mark.fault("A file system keeps times in units of two seconds")
def test_a_mark_is_seen_on_a_file_system_that_keeps_times_in_units_of_two_seconds(
    root: Path,
) -> None:
    tier = opened(root)
    digest = tier.put_layout(document())
    [path] = (root / "layouts").iterdir()

    def kept() -> int:
        return path.stat().st_mtime_ns // 2_000_000_000

    for keep in (lambda: tier.keep_layout(digest), lambda: tier.put_layout(document())):
        before = kept()
        keep()
        assert kept() != before


def test_a_layout_that_is_kept_between_two_looks_stays(root: Path) -> None:
    tier, looker = opened(root), Looker(root)
    digest = unused_layout(root, looker)
    for keep in (lambda: tier.keep_layout(digest), lambda: tier.put_layout(document())):
        keep()
        looker.look()
        assert layouts(root) == {digest}
    looker.look()
    assert layouts(root) == set()
    assert not tier.keep_layout(digest)


def test_a_layout_of_a_shard_or_of_a_manifest_stays(root: Path) -> None:
    """The shards are those of another process, which the looker does not know."""
    looker, other = Looker(root), opened(root)
    of_shard, of_manifest = other.put_layout(document(1)), other.put_layout(document(2))
    save(other, of_shard)
    elsewhere = save(other, of_manifest, step=11)
    other.put_manifest(JOB_UID, elsewhere.checkpoint, manifest([elsewhere]).to_bytes())
    other.delete_shard(elsewhere.ref)
    for _ in range(3):
        looker.look()
    assert layouts(root) == {of_shard, of_manifest}
    other.delete_checkpoint(JOB_UID, elsewhere.checkpoint)
    for _ in range(2):
        looker.look()
    assert layouts(root) == {of_shard}


@pytest.mark.fault("A manifest is damaged while unused layouts are looked for")
def test_nothing_is_deleted_while_a_manifest_cannot_be_read(root: Path) -> None:
    """It may name any layout."""
    tier, looker = opened(root), Looker(root)
    digest = tier.put_layout(document())
    record = save(tier, digest)
    tier.put_manifest(JOB_UID, record.checkpoint, manifest([record]).to_bytes())
    tier.delete_shard(record.ref)
    (path,) = root.glob("*/manifests/**/*.json")
    path.write_bytes(path.read_bytes().replace(b"0", b"1", 1))
    for _ in range(3):
        with pytest.raises(CorruptionError):
            looker.look()
    assert layouts(root) == {digest}
    path.unlink()
    for _ in range(2):
        looker.look()
    assert layouts(root) == set()


@pytest.mark.fault("A process is killed while it deletes layouts that nothing names")
@pytest.mark.parametrize("point", ["node.layouts_scanned@2", "node.before_layout_delete"])
def test_a_killed_deletion_is_repeated(root: Path, point: str) -> None:
    tier = opened(root)
    both = {tier.put_layout(document(1)), tier.put_layout(document(2))}
    name, _, hit = point.partition("@")
    done = zygote.run(
        [sys.executable, str(CHILD), str(root), "unused-layouts"],
        env={**os.environ, VARIABLE: f"{name}=panic" + (f"@{hit}" if hit else "")},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == PANIC_EXIT_CODE, done.stderr
    assert layouts(root) == both
    looker = Looker(root)
    looker.look()
    looker.look()
    assert layouts(root) == set()
    assert tier.put_layout(document()) in both  # the lock of the killed process is free


@pytest.mark.fault("A save begins to use a layout while another process deletes it")
def test_a_layout_that_another_process_is_about_to_use_stays(root: Path, tmp_path: Path) -> None:
    """The other process keeps it after the shards were read. Its own shard is not among them."""
    looker, writer = Looker(root), opened(root)
    digest = unused_layout(root, looker)
    go_on = tmp_path / "go-on"
    with (
        failpoints(f"node.layouts_scanned=wait:{go_on}") as points,
        ThreadPoolExecutor(1) as pool,
    ):
        looking = pool.submit(looker.look)
        until(lambda: points.hits("node.layouts_scanned") == 1, "the shards to be read")
        assert writer.keep_layout(digest)
        go_on.touch()
        looking.result()
    save(writer, digest)
    looker.look()
    looker.look()
    assert layouts(root) == {digest}


@pytest.mark.fault("A layout is written while another process deletes it")
def test_a_layout_that_is_put_while_it_is_deleted_exists_afterwards(
    root: Path, tmp_path: Path
) -> None:
    looker, writer = Looker(root), opened(root)
    digest = unused_layout(root, looker)
    go_on = tmp_path / "go-on"
    with (
        failpoints(f"node.before_layout_delete=wait:{go_on}") as points,
        ThreadPoolExecutor(2) as pool,
    ):
        looking = pool.submit(looker.look)
        until(lambda: points.hits("node.before_layout_delete") == 1, "the deletion")
        putting = pool.submit(writer.put_layout, document())
        go_on.touch()
        looking.result()
        assert putting.result() == digest
    assert writer.get_layout(digest) == document()


def test_two_processes_delete_at_the_same_time(root: Path, tmp_path: Path) -> None:
    lookers = Looker(root), Looker(root)
    unused_layout(root, *lookers)
    go_on = tmp_path / "go-on"
    with (
        failpoints(f"node.layouts_scanned=wait:{go_on}") as points,
        ThreadPoolExecutor(2) as pool,
    ):
        both = [pool.submit(one.look) for one in lookers]
        until(lambda: points.hits("node.layouts_scanned") == 2, "both to have read the shards")
        go_on.touch()
        for looking in both:
            looking.result()
    assert layouts(root) == set()


def test_a_tier_that_deletes_checkpoints_looks_for_unused_layouts(root: Path) -> None:
    """It reads no shards if its own shards name all layouts."""
    tier = opened(root)
    save(tier, tier.put_layout(document()))
    with failpoints("") as points:
        delete_many(tier)
        assert points.hits("node.layouts_scanned") == 0
        tier.put_layout(document(2))
        delete_many(tier)
        assert points.hits("node.layouts_scanned") > 0
    assert len(layouts(root)) == 2


def delete_many(tier: DiskNodeTier) -> None:
    for step in range(100):
        tier.delete_checkpoint(JOB_UID, CheckpointId(Step(1000 + step), RestartRound(0)))
