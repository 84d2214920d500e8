"""The port of metrics and probes under attack. The tests count connections and renderings."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import Any

import aiohttp
import pytest
from tests.support.clock import ManualClock
from tests.support.servers.flood import flood
from tests.support.servers.ports import silent_connections
from tests.support.sidecar.served import served
from tests.support.sidecar.waiting import until

from holdfast_sidecar.wire.server import PlainServer


class Handler:
    """The part of the sidecar behind the port. It counts renderings and records every other call."""

    def __init__(self) -> None:
        self.rendered = 0
        self.ready = True
        self.called: list[str] = []

    def metrics(self) -> bytes:
        self.rendered += 1
        return b"holdfast_something 1.0\n"

    def __getattr__(self, name: str) -> Any:
        self.called.append(name)
        raise AssertionError(name)


def plain(
    handler: Handler, **options: Any
) -> AbstractAsyncContextManager[tuple[PlainServer, int, Counter[str]]]:
    return served(
        lambda dropped: PlainServer(
            handler.metrics, lambda: handler.ready, dropped=dropped, **options
        )
    )


@pytest.mark.parametrize(("ready", "expected"), [(True, 200), (False, 503)])
async def test_readyz_answers_whether_the_ranks_train(ready: bool, expected: int) -> None:
    handler = Handler()
    handler.ready = ready
    async with plain(handler) as (_, port, _), aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/readyz") as response:
            assert response.status == expected


@pytest.mark.fault("The kubelet asks whether a pod is ready before its ranks train")
async def test_readyz_waits_for_the_first_training_only() -> None:
    """Each answer of 503 becomes a warning, but later the pod must stop being ready at once."""
    handler, clock = Handler(), ManualClock()
    handler.ready = False
    async with plain(handler, clock=clock) as (_, port, _), aiohttp.ClientSession() as session:

        async def probe(wait: int) -> int:
            async with session.get(f"http://127.0.0.1:{port}/readyz?wait={wait}") as response:
                return response.status

        impatient = asyncio.create_task(probe(10))
        await until(lambda: clock.sleepers, "the probe waits")
        clock.advance(10)
        assert await impatient == 503

        patient = asyncio.create_task(probe(10))
        await until(lambda: clock.sleepers, "the probe waits")
        handler.ready = True
        clock.advance(1)
        assert await patient == 200
        handler.ready = False
        assert await probe(10) == 503


async def test_a_probe_that_leaves_waits_no_longer() -> None:
    handler, clock = Handler(), ManualClock()
    handler.ready = False
    async with plain(handler, clock=clock) as (server, port, _):
        with ExitStack() as stack:
            request = b"GET /readyz?wait=600 HTTP/1.1\r\nHost: x\r\n\r\n"
            await asyncio.to_thread(silent_connections, stack, port, 1, request)
            await until(lambda: clock.sleepers, "the probe waits")
        await until(lambda: not server.connections, "the server has closed the connection")
        clock.advance(1)
        for _ in range(10):  # in which the handler would begin to wait again
            await asyncio.sleep(0)
        assert clock.sleepers == 0


async def test_the_end_of_the_server_answers_a_probe_that_waits() -> None:
    """It would otherwise wait for the probe, and delay the end of a sidecar whose ranks never trained."""
    handler, clock = Handler(), ManualClock()
    handler.ready = False
    async with plain(handler, clock=clock) as (server, port, _), aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{port}/readyz?wait=600"

        async def probe() -> int:
            async with session.get(url) as response:
                return response.status

        waiting = asyncio.create_task(probe())
        await until(lambda: clock.sleepers, "the probe waits")
        closing = asyncio.create_task(server.close())
        await asyncio.sleep(0)  # from its first turn on, no probe waits again
        clock.advance(1)
        assert await waiting == 503
        await closing


@pytest.mark.parametrize("wait", ["-1", "x", "9" * 30])
async def test_a_wait_that_is_no_number_is_refused(wait: str) -> None:
    async with plain(Handler()) as (_, port, _), aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/readyz?wait={wait}") as response:
            assert response.status == 400
            assert "expected a whole number" in await response.text()


async def scrape(port: int) -> str:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/metrics") as response:
            return await response.text()


@pytest.mark.fault("A client sends half requests to the metrics port")
async def test_half_requests_hold_few_descriptors_and_little_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        async with plain(Handler()) as (server, port, dropped):
            with ExitStack() as stack:
                for _ in range(10):
                    await asyncio.to_thread(
                        silent_connections, stack, port, 50, b"GET /metrics HTTP/1.1\r\n"
                    )
                    assert "holdfast_something" in await scrape(port)
                    assert server.connections <= 129
            assert dropped["metrics room"] >= 500 - 129
    assert len(caplog.records) <= 3


@pytest.mark.parametrize("end", [b"", b"Host: x\r\n\r\n"], ids=["half", "whole"])
async def test_requests_from_many_addresses_blind_neither_metrics_nor_probes(end: bytes) -> None:
    """There are more addresses than open connections, so that no count of addresses helps."""
    sources = [f"127.0.0.{number}" for number in range(2, 202)]
    async with plain(Handler()) as (_, port, _), aiohttp.ClientSession() as session:
        with flood(port, b"GET /metrics HTTP/1.1\r\n" + end, sources):
            for _ in range(60):
                assert "holdfast_something" in await scrape(port)
                async with session.get(f"http://127.0.0.1:{port}/readyz") as response:
                    assert response.status == 200


async def test_a_half_request_ends_after_its_time() -> None:
    async with plain(Handler()) as (_, port, _):
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            (sock,) = silent_connections(stack, port, 1, b"GET /metrics HTTP/1.1\r\nX: ")
            assert await loop.sock_recv(sock, 1) == b""


@pytest.mark.fault("A client floods the metrics port with scrapes")
async def test_a_flood_of_scrapes_renders_little() -> None:
    handler, clock = Handler(), ManualClock()
    async with plain(handler, clock=clock) as (_, port, _):
        await asyncio.gather(*(scrape(port) for _ in range(16)))
        assert handler.rendered == 1
        clock.advance(1.0)
        await asyncio.gather(*(scrape(port) for _ in range(16)))
        assert handler.rendered == 2


@pytest.mark.fault("A stranger sends requests to the open port")
async def test_no_request_on_the_open_port_changes_anything() -> None:
    handler = Handler()
    async with plain(handler) as (_, port, _), aiohttp.ClientSession() as session:
        for path in ("/flushed", "/v1/inventory", "/v1/seal", "/"):
            for method in ("GET", "POST"):
                url = f"http://127.0.0.1:{port}{path}"
                async with session.request(method, url) as response:
                    assert response.status == 404
    assert handler.called == []
