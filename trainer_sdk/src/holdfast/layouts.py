"""Layout documents in the shared directory: `Stage` names one by its digest, the other side reads it."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.state.snapshot import SavePlan
from holdfast_core.format.digest import hex_of


class LayoutFiles:
    """Written once a structure; seen whole or not at all."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: set[str] = set()

    def ensure(self, plan: SavePlan) -> None:
        """The plan's document is there when this returns. Raises OSError."""
        name = f"{hex_of(plan.layout_digest)}.json"
        path = self._directory / name
        if name in self._written and path.exists():
            return
        self._directory.mkdir(mode=0o2770, parents=True, exist_ok=True)
        temporary = self._directory / f".{name}.{os.getpid()}.tmp"
        temporary.write_bytes(plan.layout)
        temporary.chmod(0o660)
        temporary.replace(path)
        self._written.add(name)
