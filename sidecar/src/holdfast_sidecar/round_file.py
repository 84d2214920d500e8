"""`round.json` on the node tier: the newest round this pod was sealed for, durable before it is
acknowledged. A sidecar that lost it would serve an older round again (I5).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.errors import FormatError, UnavailableError
from holdfast_core.ids import RestartRound

NAME = "round.json"
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RoundRecord:
    round: RestartRound
    version: int
    """Of the newest ROUND accepted for `round`; 0 if none was."""


def read_record(directory: Path) -> RoundRecord | None:
    """None if this node never recorded a round. Raises FormatError when the file is damaged."""
    try:
        with (directory / NAME).open("rb") as file:
            data = file.read(_MAX_BYTES)
    except FileNotFoundError:
        return None
    try:
        value = json.loads(data)
        return RoundRecord(RestartRound(int(value["round"])), int(value["version"]))
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"{directory / NAME}: not a round record ({error}): the node volume is damaged; "
            "delete the pod so that it starts with an empty one"
        ) from error


def write_record(directory: Path, record: RoundRecord) -> None:
    """Durable when it returns. Raises UnavailableError with the disk's words."""
    temporary = directory / f".{NAME}.tmp"
    try:
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            os.write(
                descriptor,
                json.dumps({"round": record.round, "version": record.version}).encode(),
            )
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(directory / NAME)
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise UnavailableError(f"recording round {record.round} in {directory}: {error}") from error
