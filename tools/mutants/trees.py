"""Copies of the code in a temporary folder, in which mutants are seeded. The checkout is only read."""

from __future__ import annotations

import compileall
import shutil
from collections.abc import Iterable
from pathlib import Path

from tools.mutants.model import Mutant

_COMPILED = "__pycache__"


def copy_sources(root: Path, sources: Iterable[str], folder: Path) -> None:
    """Copy source folders such as `core/src` of the checkout, and compile the copies once.

    Without the compiled modules, the tests of each mutant would compile the whole package.
    """
    for source in sorted(set(sources)):
        shutil.copytree(root / source, folder / source, ignore=shutil.ignore_patterns(_COMPILED))
        compileall.compile_dir(folder / source, quiet=1)


def seed(mutant: Mutant, root: Path, copies: Path, folder: Path) -> Path:
    """Copy the mutant's source folder, seed the mutant, and return the folder for `PYTHONPATH`.

    The copy keeps the times of the files, so that the compiled modules stay valid.
    """
    copy = folder / mutant.source
    shutil.copytree(copies / mutant.source, copy)
    file = folder / mutant.file
    for compiled in (file.parent / _COMPILED).glob(f"{file.stem}.*"):
        compiled.unlink()  # it has the code without the mutant
    file.write_text(mutant.mutated(root))
    return copy
