"""One start of a program, as the worker sends it to its zygote."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

_READ_AT_LOAD = (
    *("PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "MALLOC_", "GLIBC_", "TORCH_"),
    *("CUDA_", "ATEN_", "LC_", "LANG", "TZ"),
)
"""First letters of variables that the interpreter or a library reads when it is loaded, or may read then."""
_IN_THE_CHILD = ("PYTHONPATH",)
"""Variables among them that the child applies itself."""


_INTERPRETER = sys.executable


@dataclass(frozen=True, slots=True)
class Start:
    """What a child needs to become the program."""

    arguments: Sequence[str]
    """Arguments of the interpreter: `-m module ...`, `-c text ...` or `file ...`."""
    preload: Sequence[str]
    """Modules that the zygote imports before it forks."""
    environment: Mapping[str, str]
    directory: str
    descriptors: Sequence[int]
    """Numbers that the descriptors sent with the start have in the child."""
    ignored: Sequence[int]
    """Signals that the child ignores."""
    blocked: Sequence[int]
    """Signals that the child blocks."""
    umask: int
    new_session: bool
    process_group: int | None
    launcher: int | None
    """Descriptor of a zygote's connection, which the child uses to fork its fork server."""


def written(start: Start) -> int:
    """Return a descriptor of a file in memory that holds the start."""
    file = os.memfd_create("start")
    with open(file, "w", closefd=False) as text:
        json.dump(asdict(start), text)
    return file


def read(file: int) -> Start:
    """Return the start of `written`, and close the descriptor."""
    os.lseek(file, 0, os.SEEK_SET)
    with open(file) as text:
        return Start(**json.load(text))


def at_load(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are those of the zygote when it starts."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_LOAD) and name not in _IN_THE_CHILD
    }


def program_arguments(command: object) -> list[str] | None:
    """Return the arguments of the interpreter if a forked child can run the command.

    None: it is another program, or it has options of the interpreter.
    """
    if isinstance(command, str | bytes | os.PathLike) or not isinstance(command, Sequence):
        return None
    words = [os.fsdecode(word) for word in command]
    if len(words) < 2 or words[0] != _INTERPRETER:
        return None
    if words[1] in ("-m", "-c"):
        return words[1:] if len(words) > 2 else None
    return None if words[1].startswith("-") else words[1:]
