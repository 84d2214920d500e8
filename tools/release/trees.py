"""Folders with a program and its packages for several versions of Python, to be copied to a machine.

    bin/PROGRAM      starts the program with the packages for the Python that runs it
    common/          packages that are the same for each version
    python3.11/ ...  packages with compiled modules

A user's machine or image needs only a Python of one of these versions: neither pip nor an index.
"""

from __future__ import annotations

import filecmp
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools.release.uv import uv

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
_NOT_REPRODUCIBLE = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json")
"""Files of an installation that contain paths of this machine, or digests of such files."""
_PROGRAM = '''#!/usr/bin/env python3
"""Start {program} with the packages beside this file, for the version of Python that runs it."""
import os
import sys

home = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
version = "%d.%d" % sys.version_info[:2]
known = {pythons!r}
if version not in known:
    sys.exit(
        "{program}: %s is Python %s, and %s has packages for Python %s only: put one of these on the PATH "
        "as python3" % (sys.executable, version, home, ", ".join(known))
    )
mine = [os.path.join(home, "common"), os.path.join(home, "python" + version)]
sys.path[0:1] = mine
before = os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = os.pathsep.join(mine + ([before] if before else []))

from {module} import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
'''


@dataclass(frozen=True, slots=True)
class Program:
    """A console script of a distribution of the workspace."""

    name: str
    distribution: str
    module: str
    from_user: tuple[str, ...] = ()
    """Dependencies that the user's environment has."""


def build(
    root: Path,
    program: Program,
    wheels: list[Path],
    target: Path,
    *,
    platform: str,
    pythons: tuple[str, ...] = PYTHONS,
) -> None:
    """Fill the empty folder `target` with the program for one platform, as uv names it."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        pins = work / "requirements.txt"
        pins.write_text(requirements(root, program))

        def install(python: str) -> Path:
            tree = target / f"python{python}"
            where: list[str | Path] = [
                "--python-version",
                python,
                "--python-platform",
                platform,
                "--target",
                tree,
            ]
            how = ["--no-deps", "--only-binary", ":all:", "--link-mode", "copy"]
            uv(root, "pip", "install", *where, *how, "--require-hashes", "-r", pins)
            uv(root, "pip", "install", *where, *how, *wheels)
            clean(tree)
            return tree

        with ThreadPoolExecutor(2) as pool:
            trees = list(pool.map(install, pythons))
    share(trees, target / "common")
    start = target / "bin" / program.name
    start.parent.mkdir()
    start.write_text(start_script(program, pythons))
    start.chmod(0o755)


def start_script(program: Program, pythons: tuple[str, ...]) -> str:
    return _PROGRAM.format(program=program.name, module=program.module, pythons=list(pythons))


def requirements(root: Path, program: Program) -> str:
    """Return the requirements that uv.lock pins for the program, with hashes."""
    skip = [word for name in program.from_user for word in ("--no-emit-package", name)]
    form = ["export", "--frozen", "--no-dev", "--no-emit-workspace", "--no-header", "--no-annotate"]
    return uv(root, *form, "--package", program.distribution, *skip)


def clean(tree: Path) -> None:
    """Remove what differs from machine to machine, and the scripts, whose first line names this machine."""
    shutil.rmtree(tree / "bin", ignore_errors=True)
    (tree / ".lock").unlink(missing_ok=True)
    for folder in tree.glob("*.dist-info"):
        for name in _NOT_REPRODUCIBLE:
            (folder / name).unlink(missing_ok=True)


def share(trees: list[Path], common: Path) -> None:
    """Move the top-level entries that all trees have with equal bytes to `common`.

    A package is moved as a whole, because Python looks for its modules in one folder only.
    """
    common.mkdir()
    first, *others = trees
    for entry in sorted(first.iterdir()):
        if all(same(entry, other / entry.name) for other in others):
            shutil.move(entry, common / entry.name)
            for other in others:
                found = other / entry.name
                shutil.rmtree(found) if found.is_dir() else found.unlink()


def same(one: Path, other: Path) -> bool:
    if one.is_file() or other.is_file():
        return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)
    if not other.is_dir() or {p.name for p in one.iterdir()} != {p.name for p in other.iterdir()}:
        return False
    return all(same(entry, other / entry.name) for entry in one.iterdir())
