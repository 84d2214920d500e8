"""The operator process as kopf runs it: its requests to the API server, its end, and its exit code."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.support import zygote
from tests.support.hang import HANG_SECONDS
from tests.support.servers.ports import free_port

from holdfast_operator.kube.api import USER_AGENT

PROGRAM = """
import runpy, sys
from kopf._cogs.aiokits import aiotasks

async def wait(tasks, *, timeout=None, **options):
    found = await kopfs_wait(tasks, timeout=timeout, **options)
    if timeout is not None and found[1]:
        print(f"kopf has waited for {timeout} s in vain", file=sys.stderr, flush=True)
    return found

kopfs_wait, aiotasks.wait = aiotasks.wait, wait
runpy.run_module("holdfast_operator", run_name="__main__", alter_sys=True)
"""
"""The operator, which also says when kopf has waited for tasks at the end: for them it would wait 5 s."""


class AbsentServer:
    """An API server that answers 503 to every request, and the callers and paths that it has seen."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        calls = self.calls

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                calls.append((self.headers["User-Agent"], self.path))
                self.send_response(503)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[AbsentServer]:
    found = AbsentServer()
    yield found
    found.close()


@pytest.fixture
def environment(server: AbsentServer, tmp_path: Path) -> dict[str, str]:
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    (tmp_path / "config").write_text(json.dumps(config))
    return {
        "KUBECONFIG": str(tmp_path / "config"),
        "HOLDFAST_SIDECAR_IMAGE": "example/sidecar:1",
        "HOLDFAST_OPERATOR_NAMESPACE": "holdfast-system",
        "HOLDFAST_LEASE_NAME": "holdfast",
        "HOLDFAST_POD_NAME": "operator-0",
        "HOLDFAST_METRICS_PORT": str(free_port()),
        "HOLDFAST_HEALTH_PORT": str(free_port()),
    }


def start(environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return zygote.Popen(
            [sys.executable, "-c", PROGRAM], env=environment, stderr=file, stdout=file
        )


def wait_alive(port: str) -> None:
    until = time.monotonic() + HANG_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz") as reply:
                assert reply.status == 200
                return
        except OSError:
            assert time.monotonic() < until, "the operator never answered its liveness probe"
            time.sleep(0.05)


def test_kopf_sends_no_request_and_a_signal_ends_the_process_at_once(
    server: AbsentServer, environment: dict[str, str], tmp_path: Path
) -> None:
    process = start(environment, tmp_path / "log")
    try:
        wait_alive(environment["HOLDFAST_HEALTH_PORT"])
        until = time.monotonic() + HANG_SECONDS
        while not server.calls:
            assert time.monotonic() < until, "the operator called nothing"
            time.sleep(0.05)
        time.sleep(1)  # kopf would call while the reflectors wait for their second attempt
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=HANG_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
    assert {caller for caller, _ in server.calls} == {USER_AGENT}
    log = (tmp_path / "log").read_text()
    assert "a signal ends the operator" in log and "operator ends" in log
    assert "kopf" not in log


def test_a_start_that_fails_ends_the_process_at_once(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """By default kopf keeps the process and starts its parts again a minute later."""
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = start(environment | {"HOLDFAST_HEALTH_PORT": port}, tmp_path / "log")
        try:
            assert process.wait(timeout=HANG_SECONDS) == 1
        finally:
            process.kill()
            process.wait()
    log = (tmp_path / "log").read_text()
    assert "in vain" not in log
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line["message"] for line in lines] == ["the operator's work ended", "operator ends"]
    assert "Address already in use" in lines[0]["exception"]
