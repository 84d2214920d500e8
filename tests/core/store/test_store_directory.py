"""A directory as the object store. Objects that are damaged during a write or at rest are replaced."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from tests.support import zygote
from tests.support.shards.builders import (
    JOB_UID,
    BytesSource,
    manifest,
    payload,
    rank_layout,
    shard_file,
    shard_header,
)
from tests.support.shards.shard_files import flip_bit
from tests.support.tiers.ending_source import EndingSource, kept_of_parts

from holdfast_core.errors import AlreadyExistsError, CorruptionError, TierError
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.keys import manifest_key, shard_key, stored_layout_key
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.store.directory import DirectoryObjectStore
from holdfast_core.store.tier import ObjectTier
from holdfast_core.store.upload import Document
from holdfast_core.tiers.base import ShardReader

NAMESPACE = "team-a"
SIZE = 200_000
HEADER = shard_header(SIZE)
DATA = payload(SIZE)


@pytest.fixture
def store(tmp_path: Path) -> ObjectTier:
    return ObjectTier(DirectoryObjectStore(tmp_path / "store"))


def node_in(folder: Path) -> DiskNodeTier:
    tier = DiskNodeTier(folder, capacity_bytes=1 << 30)
    tier.open()
    return tier


@contextmanager
def good_shard(folder: Path) -> Iterator[ShardReader]:
    node = node_in(folder / "good")
    record = node.write_shard(HEADER, BytesSource(DATA))
    with node.open_shard(record.ref) as reader:
        yield reader


@contextmanager
def flipped_shard(folder: Path) -> Iterator[ShardReader]:
    """Return a reader of a file that changes after it was opened. Head and trailer are good."""
    node = node_in(folder / "flipped")
    record = node.write_shard(HEADER, BytesSource(DATA))
    with node.open_shard(record.ref) as reader:
        flip_bit(node.shard_path(record.ref), SIZE // 2)
        yield reader


def path_of(tmp_path: Path, key: str) -> Path:
    return tmp_path / "store" / NAMESPACE / JOB_UID / key


def fetched(store: ObjectTier, folder: Path, reader: ShardReader) -> bytes:
    node = node_in(folder / "fetched")
    store.download_shard(NAMESPACE, reader.record.ref, node.begin_copy)
    with node.open_shard(reader.record.ref) as found:
        return b"".join(bytes(piece) for piece in found.read_payload())


@pytest.mark.fault("A bit flips during an upload to a directory store")
def test_a_damaged_upload_is_refused_and_a_good_one_accepted_afterwards(
    store: ObjectTier, tmp_path: Path
) -> None:
    with flipped_shard(tmp_path) as reader, pytest.raises(CorruptionError):
        store.upload_shard(NAMESPACE, reader)
    assert list((tmp_path / "store").rglob("*.shard")) == []
    with good_shard(tmp_path) as reader:
        store.upload_shard(NAMESPACE, reader)
        assert fetched(store, tmp_path, reader) == DATA


@pytest.mark.fault("A shard is damaged at rest in a directory store")
@pytest.mark.parametrize("damage", ["a bit", "half of the file", "an empty file"])
def test_a_shard_that_was_damaged_in_the_store_is_replaced(
    store: ObjectTier, tmp_path: Path, damage: str
) -> None:
    with good_shard(tmp_path) as reader:
        store.upload_shard(NAMESPACE, reader)
        path = path_of(tmp_path, shard_key(reader.record.ref))
        match damage:
            case "a bit":
                flip_bit(path, SIZE // 2)
            case "half of the file":
                path.write_bytes(path.read_bytes()[: SIZE // 2])
            case _:
                path.write_bytes(b"")
        store.upload_shard(NAMESPACE, reader)
        assert fetched(store, tmp_path, reader) == DATA
        assert path.with_name(f"{path.name}.bad").exists(), "kept for people to look at"


@pytest.mark.fault("A layout is damaged where it is stored")
def test_a_damaged_layout_is_never_returned_and_is_replaced(
    store: ObjectTier, tmp_path: Path
) -> None:
    document, ref = rank_layout(), shard_file(shard_header(1), b"x")[1].ref
    store.put_layout(NAMESPACE, ref, document)
    flip_bit(path_of(tmp_path, stored_layout_key(ref)), 10)
    with pytest.raises(CorruptionError):
        store.get_layout(NAMESPACE, ref, digest_of(document))
    store.put_layout(NAMESPACE, ref, document)
    assert store.get_layout(NAMESPACE, ref, digest_of(document)) == document


def manifest_of(step: int) -> tuple[CheckpointId, bytes]:
    _, record = shard_file(shard_header(SIZE, step=step), DATA)
    found = manifest([record])
    return found.checkpoint, found.to_bytes()


def test_a_manifest_under_the_name_of_another_is_replaced(
    store: ObjectTier, tmp_path: Path
) -> None:
    (_, older), (checkpoint, own) = manifest_of(10), manifest_of(20)
    path = path_of(tmp_path, manifest_key(checkpoint))
    path.parent.mkdir(parents=True)
    path.write_bytes(older)
    store.put_manifest(NAMESPACE, JOB_UID, checkpoint, own)
    assert store.get_manifest(NAMESPACE, JOB_UID, checkpoint) == own
    store.delete_checkpoint(NAMESPACE, JOB_UID, checkpoint)
    assert list(path.parent.iterdir()) == []


def test_another_manifest_of_the_same_checkpoint_is_refused(store: ObjectTier) -> None:
    checkpoint, own = manifest_of(10)
    _, record = shard_file(shard_header(SIZE), payload(SIZE, seed=1))
    store.put_manifest(NAMESPACE, JOB_UID, checkpoint, own)
    with pytest.raises(AlreadyExistsError):
        store.put_manifest(NAMESPACE, JOB_UID, checkpoint, manifest([record]).to_bytes())
    assert store.get_manifest(NAMESPACE, JOB_UID, checkpoint) == own


@pytest.mark.fault("The node tier has a manifest under a wrong name when the right one is put")
def test_a_node_tier_replaces_a_manifest_of_another_checkpoint_and_keeps_its_alarm(
    tmp_path: Path,
) -> None:
    (first, older), (checkpoint, own) = manifest_of(10), manifest_of(20)
    node = node_in(tmp_path / "node")
    node.put_manifest(JOB_UID, checkpoint, older)
    node.put_manifest(JOB_UID, checkpoint, own)
    assert node.get_manifest(JOB_UID, checkpoint) == own
    assert len(list((tmp_path / "node" / "quarantine").glob("*.json"))) == 1
    with pytest.raises(AlreadyExistsError):
        node.put_manifest(JOB_UID, checkpoint, b"{}")
    node.quarantine_manifest(JOB_UID, checkpoint, CorruptionError("a test says so"))
    assert node.list_manifests() == ()
    node.quarantine_manifest(
        JOB_UID, CheckpointId(Step(99), RestartRound(0)), CorruptionError("it is not there")
    )
    assert first.step == 10


def test_files_that_are_not_checkpoints_are_not_listed(store: ObjectTier, tmp_path: Path) -> None:
    for key in ("manifests/s000000000001/notes.json", "layouts/notes.json"):
        path = path_of(tmp_path, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    assert store.list_manifests(NAMESPACE, JOB_UID) == ()
    assert swept(store) == 0


class KilledError(BaseException):
    """Stands for the end of the process."""


@pytest.mark.fault(
    "A deletion in a store directory is killed between the damaged file and the object"
)
@pytest.mark.parametrize("call", [1, 2])
def test_a_deletion_that_was_killed_leaves_no_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """A listing does not show the damaged file, so no later deletion would find it."""
    objects = DirectoryObjectStore(tmp_path)
    objects.write("a/one", Document(b"damaged"))
    objects.write("a/one", Document(b"good"), replace=True)
    unlink, calls = Path.unlink, 0

    def killed(path: Path, missing_ok: bool = False) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KilledError
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(Path, "unlink", killed)
        objects.delete(["a/one"])
    objects.delete([item.key for item in objects.list("a/").objects])
    assert list((tmp_path / "a").iterdir()) == []


WRITER = """
import os, sys
from pathlib import Path
from holdfast_core.store.directory import DirectoryObjectStore
from holdfast_core.store.upload import Document
os.getpid = lambda: 1
Path.unlink = lambda *_, **__: None
DirectoryObjectStore(Path(sys.argv[1])).write(sys.argv[2], Document(b"x"))
"""


@pytest.mark.fault("Two processes with the same id write to a store directory")
def test_processes_with_the_same_id_can_write_at_the_same_time(tmp_path: Path) -> None:
    """Each container counts its process ids from 1. A killed writer also leaves its temporary file."""
    for key in ("a/one", "a/two"):
        run = zygote.run(
            [sys.executable, "-c", WRITER, str(tmp_path), key], capture_output=True, check=False
        )
        assert run.returncode == 0, run.stderr.decode()


@pytest.mark.fault("A store directory is full or read-only when it is listed")
@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_directory_that_refuses_changes_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Ages are at most too small then, so that nothing is deleted too early."""
    objects = DirectoryObjectStore(tmp_path)
    for name, written in (("a/old", 1000.0), ("a/new", 1060.0)):
        objects.write(name, Document(b"x"))
        os.utime(tmp_path / name, (written, written))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "utime", refuse)
    ages = {item.key: item.age for item in objects.list("a/").objects}
    assert ages == {"a/old": timedelta(minutes=1), "a/new": timedelta(0)}


