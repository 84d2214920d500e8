"""Shared memory is allocated before it is used, or an error reports that it is missing."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.slots import prefault

MIB = 1 << 20
PROGRAM = """
import mmap, os, pathlib, sys
from holdfast.slots.prefault import prefault
path = pathlib.Path(sys.argv[1])
descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
os.ftruncate(descriptor, 64 << 20)
try:
    prefault(mmap.mmap(descriptor, 64 << 20), path, 64 << 20)
except OSError as error:
    print(error.errno)
"""


def sparse(path: Path, size_bytes: int) -> mmap.mmap:
    with path.open("w+b") as file:
        os.ftruncate(file.fileno(), size_bytes)
        return mmap.mmap(file.fileno(), size_bytes)


def taken_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.mark.parametrize("size_bytes", [4096, MIB, 16 * MIB, 33 * MIB + 4096])
def test_all_pages_are_allocated_and_their_contents_stay(tmp_path: Path, size_bytes: int) -> None:
    path = tmp_path / "slot"
    memory = sparse(path, size_bytes)
    memory[size_bytes - 1] = 7
    assert taken_bytes(path) <= 4096
    prefault.prefault(memory, path, size_bytes)
    assert taken_bytes(path) >= size_bytes
    assert memory[size_bytes - 1] == 7


def test_pages_are_allocated_without_madv_populate_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefault, "_MADV_POPULATE_WRITE", 9999)
    path = tmp_path / "slot"
    memory = sparse(path, MIB)
    memory[0] = 7
    prefault.prefault(memory, path, MIB)
    assert taken_bytes(path) >= MIB
    assert memory[0] == 7


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_volume_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    script = f'mount -t tmpfs -o size=32m none {tmp_path} && exec "$@" {tmp_path}/slot'
    command = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, str(errno.ENOSPC)), done.stderr
