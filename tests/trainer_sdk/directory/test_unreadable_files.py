"""One file of a folder that cannot be read or is damaged: intact copies are restored all the same, and a
restore of an older step says why."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.obstructed import directory, fifo, link

import holdfast
from holdfast.directory.choice import choose, read_patiently
from holdfast_core.errors import CorruptionError, UnreadableError
from holdfast_core.node import files, shard_file
from holdfast_core.node.tier import DiskNodeTier

SHARD = "shards/s{step:012d}-*/*.shard"
MANIFEST = "manifests/s{step:012d}/*.json"


def found(root: Path, pattern: str, step: int = 0) -> Path:
    (path,) = root.rglob(pattern.format(step=step))
    return path


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def missing(path: Path) -> None:
    path.unlink()


NO_FILE = [link, directory, fifo]
Damage = Callable[[Path], None]


def state() -> dict[str, object]:
    return {"w": np.zeros(1 << 12), "n": 0}


def train(root: Path, steps: int = 3, store: Path | None = None) -> None:
    """Save steps 1 to `steps`, each with its number in the state."""
    with holdfast.Checkpointer(
        holdfast.Folder(
            root, keep_last=5, store=None if store is None else f"file://{store}", store_keep_last=5
        ),
        interval_steps=0,
    ) as ckpt:
        assert ckpt.restore(state()) is None
        for step in range(1, steps + 1):
            own = {"w": np.full(1 << 12, float(step)), "n": step}
            ckpt.save(step, own).wait("local" if store is None else "persisted")


def restored(root: Path, **options: object) -> int | None:
    own = state()
    with holdfast.Checkpointer(holdfast.Folder(root, **options), interval_steps=0) as ckpt:  # type: ignore[arg-type]
        step = ckpt.restore(own)
    if step is not None:
        assert own["n"] == step
        assert (own["w"] == float(step)).all()  # type: ignore[attr-defined]
    return step


@pytest.mark.fault("One file of a folder cannot be read: an I/O error, a link, a directory, a FIFO")
@pytest.mark.parametrize("damage", NO_FILE)
@pytest.mark.parametrize("pattern", [SHARD, MANIFEST])
def test_an_unreadable_old_file_does_not_matter(
    tmp_path: Path, pattern: str, damage: Damage
) -> None:
    train(tmp_path)
    damage(found(tmp_path, pattern, step=1))
    assert restored(tmp_path) == 3
    with holdfast.open(tmp_path) as saved, saved.at() as newest:
        assert newest.step == 3
        assert newest.objects()["n"] == 3


@pytest.mark.fault("One file of a folder cannot be read: an I/O error, a link, a directory, a FIFO")
@pytest.mark.parametrize(
    ("pattern", "damage"),
    # A step without its manifest was never committed.
    [(p, d) for p in (SHARD, MANIFEST) for d in (*NO_FILE, cut, empty)] + [(SHARD, missing)],
)
def test_a_bad_newest_file_leads_to_the_step_before_and_is_named(
    tmp_path: Path, pattern: str, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path)
    path = found(tmp_path, pattern, step=3)
    damage(path)
    for _ in range(2):  # the second start finds what the first one has left
        caplog.clear()
        assert restored(tmp_path) == 2
        (line,) = [r.getMessage() for r in caplog.records if "going back" in r.getMessage()]
        assert "step 3" in line
        assert path.name in line
        assert caplog.records[0].levelno >= logging.WARNING
    if damage in NO_FILE:
        assert os.path.lexists(path), "what may be intact stays in place"


@pytest.mark.parametrize("damage", [*NO_FILE, cut, empty])
def test_a_reader_passes_over_a_bad_newest_manifest(
    tmp_path: Path, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path)
    damage(found(tmp_path, MANIFEST, step=3))
    with holdfast.open(tmp_path) as saved:
        with saved.at() as newest:
            assert newest.step == 2
        assert "step 3 is passed over" in caplog.text
        with pytest.raises(CorruptionError, match=r"r000000\.json"):
            saved.at(3)


@pytest.mark.parametrize("damage", [link, cut])
def test_a_script_may_refuse_to_go_back(tmp_path: Path, damage: Damage) -> None:
    train(tmp_path)
    path = found(tmp_path, SHARD, step=3)
    damage(path)
    for _ in range(2):
        with pytest.raises(CorruptionError, match="on_damage") as raised:
            restored(tmp_path, on_damage="raise")
        assert path.name in str(raised.value)
    assert restored(tmp_path, on_damage="older") == 2


def test_a_payload_that_is_damaged_is_not_passed_over_with_on_damage_raise(tmp_path: Path) -> None:
    train(tmp_path)
    with open(found(tmp_path, SHARD, step=3), "r+b") as file:
        file.seek(9000)
        file.write(b"\x55" * 64)
    with pytest.raises(CorruptionError, match="on_damage"):
        restored(tmp_path, on_damage="raise")
    assert restored(tmp_path) == 2


@pytest.mark.fault("One file of a folder cannot be read: an I/O error, a link, a directory, a FIFO")
@pytest.mark.parametrize("damage", [*NO_FILE, cut, missing])
@pytest.mark.parametrize("pattern", [SHARD, MANIFEST])
def test_the_store_replaces_a_bad_newest_file(tmp_path: Path, pattern: str, damage: Damage) -> None:
    folder, store = tmp_path / "folder", tmp_path / "store"
    store.mkdir()
    train(folder, store=store)
    damage(found(folder / "tier", pattern, step=3))
    assert restored(folder, store=f"file://{store}") == 3
    assert restored(folder, store=f"file://{store}", on_damage="raise") == 3


@pytest.mark.parametrize("damage", [directory, fifo])
def test_an_unreadable_file_of_the_store_leads_to_the_folder(
    tmp_path: Path, damage: Damage
) -> None:
    folder, store = tmp_path / "folder", tmp_path / "store"
    store.mkdir()
    train(folder, store=store)
    for pattern in (SHARD, MANIFEST):
        damage(found(store, pattern, step=3))
    assert restored(folder, store=f"file://{store}") == 3
    (folder / "tier").rename(tmp_path / "lost")
    assert restored(folder, store=f"file://{store}") == 2


def test_an_error_names_the_shard_that_was_quarantined(tmp_path: Path) -> None:
    train(tmp_path, steps=1)
    path = found(tmp_path, SHARD, step=1)
    cut(path)
    for _ in range(2):
        with pytest.raises(CorruptionError, match="quarantine") as raised:
            restored(tmp_path)
        assert "not a complete shard file" in str(raised.value)


# ---------------------------------------------------------------------- a disk with I/O errors


@pytest.fixture
def bad_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Inodes of which every read fails with EIO, as on a disk with bad blocks."""
    inodes: set[int] = set()
    read_at = files.read_at

    def read(fd: int, buffer: memoryview, offset: int) -> int:
        if os.fstat(fd).st_ino in inodes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_at(fd, buffer, offset)

    monkeypatch.setattr(files, "read_at", read)
    monkeypatch.setattr(shard_file, "read_at", read)
    return inodes


