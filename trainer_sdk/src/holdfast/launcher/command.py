"""What `holdfast run -- CMD` is to run: a Python script or module that a fork can become, or anything else.

Pure: looks at the words alone, apart from resolving a path to an interpreter.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from holdfast_core.errors import ConfigError

_PYTHON = re.compile(r"python(\d(\.\d+)?)?$")
_HARMLESS_FLAGS = frozenset({"-u", "-B"})
"""Flags of the interpreter that mean nothing to a rank that was forked (its output is unbuffered)."""


class CommandKind(StrEnum):
    SCRIPT = "script"
    """`python FILE ...`: forked from the fork server."""
    MODULE = "module"
    """`python -m NAME ...`: forked from the fork server."""
    EXEC = "exec"
    """Anything else: started afresh in each round; nothing is preloaded for it."""


@dataclass(frozen=True, slots=True)
class Command:
    kind: CommandKind
    argv: tuple[str, ...]
    """SCRIPT and MODULE: file or module name, then its arguments. EXEC: the words as given."""


def parse_command(words: Sequence[str], executable: str = sys.executable) -> Command:
    """Raises ConfigError when there is nothing to run.

    A bare `python` means the interpreter that runs the launcher, as torchrun does it. A path to
    another interpreter, or interpreter flags that a forked process cannot honour, are executed.
    """
    if not words:
        raise ConfigError("holdfast run: no command; expected: holdfast run -- python train.py ...")
    as_is = Command(CommandKind.EXEC, tuple(words))
    if not _is_own_python(words[0], executable):
        return as_is
    rest = list(words[1:])
    while rest and rest[0] in _HARMLESS_FLAGS:
        rest.pop(0)
    if len(rest) >= 2 and rest[0] == "-m":
        return Command(CommandKind.MODULE, tuple(rest[1:]))
    if rest and not rest[0].startswith("-"):
        return Command(CommandKind.SCRIPT, tuple(rest))
    return Command(CommandKind.EXEC, (executable, *words[1:]))


def _is_own_python(word: str, executable: str) -> bool:
    path = Path(word)
    if not _PYTHON.match(path.name):
        return False
    if path.name == word:
        return True
    own = Path(executable)
    # Two virtual environments may share one interpreter by links: their folders tell them apart.
    return os.path.realpath(word) == os.path.realpath(executable) and (
        Path(os.path.realpath(path.parent)) == Path(os.path.realpath(own.parent))
    )