@pytest.mark.fault("Two writers replace the same damaged object")
def test_two_writers_replace_a_damaged_object_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = DirectoryObjectStore(tmp_path)
    objects.write("a/one", Document(b"damaged"))
    link = os.link

    def overtaken(source: Path, target: Path) -> None:
        link(source, target)  # the other writer has created the link
        link(source, target)

    monkeypatch.setattr(os, "link", overtaken)
    objects.write("a/one", Document(b"good"), replace=True)
    assert objects.get("a/one") == b"good"
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["one", "one.bad"]


@pytest.mark.fault("An object is deleted while a writer compares it")
def test_an_object_that_is_deleted_while_it_is_compared_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = DirectoryObjectStore(tmp_path)
    objects.write("a/one", Document(b"x"))
    real = os.open

    def overtaken(path: Path, flags: int, *mode: int) -> int:
        if Path(path) == tmp_path / "a/one":
            objects.delete(["a/one"])
        return real(path, flags, *mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", overtaken)
        objects.write("a/one", Document(b"x"))
    assert objects.get("a/one") == b"x"


def test_only_old_files_of_interrupted_writes_are_removed(tmp_path: Path) -> None:
    objects = DirectoryObjectStore(tmp_path)
    objects.write("a/b/one", Document(b"x"))
    day = timedelta(hours=24)
    for name, age in (
        ("a/.tmp-old", 2 * day),
        ("a/b/.tmp-old", 2 * day),
        ("a/b/.tmp-young", day / 2),
    ):
        (tmp_path / name).write_bytes(b"x")
        written = time.time() - age.total_seconds()
        os.utime(tmp_path / name, (written, written))
    assert objects.abort_stale(["a/"], day) == 2
    assert sorted(path.name for path in (tmp_path / "a/b").iterdir()) == [".tmp-young", "one"]
    assert objects.abort_stale(["a/"], day) == 0


def with_layout(store: ObjectTier, step: int) -> CheckpointId:
    """Put the layout of a step's only shard, and return the checkpoint."""
    ref = shard_file(shard_header(1, step=step), b"x")[1].ref
    store.put_layout(NAMESPACE, ref, rank_layout())
    return ref.checkpoint


def layouts_in(root: Path) -> set[str]:
    return {path.parent.name.split("-")[0] for path in root.rglob("*.layout")}


def swept(store: ObjectTier, uploading: frozenset[CheckpointId] = frozenset()) -> int:
    found = store.sweep(NAMESPACE, JOB_UID, RestartRound(1), timedelta(0), lambda: uploading)
    return len(found)


@pytest.mark.fault("No manifest names a layout of the store any more")
def test_a_layout_without_a_manifest_leaves_the_store(store: ObjectTier, tmp_path: Path) -> None:
    with_layout(store, 1)
    assert (swept(store), layouts_in(tmp_path)) == (1, set())


@pytest.mark.fault("Another coordinator saves at the moment at which a layout is deleted")
def test_checkpoints_with_equal_layouts_have_one_each(store: ObjectTier, tmp_path: Path) -> None:
    """A deletion of one checkpoint therefore cannot remove the layout of another that is being saved."""
    first, second = with_layout(store, 1), with_layout(store, 2)
    store.delete_checkpoint(NAMESPACE, JOB_UID, first)
    assert layouts_in(tmp_path) == {f"s{second.step:012d}"}


@pytest.mark.fault("A save is under way when layouts are deleted")
def test_the_layout_of_a_checkpoint_that_is_being_uploaded_stays(
    store: ObjectTier, tmp_path: Path
) -> None:
    checkpoint = with_layout(store, 1)
    assert swept(store, frozenset({checkpoint})) == 0
    assert layouts_in(tmp_path) == {"s000000000001"}


@pytest.mark.fault("A manifest cannot be read when unused layouts are deleted")
def test_the_layout_of_a_manifest_that_cannot_be_read_stays(
    store: ObjectTier, tmp_path: Path
) -> None:
    store.put_manifest(NAMESPACE, JOB_UID, with_layout(store, 1), b"not a manifest")
    assert swept(store) == 0
    assert layouts_in(tmp_path) == {"s000000000001"}


@pytest.mark.fault("An upload makes a part while the memory has no room for the one before it")
def test_no_part_is_kept_while_the_next_one_is_made(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="no more parts") as ended:
        DirectoryObjectStore(tmp_path).write("a/one", EndingSource())
    assert kept_of_parts(ended.tb) == []
