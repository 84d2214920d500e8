"""The order in which a sidecar opens and closes its components, and the clean-up after a failed start."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.servers.pki import Authority
from tests.support.shards.builders import JOB_UID
from tests.support.sidecar.contracts import contract_with

from holdfast_core.clock import SystemClock
from holdfast_core.errors import ConfigError
from holdfast_core.net import peer_dns_name
from holdfast_sidecar.base.settings import PORTS_FILE, Settings
from holdfast_sidecar.base.telemetry import Metrics
from holdfast_sidecar.process.app import start_sidecar

OPENED = [
    "Pools.close",
    "BulkServing.close",
    "ControlServer.close",
    "PlainServer.close",
    "Peers.close",
    "IncomingCopies.close",
    "Verifier.close",
    "Pruner.close",
    "ManifestRequests.close",
    "Lifecycle.close",
    "Flow.reset",
    "Rehydrator.reset",
    "Starter.reset",
    "Reporter.close",
    "Follower.close",
    "HookServer.close",
    "Scrubber.close",
    "Intake.close",
]
"""The methods that close the components, in the order of start. The pod's socket is last, because ranks
can save as soon as it is open."""


class RecordingStack(AsyncExitStack):
    """An exit stack that records the names of the registered and of the executed callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.registered: list[str] = []
        self.closed: list[str] = []

    def callback(self, callback: Any, /, *args: Any, **kwargs: Any) -> Any:
        name = self._register(callback, args)

        def closing() -> None:
            self.closed.append(name)
            callback(*args, **kwargs)

        return super().callback(closing)

    def push_async_callback(self, callback: Any, /, *args: Any, **kwargs: Any) -> Any:
        name = self._register(callback, args)

        async def closing() -> None:
            self.closed.append(name)
            await callback(*args, **kwargs)

        return super().push_async_callback(closing)

    def _register(self, callback: Callable[..., object], args: tuple[Any, ...]) -> str:
        """Record the name of the method and return it. A blocking method is the first argument of a pool's
        `run`."""
        name = (args[0] if args else callback).__qualname__
        self.registered.append(name)
        return name


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    for name in ("shared", "node"):
        (tmp_path / name).mkdir()
    certs = Authority().write_leaf(tmp_path / "certs", peer_dns_name("gpt-0-r0", JOB_UID))
    contract = contract_with(
        shared_dir=str(tmp_path / "shared"),
        node_dir=str(tmp_path / "node"),
        certs_dir=str(certs),
        control_port=0,
        bulk_port=0,
        metrics_port=0,
    )
    return Settings(contract)


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return False
    return True


@pytest.mark.fault("A bulk server closes while it accepts a connection")
async def test_everything_is_closed_in_the_reverse_order(settings: Settings) -> None:
    async with RecordingStack() as stack:
        await start_sidecar(settings, SystemClock(), Metrics(), stack)
        ports = json.loads((settings.node_dir / PORTS_FILE).read_text())
        assert all(is_open(port) for port in ports.values())
        assert settings.socket_path.exists()
        assert stack.registered == OPENED
    assert stack.closed == OPENED[::-1]
    assert not any(is_open(port) for port in ports.values())


@pytest.mark.fault("The start of a sidecar fails midway")
async def test_a_start_that_fails_closes_what_it_opened(settings: Settings) -> None:
    """The metrics port is in use, so the servers before it close and no rank can connect."""
    with socket.create_server(("0.0.0.0", 0)) as taken:
        contract = contract_with(
            shared_dir=settings.contract.shared_dir,
            node_dir=settings.contract.node_dir,
            certs_dir=settings.contract.certs_dir,
            control_port=0,
            bulk_port=0,
            metrics_port=taken.getsockname()[1],
        )
        stack = RecordingStack()
        with pytest.raises((ConfigError, OSError)):
            async with stack:
                await start_sidecar(Settings(contract), SystemClock(), Metrics(), stack)
    assert stack.closed == ["ControlServer.close", "BulkServing.close", "Pools.close"]
    assert not settings.socket_path.exists()
