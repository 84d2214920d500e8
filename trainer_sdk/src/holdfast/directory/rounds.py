"""Reserves a round of a folder for one run, also where several runs start at the same time.

A run reserves a round by creating `rounds/r<round>` with O_EXCL, which is atomic on every local file
system and on NFS since version 3. The content of the file is for people. Only its name counts, so that a
damaged byte cannot hide a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path

from holdfast_core.failpoint import failpoint
from holdfast_core.ids import RestartRound
from holdfast_core.node.files import fsync_directory, make_directories

_NAME = re.compile(r"r(\d{6})", re.ASCII)


def claim_round(directory: Path, at_least: RestartRound, run_id: str) -> RestartRound:
    """Reserve and return the lowest round that is at least `at_least` and above all reserved rounds.

    The reservation is durable when this returns. Raises OSError.
    """
    make_directories(directory)
    while True:
        round_ = RestartRound(
            max(at_least, *(reserved + 1 for reserved in _reserved(directory)), 0)
        )
        failpoint("directory.before_round")
        if not _create(_path(directory, round_), run_id):
            continue
        fsync_directory(directory)
        reserved = _reserved(directory)
        # Between the listing and the creation, another run may have reserved this round and a higher one,
        # and have removed the file of this round.
        if max(reserved) > round_:
            continue
        for older in reserved:
            if older < round_:
                # An old file does no harm, and the next run removes it.
                with contextlib.suppress(OSError):
                    _path(directory, older).unlink()
        return round_


def keep_round(directory: Path, round_: RestartRound, run_id: str) -> None:
    """Reserve this run's round again if the folder was deleted and holds no reservation."""
    make_directories(directory)
    if not _reserved(directory):
        _create(_path(directory, round_), run_id)


def has_rounds(directory: Path) -> bool:
    """Return whether a run has ever reserved a round in this folder."""
    return directory.is_dir() and bool(_reserved(directory))


def _reserved(directory: Path) -> list[RestartRound]:
    matches = (_NAME.fullmatch(path.name) for path in directory.iterdir())
    return [RestartRound(int(match.group(1))) for match in matches if match is not None]


def _create(path: Path, run_id: str) -> bool:
    """Create the file. Return False if it already exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o640)
    except FileExistsError:
        return False
    try:
        # A full disk may have no room for the text, but only the name counts.
        with contextlib.suppress(OSError):
            text = f"run {run_id} of process {os.getpid()} on {socket.gethostname()}\n"
            os.write(descriptor, text.encode())
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True


def _path(directory: Path, round_: RestartRound) -> Path:
    return directory / f"r{round_:06d}"
