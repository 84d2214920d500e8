"""Template of the nodes' containerd folder in local mode; each node gets hard links to its files.

Images' content and unpacked layers are never changed, so a node's gigabytes cost seconds and no disk space,
and all nodes share one page cache. Only containerd's databases are copied.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed import archive, engine
from testbed.config import HANG_SECONDS, Bed
from testbed.shell import BedError, run


def add(bed: Bed, tags: Collection[str], log: Path) -> None:
    """Import and unpack images of the engine. Images of the same name are replaced."""
    blobs = bed.template / "io.containerd.content.v1.content/blobs/sha256"
    known = {f"sha256:{path.name}" for path in blobs.iterdir()} if blobs.is_dir() else set()
    file = bed.work / "template.tar"
    with _containerd(bed, log) as ctr:
        with file.open("wb") as out:
            archive.write_missing(bed, tags, known, out)
        run([*ctr, "images", "import", file], log=log)
    file.unlink()
    shutil.rmtree(bed.template / "tmpmounts", ignore_errors=True)


@contextmanager
def _containerd(bed: Bed, log: Path) -> Iterator[list[str]]:
    """Run a containerd on the template during the block. Yields the first words of a ctr command."""
    state = bed.run / "template"
    shutil.rmtree(state, ignore_errors=True)
    state.mkdir(parents=True)
    socket, file = state / "c.sock", state / "config.toml"
    config = engine.containerd_config(root=bed.template, state=state / "state", socket=socket)
    file.write_text(config)
    with log.open("ab") as out:
        daemon = subprocess.Popen(
            [str(bed.bin / "containerd"), "-c", str(file)],
            env=bed.environment(),
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
        )
    try:
        deadline = time.monotonic() + HANG_SECONDS
        while not socket.exists():
            if time.monotonic() > deadline or daemon.poll() is not None:
                raise BedError("containerd, which fills the nodes' image store, did not start")
            time.sleep(0.1)
        yield [str(bed.bin / "ctr"), "-a", str(socket), "-n", "k8s.io"]
    finally:
        daemon.terminate()
        daemon.wait()
        shutil.rmtree(state, ignore_errors=True)


def link(bed: Bed, node: str) -> Path:
    """Create a node's containerd folder from the template and return it."""
    target = bed.nodes / node
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    run(["cp", "-al", bed.template, target])
    for database in target.glob("io.containerd.*/*.db"):
        copy = database.with_suffix(".copy")
        shutil.copy2(database, copy)
        copy.rename(database)
    return target
