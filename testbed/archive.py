"""OCI archives with only the blobs that the receiver lacks, so that a code change sends a few megabytes."""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Collection
from pathlib import Path
from typing import IO

from testbed.config import Bed
from testbed.shell import BedError


def write_missing(bed: Bed, tags: Collection[str], known: Collection[str], out: IO[bytes]) -> None:
    """Write an OCI archive of the engine's images to `out`, without the blobs in `known`."""
    with (
        subprocess.Popen(
            ["docker", "save", *tags], stdout=subprocess.PIPE, env=bed.environment()
        ) as process,
        tarfile.open(fileobj=out, mode="w") as target,
    ):
        assert process.stdout is not None
        copy_unknown(process.stdout, target, known)
        process.stdout.read()
    if process.returncode:
        raise BedError(f"docker save {' '.join(tags)}: exit {process.returncode}")


def copy_unknown(source: IO[bytes], target: tarfile.TarFile, known: Collection[str]) -> None:
    """Copy a `docker save` stream without the blobs in `known` and without Docker's legacy index."""
    with tarfile.open(fileobj=source, mode="r|") as saved:
        for member in saved:
            name = member.name
            if not member.isfile() or name in ("manifest.json", "repositories"):
                continue
            if name.startswith("blobs/sha256/") and f"sha256:{Path(name).name}" in known:
                continue
            target.addfile(member, saved.extractfile(member))
