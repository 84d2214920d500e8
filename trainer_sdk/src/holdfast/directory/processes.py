"""Record of the processes that use a directory: its writers, for which a new run waits, and its readers.

Each process of a training holds a claim (see claims) while it lives:
 1. A trainer acquires DIR/processes/<name>.trainer before it starts its persister.
 2. The persister holds <name>.writer until all that was staged is durable.
 3. A run that starts waits for each writer whose trainer has ended. If it chose a checkpoint earlier, it
    would repeat the steps that are being written.
It does not wait for a writer whose trainer lives, because that process may only read the same folder.
Where the file system has no locks, no run waits.

A reader of a checkpoint holds a claim under DIR/readers/<checkpoint>.<process>, so that pruning skips the
checkpoint. A save into a full folder may delete it all the same. Where the folder cannot be written or has
no locks, readers are not visible.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast.directory.choice import checkpoint_of_name
from holdfast.directory.claims import Claim, claim, is_held, remove_if_free
from holdfast_core.ids import CheckpointId

logger = logging.getLogger(__name__)

_READERS = "readers"
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


def claim_checkpoint(root: Path, checkpoint: CheckpointId) -> Claim | None:
    """Record that this process reads `checkpoint`, until the claim is released or the process ends.

    Return None where the folder cannot be written or has no locks.
    """
    name = f"{checkpoint}.{os.getpid()}-{secrets.token_hex(4)}"
    return claim(root / _READERS / name) if os.access(root, os.W_OK) else None


def claimed_checkpoints(root: Path) -> frozenset[CheckpointId]:
    """Return the checkpoints that any process reads, this one included."""
    found: set[CheckpointId] = set()
    with contextlib.suppress(OSError):  # there is no such directory
        for path in (root / _READERS).iterdir():
            checkpoint = checkpoint_of_name(path.name.partition(".")[0])
            if checkpoint is None:
                continue
            if is_held(path):
                found.add(checkpoint)
            else:
                remove_if_free(path)
    return frozenset(found)


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
