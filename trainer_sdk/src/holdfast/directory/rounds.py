"""How a run of a folder takes a round that no other run has, also where they start at the same time.

A round is taken by creating `rounds/r<round>` with O_EXCL, which is atomic on every local file system and
on NFS since version 3. The file names its run for people; only its name counts, so that no damaged byte
can hide a checkpoint.
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
    """Take the lowest round that is free, is `at_least` that high and above every round taken before.
    Durable when it returns. Raises OSError."""
    make_directories(directory)
    while True:
        round_ = RestartRound(max(at_least, *(taken + 1 for taken in _taken(directory)), 0))
        failpoint("directory.before_round")
        if not _create(_path(directory, round_), run_id):
            continue
        fsync_directory(directory)
        taken = _taken(directory)
        # Between the listing and the creation another run may have taken this round and a higher one,
        # and have removed the file of this one.
        if max(taken) > round_:
            continue
        for older in taken:
            if older < round_:
                with contextlib.suppress(
                    OSError
                ):  # they cost a name, and the next run removes them
                    _path(directory, older).unlink()
        return round_


def keep_round(directory: Path, round_: RestartRound, run_id: str) -> None:
    """Take a round that this run has taken before, in a folder that was deleted since."""
    make_directories(directory)
    if not _taken(directory):
        _create(_path(directory, round_), run_id)


def has_rounds(directory: Path) -> bool:
    """Whether a run has been here."""
    return directory.is_dir() and bool(_taken(directory))


def _taken(directory: Path) -> list[RestartRound]:
    matches = (_NAME.fullmatch(path.name) for path in directory.iterdir())
    return [RestartRound(int(match.group(1))) for match in matches if match is not None]


def _create(path: Path, run_id: str) -> bool:
    """False where the file is there already."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o640)
    except FileExistsError:
        return False
    try:
        with contextlib.suppress(
            OSError
        ):  # a full disk has room for the name, which is what counts
            text = f"run {run_id} of process {os.getpid()} on {socket.gethostname()}\n"
            os.write(descriptor, text.encode())
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True


def _path(directory: Path, round_: RestartRound) -> Path:
    return directory / f"r{round_:06d}"
