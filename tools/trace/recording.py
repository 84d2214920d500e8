"""A walk that is being recorded, and what its processes have written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SITE = Path(__file__).with_name("site")
PROCESSES = {
    "holdfast-rank": "rank",
    "holdfast_sidecar": "sidecar",
    "holdfast.launcher.forkserver": "fork server",
    "persister": "persister",
    "holdfast_operator": "operator",
    "holdfast run": "launcher",
}
"""What a process is, by a part of its name or of its command line. Others are the user's program."""


@dataclass(frozen=True, slots=True)
class Call:
    """The first call of a function by a process in the walk."""

    at_ns: int
    """Monotonic clock of the machine, in nanoseconds."""
    process: str
    file: str
    """Path below the root of the repository."""
    function: str


class Recording:
    """The folder in which the processes of one walk write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        self._flag = folder / "recording"
        self._flag.write_bytes(b"\0")

    def environment(self) -> Mapping[str, str]:
        """Return the variables with which a process is recorded, and what it starts."""
        paths = (str(SITE), os.environ.get("PYTHONPATH", ""))
        return {
            "HOLDFAST_TRACE": str(self._folder),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }

    @contextmanager
    def walk(self) -> Iterator[None]:
        """Record what all processes do in this context."""
        with self._flag.open("r+b", buffering=0) as flag:
            flag.write(b"\1")
            try:
                yield
            finally:
                flag.seek(0)
                flag.write(b"\0")

    def calls(self) -> list[Call]:
        """Return the calls of all processes in their order."""
        found = []
        for path in self._folder.glob("*.calls"):
            head, *lines = path.read_text().splitlines()
            process = next((name for part, name in PROCESSES.items() if part in head), "program")
            for line in lines:
                at, file, function = line.split("\t")
                found.append(Call(int(at), process, file, function))
        return sorted(found, key=lambda call: call.at_ns)
