"""Durable record of the newest round for which this pod has forked ranks. A round must never run twice.

If the launcher's container restarts during a round, it must not fork that round's ranks again, because
the gang cannot continue with them. The record is written before the first fork.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from holdfast_core.errors import FormatError
from holdfast_core.ids import RestartRound


class RoundRecord:
    """A small file that is replaced by rename after an fsync. Only the pod's launcher writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> RestartRound | None:
        """Return the recorded round, or None if no round was ever run. Raises FormatError."""
        try:
            text = self._path.read_text(errors="replace")
        except FileNotFoundError:
            return None
        try:
            return RestartRound(int(json.loads(text)["round"]))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise FormatError(
                f'{self._path}: expected {{"round": N}}, found {text[:80]!r}; only `holdfast run` '
                "writes this file. Delete it only if no rank of this pod runs"
            ) from error

    def write(self, round_: RestartRound) -> None:
        """Record `round_`. It is durable when this returns."""
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o660)
        try:
            os.write(descriptor, json.dumps({"round": round_}).encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(self._path)
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
