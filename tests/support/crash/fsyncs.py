"""The calls of fsync in this process, for tests of what is durable before it is relied on.

The crash tests cut the power after each call of a whole program. These calls show the same in milliseconds
for one function.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def recorded_fsyncs(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the list to which each later fsync adds the path that its file or directory has then."""
    real, found = os.fsync, list[Path]()

    def fsync(descriptor: int) -> None:
        found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return found
