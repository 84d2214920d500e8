"""What tests of the SDK share."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint import places


@pytest.fixture(autouse=True)
def _default_signal_handlers() -> Iterator[None]:
    """Fail in the test that leaves a Checkpointer's handler behind, not in one that runs later."""
    yield
    gc.collect()
    left = {
        name: signal.getsignal(name)
        for name, default in (
            (signal.SIGTERM, signal.SIG_DFL),
            (signal.SIGINT, signal.default_int_handler),
        )
        if signal.getsignal(name) is not default
    }
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert not left


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shared memory of this test's own: others run at the same time and use the machine's."""
    directory = tmp_path / "shm"
    directory.mkdir()
    monkeypatch.setattr(places, "SHARED_MEMORY", directory)
    return directory
