"""The newest round that this pod ever forked ranks for: durable, because it may never run twice.

A launcher whose container restarts in the middle of a round must not fork that round's ranks again:
the gang has moved on without them. The record is written before the first fork.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from holdfast_core.errors import FormatError
from holdfast_core.ids import RestartRound


class RoundRecord:
    """A small file, replaced by rename after an fsync. One writer: the launcher of the pod."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> RestartRound | None:
        """None when no round was ever run. Raises FormatError when the file says nothing sane."""
        try:
            text = self._path.read_text(errors="replace")
        except FileNotFoundError:
            return None
        try:
            return RestartRound(int(json.loads(text)["round"]))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise FormatError(
                f'{self._path}: expected {{"round": N}}, found {text[:80]!r}; the file is written '
                "by `holdfast run` alone: delete it only if no rank of this pod runs"
            ) from error

    def write(self, round_: RestartRound) -> None:
        """Durable when it returns."""
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
