"""The operator as a process, and what it uses of this machine."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.support.operator.operator_account import OperatorAccount
from tests.support.servers.ports import free_port

_TICKS = os.sysconf("SC_CLK_TCK")


class OperatorProcess:
    """One operator process, from `start` to `kill`.

    Args:
        namespace: The namespace that it watches.
        lease: Name of its lease. Two processes with different leases both lead.
    """

    def __init__(
        self, account: OperatorAccount, namespace: str, log: Path, lease: str = "holdfast"
    ) -> None:
        self._account = account
        self._namespace = namespace
        self._log = log
        self._lease = lease
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {
            **os.environ,
            **self._account.environment(),
            "KUBECONFIG": str(self._account.kubeconfig),
            "HOLDFAST_WATCH_NAMESPACES": self._namespace,
            "HOLDFAST_POD_NAME": f"operator-{self._lease}",
            "HOLDFAST_LEASE_NAME": self._lease,
            "HOLDFAST_METRICS_PORT": str(self._port),
            "HOLDFAST_HEALTH_PORT": str(free_port()),
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "holdfast_operator"],
                env=environment,
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def cpu_seconds(self) -> float:
        """Return the processor time that the process has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def memory_mib(self) -> tuple[float, float]:
        """Return the resident memory now and at its peak."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        now, peak = (
            re.search(rf"^{name}:\s+(\d+) kB", status, re.M) for name in ("VmRSS", "VmHWM")
        )
        assert now is not None and peak is not None
        return int(now[1]) / 1024, int(peak[1]) / 1024

    async def metric(self, name: str) -> float:
        """Return the sum of all series of this metric. 0 while the process does not answer."""
        return await asyncio.to_thread(self._metric, name)

    def _metric(self, name: str) -> float:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._port}/metrics", timeout=5
            ) as page:
                text = page.read().decode()
        except OSError:
            return 0.0
        found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? ([0-9.e+-]+)$", text, re.M)
        return sum(map(float, found))
