"""What tests of the SDK share."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint import places


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shared memory of this test's own: others run at the same time and use the machine's."""
    directory = tmp_path / "shm"
    directory.mkdir()
    monkeypatch.setattr(places, "SHARED_MEMORY", directory)
    return directory
