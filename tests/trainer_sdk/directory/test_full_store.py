"""A store directory that is full, or fails for a moment, ends no training whose folder has a checkpoint."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast_core.errors import UnavailableError
from holdfast_core.store.directory import DirectoryObjectStore


@contextmanager
def small_volume(path: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a file system in memory, of which nothing else takes room. It needs root."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(volume: Path) -> Path:
    """Leave no room in a file system. Return the file that takes it."""
    filler = volume / "filler"
    with filler.open("wb", buffering=0) as file:
        with pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(1 << 16))
    return filler


@pytest.mark.fault("A store directory is full when a training starts")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
def test_a_training_starts_beside_a_full_store_and_uploads_when_it_has_room(tmp_path: Path) -> None:
    with small_volume(tmp_path / "store", 4 << 20) as store:
        folder = holdfast.Folder(tmp_path / "ckpt", store=f"file://{store}")
        with holdfast.Checkpointer(folder, interval_steps=0) as ckpt:
            ckpt.restore({"w": np.zeros(64)})
            ckpt.save(1, {"w": np.ones(64)}).wait("persisted")
        filler = fill(store)
        with holdfast.Checkpointer(folder, interval_steps=0) as ckpt:
            assert ckpt.restore({"w": np.zeros(64)}) == 1
            last = ckpt.save(2, {"w": np.full(64, 2.0)})
            last.wait("local")
            filler.unlink()
            last.wait("persisted")
        assert holdfast.open(f"file://{store}").steps() == (1, 2)


def test_an_io_error_of_a_store_directory_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **options: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = DirectoryObjectStore(tmp_path)
    monkeypatch.setattr(os, "walk", fails)
    with pytest.raises(UnavailableError, match="Input/output error"):
        store.list("runs/")
