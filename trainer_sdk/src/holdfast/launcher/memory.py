"""Memory of the launcher's container, as the kernel counts it in the memory cgroup (version 2).

On a cluster where the kernel ends the whole container when its memory runs out, the launcher ends with it and
reports nothing: the kubelet reports OOMKilled.
"""

from __future__ import annotations

from pathlib import Path

from holdfast_core.messages.schema import MemoryUse

CGROUP = Path("/sys/fs/cgroup")


class ContainerMemory:
    """Reader of a memory cgroup. Without a cgroup of version 2 it finds nothing.

    Args:
        root: Folder of the cgroup.
    """

    def __init__(self, root: Path = CGROUP) -> None:
        self._root = root
        self._kills = 0

    def begin(self) -> None:
        """Begin a round: only processes that the kernel ends after this call count."""
        self._kills = self._killed()

    def exceeded(self) -> MemoryUse | None:
        """Return the memory use if the kernel has ended a process in this round because memory ran out."""
        if self._killed() <= self._kills:
            return None
        return MemoryUse(self._read("memory.max"), self._read("memory.peak"))

    def _killed(self) -> int:
        """Return the number of processes of the cgroup that the kernel has ended because memory ran out."""
        for line in self._text("memory.events").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdecimal():
                return int(count)
        return 0

    def _read(self, name: str) -> int | None:
        """Return the number in a file. None: there is no such file, or it says "max"."""
        text = self._text(name).strip()
        return int(text) if text.isdecimal() else None

    def _text(self, name: str) -> str:
        try:
            return (self._root / name).read_text(encoding="ascii", errors="replace")
        except OSError:
            return ""
