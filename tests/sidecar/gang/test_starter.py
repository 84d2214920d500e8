"""Which ranks the sidecar waits for when it ends them at a seal."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.shards.builders import JOB_UID
from tests.support.sidecar import FakeLauncher, until
from tests.support.sidecar.contracts import contract_with

from holdfast_core.clock import SystemClock
from holdfast_core.ids import RestartRound, Worker
from holdfast_core.messages.schema import End, HelloReply
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.gang.starter import Starter
from holdfast_sidecar.gang.state import LocalGang
from holdfast_sidecar.wire.client import Peers
from holdfast_sidecar.wire.intake import Connection, Intake, LocalConnections

STATE = RoundState(Worker(0), 1, RestartRound(1))


class Handler:
    """A LocalHandler that passes the launcher's messages to the starter."""

    starter: Starter

    @property
    def state(self) -> RoundState:
        return STATE

    def hello(self, connection: Connection) -> HelloReply:
        return HelloReply(STATE.round)

    def gone(self, connection: Connection) -> None:
        self.starter.gone(connection)

    async def request(self, connection: Connection, message: object) -> object:
        raise AssertionError(message)

    def notify(self, connection: Connection, message: object) -> None:
        self.starter.ended(message.round)  # type: ignore[attr-defined]


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a directory with a short path: a Unix socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


class Silent(FakeLauncher):
    """A launcher that receives End and does not reply."""

    def _obey(self, message: object) -> None:
        return


@pytest.mark.parametrize(
    ("kind", "running", "expected"),
    [
        pytest.param(None, None, True, id="no launcher"),
        pytest.param(FakeLauncher, 0, True, id="it ends its ranks"),
        pytest.param(Silent, 0, False, id="it does not answer"),
        pytest.param(Silent, None, True, id="it runs nothing and is busy"),
    ],
)
async def test_end_ranks(
    shared: Path, kind: type[FakeLauncher] | None, running: int | None, expected: bool
) -> None:
    settings = Settings(contract_with(shared_dir=str(shared)), end_seconds=0.3)
    handler = Handler()
    connections = LocalConnections()
    intake = Intake(settings.socket_path, JOB_UID, handler, connections)
    gang = LocalGang(Worker(0))
    gang.running_round = None if running is None else RestartRound(running)
    peers = Peers(settings.contract, None, lambda: STATE, call_seconds=1)  # type: ignore[arg-type]
    handler.starter = Starter(
        Pod(settings, SystemClock(), CurrentRound(STATE)),
        gang,
        connections,
        peers,
        restored=lambda: True,
        on_change=lambda: None,
    )
    await intake.start()
    launcher = None if kind is None else kind(settings.socket_path, JOB_UID)
    if launcher is not None:
        await launcher.connect()
    assert await handler.starter.end_ranks(RestartRound(1)) is expected
    if launcher is not None:
        await until(lambda: End(RestartRound(1)) in launcher.pushed, "End")
        launcher.close()
    await intake.close()
