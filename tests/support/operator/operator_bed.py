"""A bed for the operator as a process: a real API server, and a kubelet that the test plays.

The operator has the service account, the rights and the environment that the chart gives it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support import zygote
from tests.support.chart import NAMESPACE, RELEASE
from tests.support.hang import HANG_SECONDS
from tests.support.operator.builders import stored_manifest
from tests.support.operator.operator_account import OperatorAccount
from tests.support.operator.played_kubelet import PlayedKubelet
from tests.support.operator.progress import progress_of
from tests.support.operator.served_sidecar import ServedSidecar
from tests.support.operator.waiting import poll
from tests.support.servers.control_plane import ControlPlane, ControlPlaneError
from tests.support.servers.ports import free_port

from holdfast_core.contract import StoreVerb
from holdfast_core.ids import Digest, JobUid, RestartRound, Step
from holdfast_core.messages.schema import CoordinatorState, RestorePoint
from holdfast_core.names import pod_name
from holdfast_operator.model import labels
from holdfast_operator.model.ownership import command_prefix

WORKERS = 2
GROUP = "/apis/holdfast.dev/v1alpha1"
DIGEST = Digest("b3:" + "ab" * 32)
STORE = {
    "apiVersion": "holdfast.dev/v1alpha1",
    "kind": "CheckpointStore",
    "metadata": {"name": "main"},
    "spec": {
        "s3": {
            "endpoint": "http://minio.storage.svc:9000",
            "bucket": "checkpoints",
            "credentialsSecretRef": {"name": "store-keys"},
        }
    },
}


@dataclass
class OperatorBed:
    """An operator as a process, a real API server, and a kubelet that the test plays."""

    account: OperatorAccount
    namespace: str
    folder: Path
    kubelet: PlayedKubelet
    metrics_port: int = field(default_factory=free_port)
    health_port: int = field(default_factory=free_port)
    pod_name: str = "operator-0"
    """Name of the operator in its lease. A process of the same name takes the lease without a wait."""
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    also_watched: tuple[str, ...] = ()
    """Further namespaces that the operator watches from its next start on."""
    kubeconfig: Path | None = None
    """The operator's kubeconfig, if it is not the account's."""
    settings: dict[str, str] = field(default_factory=dict)
    """Environment of the operator with settings that are not the chart's."""
    executed: bool = False
    """Whether the operator is executed, as for users, and not forked."""

    @property
    def plane(self) -> ControlPlane:
        return self.account.plane

    def start_operator(self) -> None:
        self.starts += 1
        environment = {
            **os.environ,
            **self.account.environment(),
            "KUBECONFIG": str(self.kubeconfig or self.account.kubeconfig),
            "HOLDFAST_WATCH_NAMESPACES": ",".join((self.namespace, *self.also_watched)),
            "HOLDFAST_POD_NAME": self.pod_name,
            "HOLDFAST_METRICS_PORT": str(self.metrics_port),
            "HOLDFAST_HEALTH_PORT": str(self.health_port),
            **self.settings,
        }
        log = (self.folder / f"operator-{self.starts}.log").open("wb")
        self.process = zygote.Popen(
            [sys.executable, "-m", "holdfast_operator"],
            env=environment,
            stderr=log,
            stdout=log,
            executed=self.executed,
        )

    def train(self, job: dict[str, Any] | None = None) -> None:
        """Create the job and run its pods until round 0 trains."""
        self.create(job or training_job())
        self.run_gang()

    def start_with_gang(self, **settings: str) -> None:
        """Start the operator with these settings, and train a job in round 0 that has stored step 40."""
        self.settings |= settings
        self.start_operator()
        self.train()
        self.store_at(0, 40)

    def create(self, job: dict[str, Any]) -> None:
        """Create the job and wait for its pods."""
        self.plane.request("POST", self.path("trainingjobs"), job)
        names = [self.pod(w, 0) for w in range(WORKERS)]
        self.until("pods of round 0", lambda: self.pod_names() == names)

    def add_store(self) -> None:
        """Create the store `main`, whose probes all succeed, and wait until it is available."""
        answer = {"available": True, "reason": "Probed", "message": "ok", "features": {}}
        self.kubelet.probe_answer = json.dumps(answer)
        self.plane.request("POST", self.path("checkpointstores"), STORE)
        self.until("the store is available", self._store_is_available)
        self.until("the probe goes", lambda: self.command_pod(StoreVerb.PROBE) is None)

    def _store_is_available(self) -> bool:
        store = self.plane.request("GET", self.path("checkpointstores", "main"))
        conditions = (store.get("status") or {}).get("conditions", [])
        return any(c["type"] == "Available" and c["status"] == "True" for c in conditions)

    def run_gang(self) -> None:
        """Run the pods of round 0 until it trains."""
        for worker in range(WORKERS):
            self.kubelet.run_pod(self.pod(worker, 0))
        self.until(
            "ROUND with all addresses",
            lambda: all(
                s.rounds and all(m.address for m in s.rounds[-1].members)
                for s in self.kubelet.sidecars.values()
            ),
        )
        self.kubelet.publish(self.pod(0, 0), training(2, 0, 40))
        self.until("Running", lambda: self.condition("Running").get("status") == "True")

    def lose(self, worker: int) -> None:
        """Delete the worker's pod of the present round, and its processes."""
        self.kubelet.delete_pod(self.pod(worker, self.status()["members"][worker]))

    def until_recovered(self, round_: int) -> None:
        """Run the new pod of worker 1, and wait until the gang trains again in this round.

        Worker 0 lists step 40 (`store_at`), which must be the restore point. Only the members' pods may
        exist.
        """
        step = 40
        self.until(f"round {round_}", lambda: self.status().get("restartRound") == round_)
        name = self.pod(1, round_)
        self.until("the new pod", lambda: name in self.pod_names())
        fresh = self.kubelet.run_pod(name)
        self.until(
            "ROUND", lambda: fresh.rounds and all(m.address for m in fresh.rounds[-1].members)
        )
        assert fresh.rounds[-1].round == round_
        assert fresh.rounds[-1].restore_point.step == step
        state = training(10 * round_, round_, step + round_)
        nothing_new = replace(state, last_local=None, last_replicated=None)
        self.kubelet.publish(self.pod(0, 0), nothing_new)
        self.until("Running again", lambda: self.condition("Running").get("status") == "True")
        status = self.status()
        assert status["restartRound"] == round_
        assert status["restorePoint"]["step"] == step
        members = [self.pod(w, birth) for w, birth in enumerate(status["members"])]
        assert self.pod_names() == sorted(members)

    def store_at(self, worker: int, step: int) -> ServedSidecar:
        """Let the worker of round 0 list a complete checkpoint of round 0, and return its sidecar."""
        sidecar = self.kubelet.sidecars[self.pod(worker, 0)]
        manifest = stored_manifest(self.uid(), step, ranks=WORKERS)
        sidecar.complete(manifest)
        return sidecar

    def verb(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `kubectl holdfast` with these words in the namespace, and answer its question with yes."""
        return subprocess.run(
            [sys.executable, "-m", "holdfast_cli", *words, "-n", self.namespace, "--yes"],
            env={**os.environ, "KUBECONFIG": str(self.plane.kubeconfig)},
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )

    def kill_operator(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = None

    def forget_lease(self) -> None:
        """Delete the operators' lease, so that the next operator leads at once, whatever its name."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{RELEASE}"
        if not self.is_gone(path):
            self.plane.request("DELETE", path)

    def log(self) -> str:
        return (self.folder / f"operator-{self.starts}.log").read_text()

    def path(self, kind: str, name: str = "") -> str:
        return f"{GROUP}/namespaces/{self.namespace}/{kind}" + (f"/{name}" if name else "")

    def status(self, name: str = "gpt") -> dict[str, Any]:
        job = self.plane.request("GET", self.path("trainingjobs", name))
        return dict(job.get("status") or {})

    def uid(self, name: str = "gpt") -> JobUid:
        job = self.plane.request("GET", self.path("trainingjobs", name))
        return JobUid(job["metadata"]["uid"])

    def pod(self, worker: int, birth_round: int) -> str:
        """Return the name of a pod of the job."""
        return pod_name("gpt", self.uid(), worker, birth_round)

    def is_gone(self, path: str) -> bool:
        try:
            self.plane.request("GET", path)
        except ControlPlaneError as error:
            return "HTTP 404" in str(error)
        return False

    def change(self, path: str, change: Callable[[dict[str, Any]], object], part: str = "") -> None:
        """Change an object, or its subresource `part`, as a person does: again after a write of another."""

        def changed() -> bool:
            current = self.plane.request("GET", path)
            change(current)
            try:
                self.plane.request("PUT", path + part, current)
            except ControlPlaneError as error:
                if "HTTP 409" not in str(error):
                    raise
                return False
            return True

        self.until(f"the change of {path}", changed)

    def condition(self, kind: str, name: str = "gpt") -> dict[str, Any]:
        found = [c for c in self.status(name).get("conditions", []) if c["type"] == kind]
        return found[0] if found else {}

    def until(self, what: str, condition: Callable[[], Any], seconds: float = HANG_SECONDS) -> Any:
        def checked() -> Any:
            self.kubelet.answer_probes()
            return condition()

        try:
            return poll(what, checked, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\nlog: {self.log()[-4000:]}") from error

    def kept_pods(self) -> list[Any]:
        """Return the pods that nobody has deleted: a deleted one stays until its kubelet has ended it."""
        return [p for p in self.kubelet.pods() if p["metadata"].get("deletionTimestamp") is None]

    def pod_names(self) -> list[str]:
        """Return the names of the pods of gangs."""
        marks = ((pod["metadata"]["name"], pod["metadata"]["labels"]) for pod in self.kept_pods())
        return sorted(name for name, mark in marks if labels.WORKER in mark)

    def command_pod(self, verb: StoreVerb) -> Any:
        """Return the pod that does this with a store, or None.

        A store that is available is listed at once, so that the pod of another verb may exist beside it.
        """
        prefix = command_prefix(verb)
        return next((p for p in self.kept_pods() if p["metadata"]["name"].startswith(prefix)), None)


def training_job(**checkpoint: Any) -> dict[str, Any]:
    """Return the job of a bed; `checkpoint` are fields of its spec.checkpoint."""
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "gpt"},
        "spec": {
            "workers": WORKERS,
            "template": {
                "spec": {
                    "containers": [
                        {
                            "name": "trainer",
                            "image": "example/trainer:1",
                            "command": ["holdfast", "run", "--", "python", "train.py"],
                        }
                    ]
                }
            },
            "checkpoint": {"interval": {"steps": 10}, **checkpoint},
        },
    }


def training(version: int, round_: int, step: int) -> CoordinatorState:
    """Return the state of a gang that trains and whose newest step is replicated."""
    return CoordinatorState(
        version=version,
        round=RestartRound(round_),
        running=True,
        progress=progress_of(*[step] * WORKERS),
        last_local=RestorePoint(Step(step), RestartRound(round_), DIGEST),
        last_replicated=RestorePoint(Step(step), RestartRound(round_), DIGEST),
        rehydrate_seconds=0.1,
        rendezvous_seconds=0.2,
        first_step_seconds=0.3,
    )


@contextmanager
def opened_bed(account: OperatorAccount, namespace: str, folder: Path) -> Iterator[OperatorBed]:
    """Yield a bed in a new namespace, without a job and without a running operator, with one node."""
    account.plane.create_namespace(namespace)
    account.may_watch(namespace)
    kubelet = PlayedKubelet(account.plane, namespace, f"node-{namespace}")
    kubelet.register()
    bed = OperatorBed(account, namespace, folder, kubelet)
    try:
        yield bed
    finally:
        if bed.process is not None:
            bed.kill_operator()
        kubelet.close()
