"""Exit codes of the command line, and the errors that end a command with one of them."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

from holdfast_core.errors import (
    ConfigError,
    CorruptionError,
    ForbiddenByStateError,
    HoldfastError,
    NotFoundError,
    UnknownVersionError,
)


class Exit(IntEnum):
    """What the exit code of a command says."""

    SUCCESS = 0
    FAILED = 1
    USAGE = 2
    DAMAGED = 3
    NOT_RESTORABLE = 4
    MISSING = 5
    FORBIDDEN = 6
    DIFFERENT = 7
    INTERRUPTED = 130


EXPLAINED = {
    Exit.SUCCESS: "success",
    Exit.FAILED: "the deed failed: something cannot be reached or has refused it, or a write was cut short",
    Exit.USAGE: "wrong usage: a verb, a target or an option has no meaning here",
    Exit.DAMAGED: "what was read is damaged",
    Exit.NOT_RESTORABLE: "it is intact, and cannot be restored",
    Exit.MISSING: "what was named does not exist",
    Exit.FORBIDDEN: "its state forbids the deed: it is being deleted, quarantined, pinned, protected, of "
    "somebody else, or of another version",
    Exit.DIFFERENT: "`diff --exit-code` has found a difference",
    Exit.INTERRUPTED: "interrupted",
}
"""The meaning of each code, as `--help` and docs/cli.md say it."""


class CommandError(HoldfastError):
    """Error for the terminal: one sentence that says what failed and what to do."""

    exit: ClassVar[Exit] = Exit.FAILED


class UsageError(CommandError):
    """The command line has no meaning."""

    exit = Exit.USAGE


class NotFound(CommandError):
    """What the command line names does not exist."""

    exit = Exit.MISSING


class Unanswered(CommandError):
    """The API server does not answer, or cannot serve a request now."""


class StateError(CommandError):
    """The state of what was named forbids the deed."""

    exit = Exit.FORBIDDEN


_EXITS: tuple[tuple[type[HoldfastError], Exit], ...] = (
    (ForbiddenByStateError, Exit.FORBIDDEN),
    (ConfigError, Exit.USAGE),
    (NotFoundError, Exit.MISSING),
    (UnknownVersionError, Exit.FORBIDDEN),
    (CorruptionError, Exit.DAMAGED),
)


def exit_of(error: HoldfastError) -> Exit:
    """Return the code with which an error of a command, of the SDK or of core ends the program."""
    if isinstance(error, CommandError):
        return error.exit
    return next((code for kind, code in _EXITS if isinstance(error, kind)), Exit.FAILED)
