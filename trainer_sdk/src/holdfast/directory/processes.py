"""Which processes use a directory, so that a run waits for what the one before it still writes.

DIR/processes/<name>.trainer and <name>.writer are held (see claims) while that process lives:
 1. a trainer takes its own before it starts its persister;
 2. the persister holds the other until all that it was given is durable;
 3. a run that starts waits for each writer whose trainer is gone. Whoever chose a checkpoint earlier
    would train again what is just being written.
A trainer that lives is not waited for: it may be somebody who looks at the same folder. Where the file
system knows no locks, nobody waits.
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


def wait_for_writers(directory: Path, longest_seconds: float = _LONGEST_WAIT_SECONDS) -> None:
    """Returns when no persister is left that still writes for a trainer that is gone."""
    deadline = time.monotonic() + longest_seconds
    names: set[str] = set()
    with contextlib.suppress(OSError):  # nobody has been here, or the last one leaves
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
    logger.warning("waiting for %s, which still writes what an ended run had saved", whose)
    while is_held(writer):
        if time.monotonic() >= deadline:
            logger.warning(
                "%s still writes: starting from what is committed; what it was given may be lost",
                whose,
            )
            return
        time.sleep(_POLL_SECONDS)