def opened(root: Path) -> DiskNodeTier:
    tier = DiskNodeTier(root / "tier", fill_limit=1.0)
    tier.open()
    return tier


def test_bad_blocks_of_one_shard_concern_one_step(tmp_path: Path, bad_blocks: set[int]) -> None:
    train(tmp_path)
    bad_blocks.add(found(tmp_path, SHARD, step=1).stat().st_ino)
    chosen = choose(opened(tmp_path))
    assert (chosen.manifest.step, chosen.passed_over) == (3, ())
    bad = found(tmp_path, SHARD, step=3)
    bad_blocks.add(bad.stat().st_ino)
    pauses: list[float] = []
    chosen = choose(opened(tmp_path), pause=pauses.append)
    assert chosen.manifest.step == 2
    assert str(bad) in chosen.passed_over[0]
    assert "Input/output error" in chosen.passed_over[0]
    assert bad.exists()
    assert len(pauses) == 3


@pytest.mark.fault("One file of a folder cannot be read: an I/O error, a link, a directory, a FIFO")
def test_a_disk_that_fails_for_a_moment_costs_no_step(tmp_path: Path, bad_blocks: set[int]) -> None:
    train(tmp_path)
    bad_blocks.add(found(tmp_path, SHARD, step=3).stat().st_ino)
    tier = opened(tmp_path)
    chosen = choose(tier, pause=lambda seconds: bad_blocks.clear())
    assert (chosen.manifest.step, chosen.passed_over) == (3, ())


def test_a_read_is_repeated_only_while_it_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.directory.choice._UNREADABLE_PAUSE_SECONDS", 0.0)

    def failing(times: int, *, may_pass: bool) -> Callable[[], int]:
        errors = [UnreadableError("Input/output error", may_pass=may_pass)] * times

        def read() -> int:
            if errors:
                raise errors.pop()
            return 7

        return read

    assert read_patiently(failing(3, may_pass=True)) == 7
    for read in (failing(4, may_pass=True), failing(1, may_pass=False)):
        with pytest.raises(UnreadableError):
            read_patiently(read)


def test_a_directory_in_place_of_an_old_manifest_does_not_stop_retention(tmp_path: Path) -> None:
    train(tmp_path)
    directory(found(tmp_path, MANIFEST, step=1))
    with holdfast.Checkpointer(holdfast.Folder(tmp_path, keep_last=1), interval_steps=0) as ckpt:
        ckpt.restore(state())
        ckpt.save(4, {"w": np.full(1 << 12, 4.0), "n": 4}).wait("local")
    assert holdfast.open(tmp_path).steps() == (3, 4)  # the restore point of this run stays


def test_a_folder_of_which_nothing_can_be_read_is_refused(
    tmp_path: Path, bad_blocks: set[int]
) -> None:
    train(tmp_path)
    bad_blocks.update(path.stat().st_ino for path in tmp_path.rglob("*.shard"))
    with pytest.raises(CorruptionError, match="Input/output error"):
        choose(opened(tmp_path), pause=lambda seconds: None)
