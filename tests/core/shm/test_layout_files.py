"""Layout documents that ranks and their sidecar or persister exchange by files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.shards.builders import rank_layout

from holdfast_core.errors import CorruptionError, NotFoundError, UnavailableError
from holdfast_core.format.canonical import digest_of, hex_of
from holdfast_core.shm.shared_files import LayoutFiles

DOCUMENT = rank_layout()
DIGEST = digest_of(DOCUMENT)


def file_in(root: Path) -> Path:
    return root / "shared" / "layouts" / f"{hex_of(DIGEST)}.json"


@pytest.fixture
def files(tmp_path: Path) -> LayoutFiles:
    return LayoutFiles(tmp_path / "shared" / "layouts")


def test_the_other_side_may_read_and_replace_what_is_written(
    tmp_path: Path, files: LayoutFiles
) -> None:
    """It may run with another user id and the same group."""
    files.ensure(DOCUMENT, DIGEST)
    assert LayoutFiles(files.directory).read(DIGEST) == DOCUMENT
    assert file_in(tmp_path).stat().st_mode & 0o777 == 0o660
    assert files.directory.stat().st_mode & 0o7777 == 0o2770


def test_a_document_that_is_there_is_not_written_again(tmp_path: Path, files: LayoutFiles) -> None:
    """A full volume must not fail a rank that needs what another rank has written."""
    files.ensure(DOCUMENT, DIGEST)
    before = file_in(tmp_path).stat().st_ino
    files.ensure(DOCUMENT, DIGEST)
    LayoutFiles(files.directory).ensure(DOCUMENT, DIGEST)
    assert file_in(tmp_path).stat().st_ino == before


def test_a_document_that_was_removed_is_written_again(tmp_path: Path, files: LayoutFiles) -> None:
    files.ensure(DOCUMENT, DIGEST)
    file_in(tmp_path).unlink()
    with pytest.raises(NotFoundError, match="does not exist"):
        files.read(DIGEST)
    files.ensure(DOCUMENT, DIGEST)
    assert files.read(DIGEST) == DOCUMENT


def test_a_damaged_document_is_refused_and_replaced(tmp_path: Path, files: LayoutFiles) -> None:
    files.ensure(DOCUMENT, DIGEST)
    os.truncate(file_in(tmp_path), len(DOCUMENT) - 1)
    with pytest.raises(CorruptionError, match="digest"):
        files.read(DIGEST)
    LayoutFiles(files.directory).ensure(DOCUMENT, DIGEST)
    assert files.read(DIGEST) == DOCUMENT


def test_a_directory_that_cannot_be_written_is_an_error_of_holdfast(tmp_path: Path) -> None:
    (tmp_path / "shared").write_bytes(b"not a directory")
    with pytest.raises(UnavailableError, match="writing layout"):
        LayoutFiles(tmp_path / "shared" / "layouts").ensure(DOCUMENT, DIGEST)
