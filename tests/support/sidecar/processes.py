"""The real sidecar as a child process, and damage to its files."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support import zygote
from tests.support.crash.failpoints import VARIABLE
from tests.support.sidecar.waiting import until

from holdfast_core.contract import SidecarContract
from holdfast_core.shm.slot_file import (
    HEADER_BYTES,
)
from holdfast_sidecar.base.settings import PORTS_FILE


@dataclass(slots=True)
class SidecarProcess:
    """Child process that runs `python -m holdfast_sidecar`, with its directories."""

    contract: SidecarContract
    log: Path
    module: str = "holdfast_sidecar"
    """Module that runs the sidecar."""
    executed: bool = False
    """Whether it is started by an exec, as in a container, and not forked from the zygote."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def shared(self) -> Path:
        return Path(self.contract.shared_dir)

    @property
    def node(self) -> Path:
        return Path(self.contract.node_dir)

    def start(self, extra: dict[str, str] | None = None) -> None:
        for directory in (self.shared, self.node):
            directory.mkdir(parents=True, exist_ok=True)
        (self.node / PORTS_FILE).unlink(missing_ok=True)
        failing = VARIABLE in (extra or {})
        module = "tests.support.sidecar.failing" if failing else self.module
        with self.log.open("ab") as log:
            self.process = zygote.Popen(
                [sys.executable, "-m", module],
                env={**os.environ, **self.contract.to_env(), **(extra or {})},
                stdout=log,
                stderr=log,
                executed=self.executed,
            )

    async def address(self) -> str:
        """Wait until the process listens, and return its address as `ip:control:bulk`."""
        path = self.node / PORTS_FILE

        def ready() -> bool:
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"sidecar exited: {self.log.read_text()[-3000:]}")
            return path.exists()

        await until(ready, f"sidecar of {self.contract.pod_name} listens")
        ports = json.loads(path.read_text())
        return f"{self.contract.pod_ip}:{ports['control']}:{ports['bulk']}"

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def files_below(directory: Path, pattern: str) -> list[Path]:
    """Return the files below a directory whose names match a pattern.

    A sidecar may write to the directory meanwhile. `Path.rglob` raises an error if it removes a directory.
    """
    return [
        Path(folder, name)
        for folder, _, names in os.walk(directory)
        for name in fnmatch.filter(names, pattern)
    ]


def flip_a_bit(node_dir: Path, *, rank: int) -> Path:
    """Invert one bit in the payload of the only shard of `rank` on this node, and return its file."""
    (path,) = files_below(node_dir, f"rank{rank:06d}-*.shard")
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 5000)
        byte = file.read(1)[0]
        file.seek(HEADER_BYTES + 5000)
        file.write(bytes([byte ^ 0x40]))
    return path
