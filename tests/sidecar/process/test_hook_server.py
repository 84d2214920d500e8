"""What the preStop hook waits for."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.clock import ManualClock
from tests.support.hang import HANG_SECONDS

from holdfast_core.shm.shared_files import connect_unix
from holdfast_sidecar.base.settings import HOOKS_SOCKET
from holdfast_sidecar.process.hook_server import HookServer
from holdfast_sidecar.process.hooks import FLUSHED


class Flush:
    """A flush, as the server sees it."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_stuck = False
        self._looked = asyncio.Event()

    def done(self) -> bool:
        self._looked.set()
        return self.is_done

    async def seen(self) -> None:
        """Wait until the server has looked twice: one look has then seen the present state."""
        for _ in range(2):
            self._looked.clear()
            await self._looked.wait()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a directory with a short path: a Unix socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.fault("All pods of a job are deleted at once while a flush waits for peers")
@pytest.mark.parametrize(
    ("stuck", "expected"),
    [
        pytest.param(True, b"", id="the other pods are gone"),
        pytest.param(False, FLUSHED, id="a large shard is being sent"),
    ],
)
async def test_a_flush_is_given_up_only_if_nothing_moves(
    folder: Path, stuck: bool, expected: bytes
) -> None:
    flush, clock = Flush(), ManualClock()
    server = HookServer(folder, flush.done, lambda: flush.is_stuck, clock)
    await server.start()
    with connect_unix(folder, HOOKS_SOCKET, timeout_seconds=HANG_SECONDS) as client:
        answer = asyncio.ensure_future(asyncio.to_thread(client.recv, len(FLUSHED)))
        await flush.seen()
        flush.is_stuck = stuck
        await flush.seen()
        clock.advance(3600.0)
        if not stuck:
            await flush.seen()
            flush.is_done = True
        assert await answer == expected
    assert server.gave_up is stuck
    await server.close()
