"""Which ranks the sidecar waits for when it ends them at a seal, and which end with their launcher."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.clock import ManualClock
from tests.support.shards.builders import JOB_UID
from tests.support.sidecar import FakeLauncher, until
from tests.support.sidecar.contracts import contract_with
from tests.support.sidecar.rounds import accepted, round_message

from holdfast_core.clock import Clock, SystemClock
from holdfast_core.ids import Rank, RestartRound, Worker
from holdfast_core.messages.schema import PROTOCOL_VERSION, Hello, HelloReply, LauncherPlan
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.gang.starter import Starter
from holdfast_sidecar.gang.state import LocalGang
from holdfast_sidecar.wire.client import Peers
from holdfast_sidecar.wire.intake import Intake, LocalConnection, LocalConnections

STATE = RoundState(Worker(0), 1, RestartRound(1), "gpt-0-r0")


class Handler:
    """A LocalHandler that passes the launcher's messages to the starter."""

    starter: Starter

    @property
    def state(self) -> RoundState:
        return STATE

    def hello(self, connection: LocalConnection) -> HelloReply:
        return HelloReply(STATE.round)

    def gone(self, connection: LocalConnection) -> None:
        self.starter.gone(connection)

    async def request(self, connection: LocalConnection, message: object) -> object:
        raise AssertionError(message)

    def notify(self, connection: LocalConnection, message: object) -> None:
        self.starter.reported(message)  # type: ignore[arg-type]


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a directory with a short path: a Unix socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


class Silent(FakeLauncher):
    """A launcher that receives plans and does not reply."""

    def _obey(self, message: object) -> None:
        return


class World:
    """A starter behind a real socket, which runs ranks of round `running`."""

    def __init__(
        self, shared: Path, state: RoundState, running: int | None, clock: Clock, **settings: float
    ) -> None:
        self.settings = Settings(contract_with(shared_dir=str(shared)), **settings)  # type: ignore[arg-type]
        self.gang = LocalGang(1)
        self.gang.running_round = None if running is None else RestartRound(running)
        self.connections = LocalConnections()
        self.current = CurrentRound(state)
        handler = Handler()
        self.intake = Intake(self.settings.socket_path, JOB_UID, handler, self.connections)
        peers = Peers(self.settings.contract, None, lambda: state, call_seconds=1)  # type: ignore[arg-type]
        handler.starter = self.starter = Starter(
            Pod(self.settings, clock, self.current),
            self.gang,
            self.connections,
            peers,
            restored=lambda: True,
            on_change=lambda: None,
        )

    async def launcher(self, kind: type[FakeLauncher] = FakeLauncher) -> FakeLauncher:
        """Return a launcher that is connected."""
        launcher = kind(self.settings.socket_path, JOB_UID)
        await launcher.connect()
        return launcher


@pytest.mark.parametrize(
    ("kind", "running", "end_seconds", "expected"),
    [
        pytest.param(None, None, 120.0, True, id="no launcher"),
        pytest.param(FakeLauncher, 0, 120.0, True, id="it ends its ranks"),
        pytest.param(Silent, 0, 0.3, False, id="it does not answer"),
        pytest.param(Silent, None, 120.0, True, id="it runs nothing and is busy"),
    ],
)
async def test_ends_the_ranks_of_older_rounds(
    shared: Path,
    kind: type[FakeLauncher] | None,
    running: int | None,
    end_seconds: float,
    expected: bool,
) -> None:
    world = World(shared, STATE, running, SystemClock(), end_seconds=end_seconds)
    await world.intake.start()
    launcher = None if kind is None else await world.launcher(kind)
    assert await world.starter.end_ranks(RestartRound(1)) is expected
    if launcher is not None:
        await until(lambda: LauncherPlan(RestartRound(1)) in launcher.pushed, "the plan")
        launcher.close()
    await world.intake.close()


async def test_ranks_of_the_sealed_round_itself_are_not_ended(shared: Path) -> None:
    """A sidecar that has restarted is sealed again for its round, whose ranks train on or have returned."""
    world = World(shared, STATE, 1, SystemClock(), end_seconds=120.0)
    await world.intake.start()
    launcher = await world.launcher(Silent)
    assert await world.starter.end_ranks(RestartRound(1))
    assert launcher.pushed == []
    launcher.close()
    await world.intake.close()


@pytest.mark.parametrize(
    ("is_back", "dead"),
    [
        pytest.param(True, set(), id="it is back in a moment"),
        pytest.param(False, {Rank(0)}, id="it stays away"),
    ],
)
async def test_ranks_are_dead_when_their_launcher_stays_away(
    shared: Path, is_back: bool, dead: set[Rank]
) -> None:
    clock = ManualClock()
    world = World(shared, accepted(round_message(1, workers=1)), 1, clock)
    await world.intake.start()
    (await world.launcher()).close()
    await until(lambda: clock.sleepers, "the end of the connection")
    back = await world.launcher() if is_back else None
    clock.advance(world.settings.launcher_grace_seconds)
    for _ in range(20):  # the watch of the launcher runs to its end
        await asyncio.sleep(0)
    assert world.gang.dead.keys() == dead
    assert world.gang.running_round == (1 if is_back else None)
    if back is not None:
        back.close()
    await world.intake.close()


@pytest.mark.fault("A launcher connects again while its sidecar is being sealed for the next round")
async def test_a_launcher_that_connects_during_a_seal_does_not_run_the_old_round(
    shared: Path,
) -> None:
    state = accepted(round_message(1, workers=1))
    world = World(shared, state, None, SystemClock())
    await world.intake.start()
    launcher = await world.launcher()
    world.starter.begin()
    await launcher.runs(1)
    launcher.close()
    await until(lambda: world.connections.launcher is None, "the end of the connection")

    world.current.state = state.sealed_for(RestartRound(2))
    again = await world.launcher()
    world.starter.hello(Hello(PROTOCOL_VERSION, JOB_UID))
    await until(lambda: again.pushed, "the plan")
    assert [(plan.round, plan.run) for plan in again.pushed] == [(2, None)]
    again.close()
    await world.intake.close()


async def test_a_launcher_sends_its_state_again_when_the_round_begins(shared: Path) -> None:
    """Each plan is answered with the state, also where another worker hosts the store."""
    state = accepted(round_message(1, store_host=Worker(1)))
    world = World(shared, state, 1, SystemClock())
    await world.intake.start()
    launcher = await world.launcher()
    world.starter.begin()
    await until(lambda: launcher.pushed, "the plan")
    assert launcher.pushed == [LauncherPlan(RestartRound(1))]
    launcher.close()
    await world.starter.reset()
    await world.intake.close()


async def test_a_launcher_is_released_in_the_round_of_the_plan_only(shared: Path) -> None:
    state = accepted(round_message(1))
    world = World(shared, state, 1, SystemClock())
    await world.intake.start()
    launcher = await world.launcher(Silent)
    for _ in range(2):
        world.starter.release(RestartRound(1))
    world.starter.push_plan()
    world.current.state = state.sealed_for(RestartRound(2))
    world.starter.push_plan()
    await until(lambda: len(launcher.pushed) == 3, "the plans")
    assert [(p.round, p.released) for p in launcher.pushed] == [(1, True), (1, True), (2, False)]
    launcher.close()
    await world.intake.close()
