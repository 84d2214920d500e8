"""The leases of all nodes, renewed by a process of its own.

Real kubelets are independent of each other. In the process that plays pods and sidecars, renewals waited for
minutes while it started thousands of pods, and nodes that were not lost counted as lost.

The process reads lines from its standard input. Each is a JSON list of the nodes whose leases it renews from
then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from holdfast_operator.kube.api import ApiError, KubeApi, from_kubeconfig
from holdfast_operator.watch.cache import LEASES_PATH

LEASE_SECONDS = 10.0
"""Time between two renewals of a node's lease, as kubelets have it."""
_RENEWERS = 32
_LINE_LIMIT = 2**24
"""Longest line in bytes: the names of a million nodes."""


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class LeaseProcess:
    """The process that renews leases, from `start` to `kill`."""

    def __init__(self, kubeconfig: Path) -> None:
        self._command = [sys.executable, "-m", "benchmarks.scale.leases", str(kubeconfig)]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, text=True)

    def renew(self, nodes: Iterable[str]) -> None:
        """Renew the leases of these nodes only from now on."""
        assert self._process is not None and self._process.stdin is not None
        print(json.dumps(list(nodes)), file=self._process.stdin, flush=True)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class _Renewal:
    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._nodes: dict[str, None] = {}

    async def run(self) -> None:
        """Renew leases until the standard input ends."""
        reader = asyncio.StreamReader(limit=_LINE_LIMIT)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        tasks = [asyncio.create_task(self._renew(part)) for part in range(_RENEWERS)]
        while line := await reader.readline():
            self._nodes = dict.fromkeys(json.loads(line))
        for task in tasks:
            task.cancel()

    async def _renew(self, part: int) -> None:
        """Renew the leases of a part of the nodes, evenly over LEASE_SECONDS."""
        loop = asyncio.get_running_loop()
        while True:
            begun, names = loop.time(), list(self._nodes)[part::_RENEWERS]
            for number, name in enumerate(names):
                if name in self._nodes:  # it may have been cut off meanwhile
                    with contextlib.suppress(ApiError):
                        await self._api.patch(
                            f"{LEASES_PATH}/{name}", {"spec": {"renewTime": now()}}
                        )
                due = begun + LEASE_SECONDS * (number + 1) / len(names)
                await asyncio.sleep(max(0.0, due - loop.time()))
            if not names:
                await asyncio.sleep(1.0)


async def _main(kubeconfig: Path) -> None:
    api = KubeApi(from_kubeconfig(kubeconfig))
    await api.start()
    try:
        await _Renewal(api).run()
    finally:
        await api.close()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))
