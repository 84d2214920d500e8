"""The operator's open ports under attack, over real sockets. The tests count descriptors and threads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

import aiohttp
import pytest
from tests.support.clock import ManualClock
from tests.support.servers.flood import flood

from holdfast_core import logs
from holdfast_core.clock import SystemClock
from holdfast_operator.base.metrics import SILENT_WATCH_SECONDS, Metrics, PlainPorts

ATTACKERS = 300


@dataclass
class Bed:
    ports: PlainPorts
    metrics: Metrics
    age: float | None = 1.0
    stalled: tuple[str, ...] = ()

    async def get(self, port: str, path: str, source: str = "127.0.0.1") -> tuple[int, str]:
        number = self.ports.metrics_port if port == "metrics" else self.ports.health_port
        connector = aiohttp.TCPConnector(local_addr=(source, 0))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get(f"http://127.0.0.1:{number}{path}") as response,
        ):
            return response.status, await response.text()


@asynccontextmanager
async def opened() -> AsyncIterator[Bed]:
    metrics = Metrics()
    bed: Bed
    ports = PlainPorts(metrics, lambda: bed.age, lambda: bed.stalled, SystemClock())
    bed = Bed(ports, metrics)
    await ports.start("127.0.0.1", 0, 0)
    try:
        yield bed
    finally:
        await ports.close()


@contextmanager
def half_requests(port: int, source: str) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(ATTACKERS):
            sock = stack.enter_context(socket.socket())
            sock.bind((source, 0))
            sock.connect(("127.0.0.1", port))
            with contextlib.suppress(OSError):  # the server may have dropped it already
                sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
        yield


def run_scenario(scenario: Callable[[Bed], Awaitable[None]]) -> None:
    async def run() -> None:
        async with opened() as bed:
            await scenario(bed)

    asyncio.run(run())


@pytest.mark.fault("A client sends half requests to the operator's ports")
@pytest.mark.parametrize(("port", "path"), [("metrics", "/metrics"), ("health", "/healthz")])
@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.9"], ids=["same address", "another"])
def test_half_requests_take_neither_descriptors_nor_threads(
    port: str, path: str, source: str
) -> None:
    async def scenario(bed: Bed) -> None:
        before = set(threading.enumerate())  # a thread of an earlier test may end meanwhile
        number = bed.ports.metrics_port if port == "metrics" else bed.ports.health_port
        with half_requests(number, source):
            status, _ = await bed.get(port, path)
            assert status == 200
            assert bed.ports.connections(port) <= 129
            assert set(threading.enumerate()) <= before
            _, text = await bed.get("metrics", "/metrics")
            assert f'holdfast_connections_dropped_total{{port="{port}",reason="room"}}' in text

    run_scenario(scenario)


@pytest.mark.parametrize(("port", "path"), [("metrics", "/metrics"), ("health", "/readyz")])
def test_half_requests_from_many_addresses_blind_no_caller(port: str, path: str) -> None:
    """There are more addresses than open connections, and the attacker connects from a process of its own."""

    async def scenario(bed: Bed) -> None:
        number = bed.ports.metrics_port if port == "metrics" else bed.ports.health_port
        with flood(number, b"GET /metrics HTTP/1.1\r\n", [f"127.0.0.{n}" for n in range(2, 202)]):
            for _ in range(100):
                assert (await bed.get(port, path))[0] == 200

    run_scenario(scenario)


@pytest.mark.fault("A client floods the operator with requests that are not HTTP")
@pytest.mark.parametrize("port", ["metrics", "health"])
def test_requests_that_are_not_http_fill_no_log(
    port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """aiohttp logs a traceback with the received bytes for each of them. The log is on the node's disk,
    and an operator whose log exceeds its limit is evicted."""

    async def scenario(bed: Bed) -> None:
        number = bed.ports.metrics_port if port == "metrics" else bed.ports.health_port
        for n in range(ATTACKERS):
            reader, writer = await asyncio.open_connection("127.0.0.1", number)
            writer.write(b"GET / HTTP/1.1\r\n" + b"x" * 4000 + b"%d\r\n\r\n" % n)
            await reader.read()
            writer.close()

    root = logging.getLogger()
    own = logging.getLogger("holdfast")
    before = root.handlers[:], root.level, own.level
    try:
        logs.configure("INFO", ManualClock())  # each minute may log five lines
        run_scenario(scenario)
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        own.setLevel(before[2])
    log = capsys.readouterr().err
    assert 1 <= log.count("Error handling request") <= 5
    assert len(log) < 100_000


@pytest.mark.fault("The API server is frozen or silent")
@pytest.mark.parametrize(
    ("age", "status"),
    [(None, 503), (5.0, 200), (SILENT_WATCH_SECONDS + 1, 503)],
    ids=["not in sync", "fresh", "silent"],
)
def test_an_operator_that_sees_nothing_is_not_ready_and_not_restarted(
    age: float | None, status: int
) -> None:
    async def scenario(bed: Bed) -> None:
        bed.age = age
        assert (await bed.get("health", "/readyz"))[0] == status
        assert (await bed.get("health", "/healthz"))[0] == 200

    run_scenario(scenario)


def test_an_operator_whose_watch_stands_still_is_restarted() -> None:
    async def scenario(bed: Bed) -> None:
        bed.stalled = ("pods", "nodes")
        status, text = await bed.get("health", "/healthz")
        assert status == 503
        assert "pods, nodes" in text

    run_scenario(scenario)
