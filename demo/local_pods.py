"""Pods of the local demo: a sidecar and a launcher as processes, supervised as by a kubelet.

Each pod has its own shared folder (tmpfs) and node folder. Deleting a pod kills both processes and deletes
both folders, as the deletion of a pod with emptyDirs does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from holdfast_core.contract import PodContract, SidecarContract
from holdfast_core.ids import JobUid, RestartRound, Worker

_STOP_SECONDS = 120
"""Time in which the ranks of an evicted pod save and stop. It is longer than they need on a busy machine."""


@dataclass(frozen=True, slots=True)
class PodSpec:
    name: str
    uid: str
    job_uid: JobUid
    job: str
    namespace: str
    worker: Worker
    birth_round: RestartRound
    store: str
    """StoreConfig as JSON; empty without an object tier."""
    node_capacity_bytes: int
    """sizeLimit of the node volume, as in a real pod: other files on this disk do not count."""
    command: tuple[str, ...]
    """Command of the trainer container."""
    memory_root: Path
    """Folder on tmpfs for the shared folders of pods."""
    disk_root: Path
    certs: Path
    keys: Path
    log_folder: Path
    workdir: Path


@dataclass(slots=True)
class LocalPod:
    """One pod, whose `phase` becomes "Succeeded" when its trainer exits with code 0."""

    spec: PodSpec
    phase: str = "Running"
    exit_code: int | None = None
    trainer_restarts: int = 0
    sidecar_restarts: int = 0
    terminating: bool = False
    sidecar: subprocess.Popen[bytes] | None = None
    trainer: subprocess.Popen[bytes] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _supervisor: threading.Thread | None = None

    @property
    def shared(self) -> Path:
        return self.spec.memory_root / self.spec.name

    @property
    def node(self) -> Path:
        return self.spec.disk_root / self.spec.name

    def start(self) -> None:
        """Start both containers, unless the pod was deleted before."""
        with self._lock:
            if self.terminating:
                return
            self.shared.mkdir(parents=True, exist_ok=True)
            self.node.mkdir(parents=True, exist_ok=True)
            self.sidecar = self._start_sidecar()
            self.trainer = self._start_trainer()
            self._supervisor = threading.Thread(target=self._supervise, daemon=True)
            self._supervisor.start()

    def address(self) -> str | None:
        """Return `ip:control:bulk`, or None until the sidecar has bound its ports."""
        try:
            ports = json.loads((self.node / "ports.json").read_text())
        except (OSError, ValueError):
            return None
        return f"127.0.0.1:{ports['control']}:{ports['bulk']}"

    def metrics_port(self) -> int | None:
        try:
            return int(json.loads((self.node / "ports.json").read_text())["metrics"])
        except (OSError, ValueError, KeyError):
            return None

    def rank_pids(self) -> list[int]:
        """Return the process ids of the pod's ranks: they have its shared folder's files in their memory."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                name = (entry / "comm").read_text().strip()
                maps = (entry / "maps").read_text()
            except OSError:
                continue
            if name.startswith("holdfast-rank") and f"{self.shared}/" in maps:
                found.append(int(entry.name))
        return found

    def delete(self) -> None:
        """Send SIGKILL to both containers and delete the volumes."""
        with self._lock:
            self.terminating = True
        for process in (self.trainer, self.sidecar):
            _kill_tree(process)
        shutil.rmtree(self.shared, ignore_errors=True)
        shutil.rmtree(self.node, ignore_errors=True)

    def evict(self, grace_seconds: float) -> None:
        """End the pod as a kubelet does after an eviction, and delete its volumes.

        The trainer gets SIGTERM, and the preStop hook of the sidecar begins at the same moment. The sidecar
        gets SIGTERM after both have ended. What still runs after the grace period gets SIGKILL.
        """
        deadline = time.monotonic() + grace_seconds
        with self._lock:
            self.terminating = True
            trainer, sidecar = self.trainer, self.sidecar
        assert trainer is not None
        assert sidecar is not None
        hook = self._spawn(
            "hook",
            [
                sys.executable,
                "-m",
                "holdfast_sidecar",
                "pre-stop",
                "--timeout",
                f"{grace_seconds:.0f}",
            ],
            {"HOLDFAST_NODE_DIR": str(self.node)},
        )
        trainer.send_signal(signal.SIGTERM)
        _wait(trainer, deadline)
        self.exit_code = trainer.poll()
        _wait(hook, deadline)
        sidecar.send_signal(signal.SIGTERM)
        _wait(sidecar, deadline)
        _kill_tree(hook)
        self.delete()

    def output(self) -> str:
        try:
            return (self.spec.log_folder / f"{self.spec.name}.trainer.log").read_text()
        except OSError:
            return ""

    # ------------------------------------------------------------ processes

    def _start_sidecar(self) -> subprocess.Popen[bytes]:
        contract = SidecarContract(
            job_uid=self.spec.job_uid,
            job=self.spec.job,
            namespace=self.spec.namespace,
            worker=self.spec.worker,
            birth_round=self.spec.birth_round,
            procs_per_worker=1,
            shared_dir=str(self.shared),
            pod_name=self.spec.name,
            pod_ip="127.0.0.1",
            node_dir=str(self.node),
            node_capacity_bytes=self.spec.node_capacity_bytes,
            certs_dir=str(self.spec.certs),
            store_dir=str(self.spec.keys),
            store=self.spec.store,
            control_port=0,
            bulk_port=0,
            metrics_port=0,
        )
        return self._spawn(
            "sidecar", [sys.executable, "-m", "holdfast_sidecar", "serve"], contract.to_env()
        )

    def _start_trainer(self) -> subprocess.Popen[bytes]:
        contract = PodContract(
            job_uid=self.spec.job_uid,
            job=self.spec.job,
            namespace=self.spec.namespace,
            worker=self.spec.worker,
            birth_round=self.spec.birth_round,
            procs_per_worker=1,
            shared_dir=str(self.shared),
            stop_seconds=_STOP_SECONDS,
        )
        return self._spawn("trainer", list(self.spec.command), contract.to_env())

    def _spawn(
        self, container: str, command: list[str], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        path = self.spec.log_folder / f"{self.spec.name}.{container}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as log:
            return subprocess.Popen(
                command,
                env={**os.environ, **environment, "POD_IP": "127.0.0.1", "OMP_NUM_THREADS": "1"},
                cwd=self.spec.workdir,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _supervise(self) -> None:
        """Restart containers as a kubelet does.

        The trainer is restarted after a failure. The sidecar is restarted after any exit, until the trainer
        has succeeded.
        """
        while True:
            time.sleep(0.1)
            with self._lock:
                if self.terminating or self.trainer is None or self.sidecar is None:
                    return
                code = self.trainer.poll()
                if code == 0:
                    self.phase, self.exit_code = "Succeeded", 0
                    self.sidecar.send_signal(signal.SIGTERM)
                    return
                if code is not None:
                    self.trainer_restarts += 1
                    self.trainer = self._start_trainer()
                if self.sidecar.poll() is not None:
                    self.sidecar_restarts += 1
                    self.sidecar = self._start_sidecar()


def _wait(process: subprocess.Popen[bytes], deadline: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))


def _kill_tree(process: subprocess.Popen[bytes] | None) -> None:
    """Send SIGKILL to all processes of a container: `process` and its descendants."""
    if process is None:
        return
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    doomed, queue = [], [process.pid]
    while queue:
        pid = queue.pop()
        doomed.append(pid)
        queue.extend(children.get(pid, []))
    for pid in doomed:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
