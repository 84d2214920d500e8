"""Which processes use a directory, so that a run waits for what the one before it still writes.

DIR/processes/<name>.trainer and <name>.writer are locked while that process lives, however it ends:
 1. a trainer takes its own before it starts its persister;
 2. the persister holds the other until all that it was given is durable;
 3. a run that starts waits for each writer whose trainer is gone. Whoever chose a checkpoint earlier
    would train again what is just being written.
A trainer that lives is not waited for: it may be somebody who looks at the same folder. Where the file
system knows no locks, nobody waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.tiers.disk import make_directories

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.02
_LONGEST_WAIT_SECONDS = 600.0
"""Of a start: a disk that hangs never ends a write, and a shard may be some hundred GiB."""


@dataclass(frozen=True, slots=True)
class Process:
    """What a trainer and its persister are called in the directory."""

    directory: Path
    name: str

    @property
    def trainer(self) -> Path:
        return self.directory / f"{self.name}.trainer"

    @property
    def writer(self) -> Path:
        return self.directory / f"{self.name}.writer"


class Claim:
    """A file that is locked while it is held, and by the end of the process at the latest."""

    def __init__(self, path: Path) -> None:
        """Raises OSError; also where files cannot be locked."""
        self._path = path
        make_directories(path.parent)
        self._descriptor = _locked(path)

    def release(self) -> None:
        """Also for processes that were forked off and still have the descriptor."""
        self._path.unlink(missing_ok=True)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


def claim(path: Path) -> Claim | None:
    """None where that cannot be: whoever comes next does not wait then, and nothing else is lost."""
    try:
        return Claim(path)
    except OSError as error:
        logger.info("%s: %s; a run that starts meanwhile does not wait for this one", path, error)
        return None


def wait_for_writers(directory: Path, longest_seconds: float = _LONGEST_WAIT_SECONDS) -> None:
    """Returns when no persister is left that still writes for a trainer that is gone."""
    deadline = time.monotonic() + longest_seconds
    for name in sorted({path.stem for path in directory.glob("*.*")}):
        process = Process(directory, name)
        if _is_held(process.trainer):
            continue
        if _is_held(process.writer):
            _wait(process.writer, deadline)
        if not _is_held(process.writer):
            process.trainer.unlink(missing_ok=True)
            process.writer.unlink(missing_ok=True)


def _wait(writer: Path, deadline: float) -> None:
    whose = ""
    with contextlib.suppress(OSError):
        whose = writer.read_text()
    logger.info("waiting for %s, which still writes what an ended run had saved", whose)
    while _is_held(writer):
        if time.monotonic() >= deadline:
            logger.warning(
                "%s still writes: starting from what is committed; what it was given may be lost",
                whose,
            )
            return
        time.sleep(_POLL_SECONDS)


def _locked(path: Path) -> int:
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o660)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits at most for somebody who asks
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # who asked took it for one that was left, and removed it


def _is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
