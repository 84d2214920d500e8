"""Record of the processes that use a directory, so that a run waits for writers of the previous run.

Each process holds a claim (see claims) while it lives:
 1. A trainer acquires DIR/processes/<name>.trainer before it starts its persister.
 2. The persister holds <name>.writer until all that was staged is durable.
 3. A run that starts waits for each writer whose trainer has ended. If it chose a checkpoint earlier, it
    would repeat the steps that are being written.
It does not wait for a writer whose trainer lives, because that process may only read the same folder.
Where the file system has no locks, no run waits.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast.directory.claims import is_held, remove_if_free

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.02
_LONGEST_WAIT_SECONDS = 600.0
"""Longest wait of a start. A shard may have some hundred GiB, and a write to a hanging disk never ends."""


@dataclass(frozen=True, slots=True)
class Process:
    """Names of the claims of one trainer and its persister."""

    directory: Path
    name: str

    @property
    def trainer(self) -> Path:
        return self.directory / f"{self.name}.trainer"

    @property
    def writer(self) -> Path:
        return self.directory / f"{self.name}.writer"


def wait_for_writers(directory: Path, longest_seconds: float = _LONGEST_WAIT_SECONDS) -> None:
    """Wait until no persister writes for a trainer that has ended, at most `longest_seconds`."""
    deadline = time.monotonic() + longest_seconds
    names: set[str] = set()
    with contextlib.suppress(OSError):  # the directory does not exist yet, or has just been removed
        names = {path.stem for path in directory.iterdir()}
    for name in sorted(names):
        process = Process(directory, name)
        if is_held(process.trainer):
            continue
        if is_held(process.writer):
            _wait(process.writer, deadline)
        if remove_if_free(process.writer):
            remove_if_free(process.trainer)


def _wait(writer: Path, deadline: float) -> None:
    whose = ""
    with contextlib.suppress(OSError):
        whose = writer.read_text()
    logger.warning("waiting for %s, which still writes the saves of a run that has ended", whose)
    while is_held(writer):
        if time.monotonic() >= deadline:
            logger.warning(
                "%s still writes: starting from the newest committed checkpoint; the saves that "
                "it still writes may be lost",
                whose,
            )
            return
        time.sleep(_POLL_SECONDS)
