"""Stage of the demo as local processes: no cluster, no root, and a directory as the object store.

The product's operator code (`decide`, `apply`) decides. The product's sidecar stores, copies and restores.
The example trainer runs under the product's launcher. Only the cluster is simulated (local_cluster.py). The
loss of a node is simulated by a pod whose processes are killed.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from testbed.driver import metrics
from testbed.driver.digests import find_digests
from tests.support.servers.pki import Authority

from demo.local_cluster import LocalCluster, Place
from demo.recorder import Act, Recovery, Sample
from demo.waits import DemoFailed, wait_while_moving
from holdfast_core.api import ObjectMeta, TrainingJob, TrainingJobSpec, changed
from holdfast_core.clock import SystemClock
from holdfast_core.contract import StoreConfig
from holdfast_core.ids import Worker
from holdfast_operator.model.job import StoreView

ROOT = Path(__file__).resolve().parents[1]
WORKERS = 4
STEPS = 160
INTERVAL = 10
OBJECT_EVERY = 20
TRAIN = ROOT / "examples/gpt"


SLEEP_PER_STEP = 0.05


def memory_of(folder: Path) -> Path:
    """Return the folder for the shared memory of the pods of a demo in `folder`.

    It is the same for each run, so that the next one deletes what an interrupted one has left.
    """
    tmpfs = Path("/dev/shm")
    root = tmpfs if tmpfs.is_dir() else Path(tempfile.gettempdir())
    name = hashlib.sha256(f"{os.getuid()} {folder}".encode()).hexdigest()[:10]
    return root / f"holdfast-demo-{name}"


def _command(steps: int, launcher: Sequence[str], arguments: Sequence[str]) -> tuple[str, ...]:
    size = ["--steps", str(steps), "--layers", "2", "--width", "64", "--final-digest", "-"]
    start = [sys.executable, "-m", "holdfast", "run", *launcher, "--"]
    return (*start, sys.executable, str(TRAIN / "train.py"), *size, *arguments)


def training_command(steps: int) -> tuple[str, ...]:
    """Return the command of the trainer container.

    It slows the example down so that a user can follow it.
    """
    return _command(steps, [], ["--sleep-per-step", str(SLEEP_PER_STEP)])


class Run:
    """One job on one local cluster, driven by an event loop in a separate thread."""

    def __init__(
        self, base: Path, shm: Path, name: str, command: tuple[str, ...] | None = None
    ) -> None:
        """Create the run in `base / name`.

        `command` is the trainer container's; None runs STEPS steps of the example.
        """
        self.base = base / name
        self.memory = shm / name
        clock = SystemClock()
        endpoint = f"file://{self.base / 'store'}"
        config = StoreConfig(endpoint, False, "checkpoints", "demo", "")
        view = StoreView("main", config, available=True)
        template = {
            "spec": {
                "containers": [
                    {"name": "trainer", "image": "local", "command": ["holdfast", "run"]}
                ]
            }
        }
        raw_spec = {
            "workers": WORKERS,
            "template": template,
            "checkpoint": {
                "interval": {"steps": INTERVAL},
                "object": {"storeRef": {"name": "main"}, "every": {"steps": OBJECT_EVERY}},
            },
            "failurePolicy": {"maxRestarts": 100},
        }
        spec = TrainingJobSpec.from_dict(raw_spec)
        # The lower limit of the CRD is for leases of kubelets; processes are seen to be gone at once.
        spec = changed(spec, node_loss=changed(spec.node_loss, suspect_after_seconds=2))
        metadata = ObjectMeta(
            namespace="demo",
            name=name,
            uid=str(uuid.uuid4()),
            resource_version="1",
            generation=1,
            creation_timestamp=clock.utc_now(),
        )
        job = TrainingJob(metadata=metadata, spec=spec)
        place = Place(
            self.memory,
            self.base / "node",
            self.base / "certs",
            self.base / "keys",
            self.base / "logs",
            TRAIN,
        )
        command = command or training_command(STEPS)
        self.cluster = LocalCluster(job, place, command, view, Authority())
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self.cluster.run())
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            return

    def close(self) -> None:
        if self._task is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(60)
            if self._thread.is_alive():
                raise RuntimeError(
                    f"the operator of the run in {self.base} did not end within 60 s of its "
                    "cancellation; it would start pods that are never deleted"
                )
        for pod in list(self.cluster.pods.values()):
            pod.delete()
        shutil.rmtree(self.memory, ignore_errors=True)

    @property
    def failed(self) -> bool:
        return self._task is not None and self._task.done()

    def digests(self) -> dict[int, str]:
        return find_digests(pod.output() for pod in self.cluster.pods.values())

    def explain(self) -> str:
        lines = [f"status: {self.cluster.job.status}", *self.cluster.events[-20:]]
        for path in sorted(self.cluster.place.log_folder.glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-6:]
            lines += [f"--- {path}", *tail]
        if self.failed and self._task is not None:
            lines.append(
                "the loop ended: " + "".join(traceback.format_exception(self._task.exception()))
            )
        return "\n".join(lines)


class LocalStage:
    """Stage of local processes. It must be used within a `Claim` of its folder."""

    transient: tuple[type[Exception], ...] = (OSError,)
    """Errors of a sidecar that is killed while its metrics are read."""

    def __init__(self, base: Path, steps: int = STEPS) -> None:
        self.base = base
        self.total_steps = steps
        self.run = Run(self.base, memory_of(base), "gpt", training_command(steps))

    def reference_digests(self, say: Callable[[str], None]) -> dict[int, str]:
        say("first an uninterrupted run to compare with: one launcher, no pods")
        folder = self.base / "reference"
        progress = folder / "progress"
        progress.mkdir(parents=True)
        arguments = ["--dir", str(folder / "ckpt"), "--interval", "0"]
        command = _command(
            self.total_steps,
            ["--nproc-per-node", str(WORKERS)],
            [*arguments, "--progress-dir", str(progress)],
        )
        output, errors = folder / "out.log", folder / "err.log"
        with output.open("wb") as out, errors.open("wb") as err:
            process = subprocess.Popen(
                command, cwd=TRAIN, stdout=out, stderr=err, stdin=subprocess.DEVNULL
            )

        def steps() -> tuple[str, ...]:
            files = sorted(progress.glob("rank*"))
            return tuple(file.read_text().partition(" ")[0] for file in files)

        def failed(happened: str) -> DemoFailed:
            shown = ", ".join(steps()) or "none"
            return DemoFailed(happened, f"steps done by the ranks: {shown}", f"{errors}, {output}")

        try:
            wait_while_moving(
                "the end of the uninterrupted run",
                lambda: process.poll() is not None,
                steps,
                failed,
            )
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            raise failed(f"The uninterrupted run ended with exit code {process.returncode}.")
        return find_digests([output.read_text()])

    def start(self) -> None:
        self.run.start()

    def sample(self) -> Sample:
        if self.run.failed:
            raise self.failed("The part of the demo that simulates the operator ended.")
        return self._sample()

    def _sample(self) -> Sample:
        status = self.run.cluster.job.status
        seen = metrics.GangMetrics()
        for pod in list(self.run.cluster.pods.values()):
            port = pod.metrics_port()
            if port is None:
                continue
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as reply:
                    metrics.collect(seen, reply.read().decode())
            except OSError:
                continue
        persisted = status.last_persisted
        committed = [s for s in (seen.committed, status.last_committed_step) if s is not None]
        return Sample(
            at_seconds=0.0,
            phase=status.phase or "Pending",
            round=status.restart_round or 0,
            step=seen.step if seen.step is not None else status.step,
            loss=seen.loss,
            committed=max(committed, default=None),
            persisted=None if persisted is None else persisted.step,
            tiers=seen.tiers,
            pods=tuple(sorted(str(p.phase) for p in list(self.run.cluster.pods.values()))),
            replicated=status.last_replicated_step,
        )

    def acts(self) -> list[tuple[Act, Callable[[], None]]]:
        return [
            (Act("pod deleted", "worker 2's pod with memory and node tier", "peer"), self._pod),
            (Act("rank killed", "the process of rank 1 (SIGKILL)", "memory"), self._rank),
            (
                Act("node killed", "worker 3's processes and volumes, simultaneously", "peer"),
                self._node,
            ),
            (
                Act(
                    "all copies removed",
                    "every pod with memory and node tier",
                    "object",
                    needs_persisted=True,
                ),
                self._all,
            ),
        ]

    def _member(self, worker: int) -> str:
        return self.run.cluster.member(Worker(worker))

    def _pod(self) -> None:
        self.run.cluster.lose(self._member(2))

    def _rank(self) -> None:
        pids = self.run.cluster.pods[self._member(1)].rank_pids()
        if not pids:
            raise AssertionError(f"no rank process of {self._member(1)} was found")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def _node(self) -> None:
        self.run.cluster.lose(self._member(3))

    def _all(self) -> None:
        for name in list(self.run.cluster.pods):
            self.run.cluster.lose(name)

    def recovery(self) -> Recovery | None:
        status = self.run.cluster.job.status
        point, last = status.restore_point, status.last_recovery
        if point is None or last is None or last.round != status.restart_round:
            return None
        if last.total_seconds is None:
            return None
        phases = {name.replace("_", " "): value for name, value in last.phases().items()}
        return Recovery(
            point.step or 0, self.sample_tiers(), phases, last.total_seconds, last.lost_steps
        )

    def sample_tiers(self) -> str:
        seen = metrics.GangMetrics()
        for pod in list(self.run.cluster.pods.values()):
            port = pod.metrics_port()
            if port is not None:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as reply:
                    metrics.collect(seen, reply.read().decode())
        return metrics.served_by(seen)

    def is_complete(self) -> bool:
        if self.run.cluster.job.status.phase == "Failed":
            raise self.failed("The job failed.")
        return self.run.cluster.job.status.phase == "Succeeded"

    def final_digests(self) -> dict[int, str]:
        return self.run.digests()

    def failed(self, happened: str) -> DemoFailed:
        log = self.base / "failure.log"
        log.write_text(self.run.explain())
        return DemoFailed(happened, self._sample().words(), f"{log}, {self.base / 'gpt' / 'logs'}")

    def close(self) -> None:
        self.run.close()
