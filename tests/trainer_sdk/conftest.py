"""Fixtures that the SDK's tests share."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.watched_sidecar import WatchedSidecar
from tests.support.zygote.persisters import forked_persisters

from holdfast.places import pod, slot_directory


def _handlers_left() -> dict[str, object]:
    """Return the signal handlers that are not Python's own, by signal."""
    defaults = {"SIGTERM": signal.SIG_DFL, "SIGINT": signal.default_int_handler}
    found = {name: signal.getsignal(getattr(signal, name)) for name in defaults}
    return {name: handler for name, handler in found.items() if handler is not defaults[name]}


@pytest.fixture(autouse=True)
def _default_signal_handlers() -> Iterator[None]:
    """Fail in the test that leaves a Checkpointer's handler behind, not in one that runs later."""
    yield
    if _handlers_left():
        gc.collect()  # a Checkpointer that is collected restores the earlier handlers
    left = _handlers_left()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert not left


@pytest.fixture(autouse=True)
def persister_starts() -> Iterator[None]:
    """Fork persisters. A test of their start overrides this fixture."""
    with forked_persisters():
        yield


@pytest.fixture(autouse=True)
def _patience() -> Iterator[None]:
    """Wait for the sidecar as long as a busy machine may need. Without a connection, saves fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pod, "_FIRST_CONNECT_SECONDS", HANG_SECONDS)
        yield


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a directory of the test's own for shared memory, because tests run at the same time."""
    directory = tmp_path / "shm"
    directory.mkdir()
    monkeypatch.setattr(slot_directory, "SHARED_MEMORY", directory)
    return directory


@pytest.fixture
def interval_steps() -> int:
    """Return the interval of the policy that `sidecar` sends. A module overrides this for another one."""
    return 2


@pytest.fixture
def sidecar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval_steps: int
) -> Iterator[WatchedSidecar]:
    """Run a WatchedSidecar, and set the environment of a rank in its pod."""
    with WatchedSidecar(
        tmp_path / "shared", tmp_path / "node", interval_steps=interval_steps
    ) as fake:
        for name, value in fake.environment(HOLDFAST_ROUND="0").items():
            monkeypatch.setenv(name, value)
        yield fake
