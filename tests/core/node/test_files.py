"""Temporary files of writers that live and die, and names that are durable before they are relied on."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from tests.support.crash.fsyncs import recorded_fsyncs
from tests.support.shards.builders import payload, shard_file, shard_header

from holdfast_core.errors import AlreadyExistsError, CorruptionError, StaleRoundError
from holdfast_core.ids import RestartRound
from holdfast_core.node.documents import PodRecords, read_document, write_document
from holdfast_core.node.files import (
    TEMP_PREFIX,
    DurableDirectories,
    TempFile,
    remove_dead_temp,
    write_at,
)
from holdfast_core.node.tier import DiskNodeTier


@pytest.fixture
def directories(tmp_path: Path) -> DurableDirectories:
    return DurableDirectories(tmp_path)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the paths of the files and directories for which fsync was called."""
    return recorded_fsyncs(monkeypatch)


def test_a_temporary_file_that_a_scan_removed_is_created_again(
    tmp_path: Path, directories: DurableDirectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan of a process that starts sees the new file between its creation and its lock, as one of a
    dead writer. Without a new file, all bytes would be written to one that has no name."""
    real, removed = fcntl.flock, list[Path]()

    def flock(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
            removed[0].unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    temp = TempFile.create(tmp_path, directories)
    assert removed != [temp.path]
    assert temp.path.exists()
    temp.publish(tmp_path / "final")
    assert (tmp_path / "final").exists()


def test_the_temporary_file_of_a_living_writer_is_not_removed(
    tmp_path: Path, directories: DurableDirectories
) -> None:
    temp = TempFile.create(tmp_path, directories)
    assert not remove_dead_temp(temp.path)
    left = temp.path.with_name(".tmp-1-1")
    left.touch()
    assert remove_dead_temp(left)
    assert [path for path in tmp_path.iterdir()] == [temp.path]
    temp.discard()


def test_a_name_is_durable_when_its_file_is_published(
    tmp_path: Path, directories: DurableDirectories, synced: list[Path]
) -> None:
    for publish in (TempFile.publish, TempFile.publish_if_absent):
        temp = TempFile.create(tmp_path / "below", directories)
        synced.clear()
        publish(temp, tmp_path / "below" / publish.__name__)
        assert synced == [tmp_path / "below"]


def test_the_bytes_of_a_document_are_durable_before_its_name(
    tmp_path: Path, directories: DurableDirectories, synced: list[Path]
) -> None:
    """A power cut between the two would leave an empty file under the name."""
    path = tmp_path / "one.json"
    directories.ensure(tmp_path)
    synced.clear()
    write_document(path, b"{}", directories)
    begun = [found.name.startswith(TEMP_PREFIX) for found in synced]
    assert begun == [True, False], "the temporary file, then the directory"
    assert synced[-1] == tmp_path


@pytest.mark.parametrize(
    ("round_", "version", "refused"),
    [(3, 4, False), (3, 5, False), (4, 0, False), (3, 3, True), (2, 9, True)],
)
def test_an_older_round_or_version_is_refused(
    tmp_path: Path, directories: DurableDirectories, round_: int, version: int, refused: bool
) -> None:
    records = PodRecords(tmp_path, directories)
    records.write_round(RestartRound(3), 4)
    if refused:
        with pytest.raises(StaleRoundError):
            records.write_round(RestartRound(round_), version)
    else:
        records.write_round(RestartRound(round_), version)
    assert records.read_round() == ((3, 4) if refused else (round_, version))


def test_the_bytes_of_a_copy_are_durable_before_its_name(
    tmp_path: Path, synced: list[Path]
) -> None:
    tier = DiskNodeTier(tmp_path, capacity_bytes=64 << 20)
    tier.open()
    file, record = shard_file(shard_header(5000), payload(5000))
    writer = tier.begin_copy(record.ref, len(file))
    writer.write(file)
    synced.clear()
    writer.commit()
    assert synced[0].name.startswith(TEMP_PREFIX)
    assert synced[-1] == tier.shard_path(record.ref).parent


@pytest.mark.parametrize("most", [1, 3, 4096])
def test_a_write_that_the_disk_cuts_short_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """A disk that is nearly full, or a signal, ends a write early."""
    real, data = os.pwrite, payload(2 * 4096 + 20)

    def pwrite(descriptor: int, piece: memoryview, offset: int) -> int:
        return real(descriptor, piece[:most], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with (tmp_path / "file").open("wb") as file:
        write_at(file.fileno(), memoryview(data), 7)
    assert (tmp_path / "file").read_bytes() == bytes(7) + data


@pytest.mark.parametrize("position", [3, -2, -20])
def test_a_damaged_document_is_not_returned(
    tmp_path: Path, directories: DurableDirectories, position: int
) -> None:
    """The node has no other record of what a manifest or layout was."""
    path = tmp_path / "one.json"
    write_document(path, b'{"step": 1}', directories)
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError):
        read_document(path)


def test_a_document_that_exists_is_durable_before_it_is_relied_on(
    tmp_path: Path, directories: DurableDirectories, synced: list[Path]
) -> None:
    """The process that wrote it may live and still be before its fsync. A power cut would remove the name
    that this process has acknowledged."""
    path = tmp_path / "manifests" / "one.json"
    assert write_document(path, b"{}", directories)
    synced.clear()
    assert not write_document(path, b"{}", DurableDirectories(tmp_path))
    assert path.parent in synced
    synced.clear()
    with pytest.raises(AlreadyExistsError):
        write_document(path, b"[]", directories)
    assert read_document(path) == b"{}"


def test_a_new_directory_is_durable_with_its_parents(tmp_path: Path, synced: list[Path]) -> None:
    DurableDirectories(tmp_path).ensure(tmp_path / "a" / "b")
    assert {tmp_path, tmp_path / "a"} <= set(synced)
