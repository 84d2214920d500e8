"""Parses the command of `holdfast run`.

`holdfast run [options] SCRIPT ...` names a Python script, as with torchrun. `holdfast run [options] -- CMD`
is any command line. Both become a Python script or module, which a fork can run, or another program.
Parsing does not touch the file system, except to resolve the path of an interpreter.
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
"""Interpreter flags that a forked rank may ignore: its output is line-buffered, and -B only affects
the cache of bytecode."""


class CommandKind(StrEnum):
    SCRIPT = "script"
    """`python FILE ...`, forked from the fork server."""
    MODULE = "module"
    """`python -m NAME ...`, forked from the fork server."""
    EXEC = "exec"
    """Any other command, started by exec in each round, without preloaded modules."""


@dataclass(frozen=True, slots=True)
class Command:
    kind: CommandKind
    argv: tuple[str, ...]
    """SCRIPT and MODULE: file or module name, then its arguments. EXEC: the command and its arguments."""


def parse_command(
    text: Sequence[str],
    *,
    is_module: bool = False,
    is_command_line: bool = True,
    executable: str = sys.executable,
) -> Command:
    """Parse a command. Raises ConfigError when it is empty.

    A bare `python` means the interpreter that runs the launcher, as with torchrun. A command with the path
    of another interpreter, or with interpreter flags that a forked process cannot support, is run by exec.

    Args:
        text: The words of the command.
        is_module: Whether the first word is the name of a module (`-m`).
        is_command_line: Whether the first word is a program. Otherwise it is a Python script, or an
            interpreter. A first word that ends in `.py` is always a script.
        executable: The interpreter that runs the launcher.
    """
    if not text:
        raise ConfigError(
            "holdfast run: no command; expected: holdfast run [options] train.py ..., or "
            "holdfast run [options] -- COMMAND ..."
        )
    if is_module:
        return Command(CommandKind.MODULE, tuple(text))
    if not _is_python(text[0]):
        is_script = text[0].endswith(".py") or not is_command_line
        return Command(CommandKind.SCRIPT if is_script else CommandKind.EXEC, tuple(text))
    if not _is_own_python(text[0], executable):
        return Command(CommandKind.EXEC, tuple(text))
    rest = list(text[1:])
    while rest and rest[0] in _HARMLESS_FLAGS:
        rest.pop(0)
    if len(rest) >= 2 and rest[0] == "-m":
        return Command(CommandKind.MODULE, tuple(rest[1:]))
    if rest and not rest[0].startswith("-"):
        return Command(CommandKind.SCRIPT, tuple(rest))
    return Command(CommandKind.EXEC, (executable, *text[1:]))


def _is_python(word: str) -> bool:
    return _PYTHON.match(Path(word).name) is not None


def _is_own_python(word: str, executable: str) -> bool:
    path = Path(word)
    if path.name == word:
        return True
    own = Path(executable)
    # Two virtual environments may link to the same interpreter. They differ in their directories.
    return os.path.realpath(word) == os.path.realpath(executable) and (
        Path(os.path.realpath(path.parent)) == Path(os.path.realpath(own.parent))
    )
