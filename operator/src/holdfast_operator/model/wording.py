"""Texts that messages about jobs share, and how a rank process ended. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from holdfast_core.messages.schema import DeadRank, MemoryUse


def first_of(names: Sequence[object], limit: int = 8) -> str:
    """Return a list of at most `limit` names for a message, and the number of those that are left out."""
    shown = ", ".join(map(str, names[:limit]))
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def first_cause(text: str) -> str:
    """Return the first of the errors that a sidecar lists, in one line, and the number of the others.

    The errors are separated by line breaks, or by a semicolon and a space. The logs of the sidecars have all.
    """
    errors = [part for line in text.splitlines() for part in line.split("; ") if part]
    if len(errors) < 2:
        return text
    return f"{errors[0]} (and {len(errors) - 1} more errors, which the logs of the sidecars have)"


# --------------------------------------------------------------------------- how a rank ended


LAST_OUTPUT_CHARACTERS = 700
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ")
"""Prefix that torch's excepthook writes before each line of a traceback."""
_FRAME = re.compile(r'^  File ".*", line \d+')


def how_it_ended(dead: DeadRank) -> str:
    """Describe the end of a rank for conditions and Events: exit code or signal, then its error output.

    The output is left out for SIGKILL and SIGTERM, because it does not explain a kill from outside.
    """
    text = _how(dead.code)
    if dead.out_of_memory is not None:
        text += f", and its container ran out of memory: {_memory(dead.out_of_memory)}"
    output = "" if _was_killed(dead.code) else _last_output(dead.message)
    return f"{text}: {output}" if output else text


def _was_killed(code: int) -> bool:
    return code in (-signal.SIGKILL, -signal.SIGTERM)


def _how(code: int) -> str:
    if _was_killed(code):
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def _memory(use: MemoryUse) -> str:
    limit = "no limit, so the node ran out of memory"
    if use.limit_bytes is not None:
        limit = f"limit {use.limit_bytes / 2**20:,.0f} MiB"
    peak = "peak not known" if use.peak_bytes is None else f"peak {use.peak_bytes / 2**20:,.0f} MiB"
    return f"{limit}, {peak}"


def _last_output(output: str) -> str:
    """Return the error that follows the last traceback, or the end of the output if there is none."""
    lines = [_RANK_PREFIX.sub("", line).rstrip() for line in output.splitlines()]
    lines = [line for line in lines if line]
    error = _after_traceback(lines)
    if error:
        return "\n".join(error)[:LAST_OUTPUT_CHARACTERS]
    text = "\n".join(lines)
    if len(text) <= LAST_OUTPUT_CHARACTERS:
        return text
    tail = text[-LAST_OUTPUT_CHARACTERS:]
    return tail[tail.find("\n") + 1 :]


def _after_traceback(lines: list[str]) -> list[str]:
    """Return the lines after the last frame and its source, or nothing if there is no frame.

    Lines that are indented by four spaces or more belong to the source. The text of an error may be indented
    by less.
    """
    frames = [i for i, line in enumerate(lines) if _FRAME.match(line)]
    if not frames:
        return []
    rest = lines[frames[-1] + 1 :]
    source = next((i for i, line in enumerate(rest) if not line.startswith("    ")), len(rest))
    return rest[source:]
