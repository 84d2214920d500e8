"""Calls of uv, which resolves, downloads and builds Python packages."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tools.release.source import ReleaseError


def uv(root: Path, *words: str | Path, epoch: int | None = None) -> str:
    """Run uv and return its output. Archives that it builds contain `epoch` as their only time."""
    program = os.environ.get("UV") or shutil.which("uv")
    if not program:
        raise ReleaseError("uv is not installed on this machine: run `make prerequisites`")
    more = {} if epoch is None else {"SOURCE_DATE_EPOCH": str(epoch)}
    command = [program, "--quiet", *map(str, words)]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, env={**os.environ, **more}
    )
    if done.returncode:
        raise ReleaseError(
            f"{' '.join(command)}: exit {done.returncode}\n{done.stderr.strip()[-2000:]}"
        )
    return done.stdout
