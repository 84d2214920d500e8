"""Which output streams of which ranks go to files: `--log-dir`, `--redirects` and `--tee`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag

from holdfast_core.errors import ConfigError

_STREAMS = re.compile(r"[0-3]")
_BY_RANK = re.compile(r"\d+:[0-3](,\d+:[0-3])*")


class Streams(IntFlag):
    """Output streams of a rank, with torchrun's numbers."""

    NONE = 0
    STDOUT = 1
    STDERR = 2


@dataclass(frozen=True, slots=True)
class StreamChoice:
    """The streams that an option names, for each local rank."""

    every: Streams = Streams.NONE
    by_local_rank: Mapping[int, Streams] = field(default_factory=dict)

    def of(self, local_rank: int) -> Streams:
        return self.by_local_rank.get(local_rank, self.every)

    def __bool__(self) -> bool:
        return bool(self.every or any(self.by_local_rank.values()))


def parse_streams(option: str, text: str | None) -> StreamChoice:
    """Parse `3`, or `0:1,1:3` for local ranks 0 and 1. Raises ConfigError."""
    if text is None:
        return StreamChoice()
    if _STREAMS.fullmatch(text):
        return StreamChoice(Streams(int(text)))
    if not _BY_RANK.fullmatch(text):
        raise ConfigError(
            f"holdfast run: {option} {text}: expected 0, 1 (stdout), 2 (stderr) or 3 (both), or a list by "
            "local rank such as 0:1,1:3"
        )
    pairs = (part.split(":") for part in text.split(","))
    return StreamChoice(by_local_rank={int(rank): Streams(int(value)) for rank, value in pairs})


@dataclass(frozen=True, slots=True)
class LogOptions:
    directory: str | None = None
    """None: a temporary directory, where a file is needed."""
    redirects: StreamChoice = field(default_factory=StreamChoice)
    tee: StreamChoice = field(default_factory=StreamChoice)
