"""The operator as a process against a real API server: rounds, kills of the operator, lost pods."""

from __future__ import annotations

import base64
import copy
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.support.operator.played_kubelet import PlayedKubelet
from tests.support.operator.waiting import poll
from tests.support.servers.control_plane import ControlPlane, ControlPlaneError
from tests.support.servers.ports import free_port

from holdfast_core.clock import SystemClock
from holdfast_core.contract import peer_dns_name
from holdfast_core.ids import Digest, JobUid, Rank, RestartRound, Step, TierName, Worker
from holdfast_core.messages.schema import (
    CoordinatorState,
    HeldShard,
    ManifestInfo,
    RankProgress,
    RestorePoint,
    RoundTimes,
    ShardInfo,
)
from holdfast_core.names import certificates_secret_name, pod_name, service_name
from holdfast_operator.model import labels
from holdfast_operator.model.actions import round_digest
from holdfast_operator.sidecars.certificates import Authority, new_leaf

pytestmark = pytest.mark.integration

GROUP = "/apis/holdfast.dev/v1alpha1"
DIGEST = Digest("b3:" + "ab" * 32)
WORKERS = 2


@dataclass
class Bed:
    plane: ControlPlane
    namespace: str
    folder: Path
    kubelet: PlayedKubelet
    metrics_port: int = field(default_factory=free_port)
    health_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    def start_operator(self) -> None:
        self.starts += 1
        environment = {
            **os.environ,
            "KUBECONFIG": str(self.plane.kubeconfig),
            "HOLDFAST_SIDECAR_IMAGE": "holdfast/sidecar:test",
            "HOLDFAST_OPERATOR_NAMESPACE": "holdfast-system",
            "HOLDFAST_WATCH_NAMESPACES": self.namespace,
            "HOLDFAST_METRICS_PORT": str(self.metrics_port),
            "HOLDFAST_HEALTH_PORT": str(self.health_port),
        }
        log = (self.folder / f"operator-{self.starts}.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast_operator"], env=environment, stderr=log, stdout=log
        )

    def kill_operator(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = None

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
        """Name of a pod of job gpt."""
        return pod_name("gpt", self.uid(), worker, birth_round)

    def is_gone(self, path: str) -> bool:
        try:
            self.plane.request("GET", path)
        except ControlPlaneError as error:
            return "HTTP 404" in str(error)
        return False

    def condition(self, kind: str) -> dict[str, Any]:
        found = [c for c in self.status().get("conditions", []) if c["type"] == kind]
        return found[0] if found else {}

    def until(self, what: str, condition: Callable[[], Any], seconds: float = 120.0) -> Any:
        try:
            return poll(what, condition, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\nlog: {self.log()[-4000:]}") from error

    def pod_names(self) -> list[str]:
        return sorted(
            p["metadata"]["name"]
            for p in self.kubelet.pods()
            if p["metadata"].get("deletionTimestamp") is None
        )


@pytest.fixture
def bed(
    control_plane: ControlPlane, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Bed]:
    namespace = f"t{abs(hash(request.node.name)) % 10**8}"
    control_plane.create_namespace(namespace)
    kubelet = PlayedKubelet(control_plane, namespace)
    found = Bed(control_plane, namespace, tmp_path, kubelet)
    try:
        yield found
    finally:
        if found.process is not None:
            found.kill_operator()
        kubelet.close()


def training_job(**checkpoint: Any) -> dict[str, Any]:
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


def shards(step: int, round_: int) -> tuple[ShardInfo, ...]:
    return tuple(
        ShardInfo(Rank(r), 100, Digest(f"b3:{step}-{round_}-{r}"), Digest("b3:table"))
        for r in range(WORKERS)
    )


def manifest(step: int, round_: int) -> ManifestInfo:
    return ManifestInfo(Step(step), RestartRound(round_), DIGEST, WORKERS, shards(step, round_))


def training(version: int, round_: int, step: int) -> CoordinatorState:
    return CoordinatorState(
        version=version,
        round=RestartRound(round_),
        running=True,
        progress=tuple(RankProgress(Rank(r), Step(step)) for r in range(WORKERS)),
        last_local=RestorePoint(Step(step), RestartRound(round_), DIGEST),
        last_replicated=RestorePoint(Step(step), RestartRound(round_), DIGEST),
        times=RoundTimes(0.1, 0.2, 0.3),
    )


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


def run_first_round(bed: Bed, job: dict[str, Any] | None = None) -> None:
    """Round 0 trains: pods run, ROUND is with everybody, the coordinator says so."""
    bed.plane.request("POST", bed.path("trainingjobs"), job or training_job())
    names = [bed.pod(w, 0) for w in range(WORKERS)]
    bed.until("pods of round 0", lambda: bed.pod_names() == names)
    for name in names:
        bed.kubelet.run_pod(name)
    bed.until(
        "ROUND with all addresses",
        lambda: all(
            s.rounds and all(m.address for m in s.rounds[-1].members)
            for s in bed.kubelet.sidecars.values()
        ),
    )
    bed.kubelet.publish(bed.pod(0, 0), training(2, 0, 40))
    bed.until("Running", lambda: bed.condition("Running").get("status") == "True")


def test_a_job_starts(bed: Bed) -> None:
    bed.start_operator()
    run_first_round(bed)
    status = bed.status()
    assert status["restartRound"] == 0
    assert status["members"] == [0, 0]
    assert status["phase"] == "Running"
    core = f"/api/v1/namespaces/{bed.namespace}"
    assert (
        bed.plane.request("GET", f"{core}/services/{service_name('gpt', bed.uid())}")["spec"][
            "clusterIP"
        ]
        == "None"
    )
    secret = bed.plane.request(
        "GET", f"{core}/secrets/{certificates_secret_name('gpt', bed.uid(), 0)}"
    )
    assert secret["immutable"] is True
    assert sorted(secret["data"]) == [
        "ca.crt",
        *(f"{bed.pod(w, 0)}.{end}" for w in range(WORKERS) for end in ("crt", "key")),
    ]
    uid = bed.plane.request("GET", bed.path("trainingjobs", "gpt"))["metadata"]["uid"]
    assert secret["metadata"]["ownerReferences"][0]["uid"] == uid
    ca_path = f"/api/v1/namespaces/holdfast-system/secrets/holdfast-ca-{uid}"
    assert sorted(bed.plane.request("GET", ca_path)["data"]) == ["ca.crt", "ca.key"]
    events = bed.plane.request("GET", f"{core}/events")["items"]
    assert "RoundBegan" in {e["reason"] for e in events}
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{bed.metrics_port}/metrics").read().decode()
    assert 'holdfast_restart_rounds_total{reason="FirstRound"} 1.0' in metrics
    for path in ("healthz", "readyz"):
        with urllib.request.urlopen(f"http://127.0.0.1:{bed.health_port}/{path}") as reply:
            assert reply.status == 200
    bed.plane.request("DELETE", bed.path("trainingjobs", "gpt"))
    bed.until("the authority goes with its job", lambda: bed.is_gone(ca_path))


def test_a_lost_pod_is_a_new_round_from_the_newest_complete_step(bed: Bed) -> None:
    bed.start_operator()
    run_first_round(bed)
    survivor = bed.kubelet.sidecars[bed.pod(0, 0)]
    survivor.manifests = (manifest(40, 0),)
    survivor.held = tuple(
        HeldShard(Step(40), RestartRound(0), s.rank, 100, s.blake3, TierName.NODE)
        for s in shards(40, 0)
    )
    bed.kubelet.delete_pod(bed.pod(1, 0))
    bed.until("round 1", lambda: bed.status().get("restartRound") == 1)
    bed.until("new pod", lambda: bed.pod_names() == [bed.pod(0, 0), bed.pod(1, 1)])
    fresh = bed.kubelet.run_pod(bed.pod(1, 1))
    bed.until("restore point", lambda: bed.status().get("restorePoint"))
    status = bed.status()
    assert status["members"] == [0, 1]
    assert {k: status["restorePoint"][k] for k in ("step", "round")} == {"step": 40, "round": 0}
    assert survivor.round == 1
    bed.until("ROUND 1", lambda: fresh.rounds and all(m.address for m in fresh.rounds[-1].members))
    assert fresh.rounds[-1].restore_point.step == 40
    assert [m.pod for m in fresh.rounds[-1].members] == [bed.pod(0, 0), bed.pod(1, 1)]
    bed.kubelet.publish(bed.pod(0, 0), training(9, 1, 50))
    bed.until("Running again", lambda: bed.condition("Running").get("status") == "True")
    recovery = bed.status()["lastRecovery"]
    assert recovery["reason"] == "PodLost"
    phases = {k: v for k, v in recovery.items() if k.endswith("Seconds") and k != "totalSeconds"}
    assert {"detectSeconds", "backOffSeconds", "sealSeconds", "firstStepSeconds"} <= phases.keys()
    assert recovery["totalSeconds"] == pytest.approx(sum(phases.values()), abs=0.01)
    assert recovery["begunAt"]
    assert bed.status()["restarts"] == 1


def test_operator_killed_while_a_round_begins(bed: Bed) -> None:
    bed.start_operator()
    run_first_round(bed)
    survivor = bed.kubelet.sidecars[bed.pod(0, 0)]
    survivor.manifests = (manifest(40, 0),)
    survivor.held = tuple(
        HeldShard(Step(40), RestartRound(0), s.rank, 100, s.blake3, TierName.NODE)
        for s in shards(40, 0)
    )
    bed.kill_operator()
    bed.kubelet.delete_pod(bed.pod(1, 0))
    bed.start_operator()
    bed.until("round 1", lambda: bed.status().get("restartRound") == 1)
    bed.kill_operator()
    bed.start_operator()
    bed.until("new pod", lambda: bed.pod(1, 1) in bed.pod_names())
    fresh = bed.kubelet.run_pod(bed.pod(1, 1))
    bed.until("restore point", lambda: bed.status().get("restorePoint"))
    bed.kill_operator()
    bed.start_operator()
    bed.until("ROUND 1", lambda: fresh.rounds and all(m.address for m in fresh.rounds[-1].members))
    bed.kubelet.publish(bed.pod(0, 0), training(5, 1, 50))
    bed.until("Running again", lambda: bed.condition("Running").get("status") == "True")
    assert bed.status()["restartRound"] == 1
    assert bed.status()["restorePoint"]["step"] == 40
    assert bed.pod_names() == [bed.pod(0, 0), bed.pod(1, 1)]


def test_operator_away_until_every_leaf_has_expired(bed: Bed) -> None:
    """Two days without an operator, in which a pod was lost, too: it recovers the job at once."""
    bed.start_operator()
    run_first_round(bed)
    survivor = bed.kubelet.sidecars[bed.pod(0, 0)]
    survivor.manifests = (manifest(40, 0),)
    survivor.held = tuple(
        HeldShard(Step(40), RestartRound(0), s.rank, 100, s.blake3, TierName.NODE)
        for s in shards(40, 0)
    )
    bed.kill_operator()
    path = f"/api/v1/namespaces/holdfast-system/secrets/holdfast-ca-{bed.uid()}"
    data = bed.plane.request("GET", path)["data"]
    authority = Authority(*(base64.b64decode(data[k]).decode() for k in ("ca.crt", "ca.key")))
    name = peer_dns_name(survivor.pod, bed.uid())
    survivor.show(new_leaf(authority, name, SystemClock().utc_now() - timedelta(days=2)))
    bed.kubelet.delete_pod(bed.pod(1, 0))
    survivor.calls.clear()
    bed.start_operator()
    bed.until("round 1", lambda: bed.status().get("restartRound") == 1)
    bed.until("new pod", lambda: bed.pod(1, 1) in bed.pod_names())
    fresh = bed.kubelet.run_pod(bed.pod(1, 1))
    bed.until("ROUND 1", lambda: fresh.rounds and all(m.address for m in fresh.rounds[-1].members))
    assert survivor.round == 1
    assert [kind for kind, _ in survivor.calls].count("certificate") == 1
    assert bed.status()["restorePoint"]["step"] == 40
    assert bed.pod_names() == [bed.pod(0, 0), bed.pod(1, 1)]
    bed.kubelet.publish(bed.pod(0, 0), training(5, 1, 50))
    bed.until("Running again", lambda: bed.condition("Running").get("status") == "True")


def test_operator_that_restarts_leaves_a_running_gang_alone(bed: Bed) -> None:
    bed.start_operator()
    run_first_round(bed)
    sidecar = bed.kubelet.sidecars[bed.pod(0, 0)]
    said = tuple(sidecar.rounds)
    bed.kill_operator()
    bed.start_operator()
    sidecar.since = -1
    bed.until("the coordinator is followed again", lambda: sidecar.since >= 0)
    bed.kubelet.publish(bed.pod(0, 0), replace(training(7, 0, 41)))
    bed.until("acted on", lambda: sidecar.since == 7)
    assert bed.status()["restartRound"] == 0
    assert bed.status().get("restarts", 0) == 0
    assert sidecar.round == 0
    # Nobody remembers the acks, so ROUND is said again: the same one, in a version above the gang's
    # newest (above that of a member that was told a moment before, too).
    again = sidecar.rounds[len(said) :]
    assert {round_digest(message) for message in again} <= {round_digest(said[-1])}


def test_template_that_the_server_refuses(bed: Bed) -> None:
    bed.start_operator()
    job = training_job()
    job["spec"]["template"]["spec"]["containers"][0]["image"] = ""
    bed.plane.request("POST", bed.path("trainingjobs"), job)
    bed.until("refused", lambda: bed.condition("Accepted").get("reason") == "InvalidTemplate")
    condition = bed.condition("Accepted")
    assert condition["status"] == "False"
    assert "image" in condition["message"]
    assert bed.pod_names() == []


def test_namespace_whose_service_account_comes_a_moment_later(bed: Bed) -> None:
    """One `kubectl apply` of namespace, store and job: pods are refused until a controller of the
    cluster has made the service account."""
    account = f"/api/v1/namespaces/{bed.namespace}/serviceaccounts"
    bed.plane.request("DELETE", f"{account}/default")
    bed.start_operator()
    bed.plane.request("POST", bed.path("checkpointstores"), STORE)
    bed.plane.request("POST", bed.path("trainingjobs"), training_job())
    bed.until("refused", lambda: "service account" in bed.condition("Accepted").get("message", ""))

    def store_words() -> str:
        status = bed.plane.request("GET", bed.path("checkpointstores", "main")).get("status") or {}
        return str(status.get("conditions"))

    bed.until("the store's probe is refused", lambda: "ProbeRefused" in store_words())
    bed.plane.request("POST", account, {"metadata": {"name": "default"}})
    names = [bed.pod(w, 0) for w in range(WORKERS)]
    bed.until("the job's pods", lambda: set(names) < set(bed.pod_names()))
    bed.until("a probe's pod", lambda: len(bed.pod_names()) == len(names) + 1)


def test_pods_of_a_job_are_created_once(bed: Bed) -> None:
    bed.start_operator()
    run_first_round(bed)
    assert "already exists" not in bed.log()
    assert "conflict" not in bed.log().lower()
    assert Worker(0) in {s.worker for s in bed.kubelet.sidecars.values()}


def test_sigterm_ends_the_process_in_order(bed: Bed) -> None:
    bed.start_operator()
    bed.until("in sync", lambda: "in sync" in bed.log())
    process = bed.process
    assert process is not None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    assert "operator ends" in bed.log()


def test_two_operators_do_what_one_does(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    second = replace(bed, folder=tmp_path / "second", metrics_port=free_port(), process=None)
    bed.start_operator()
    second.start_operator()
    try:
        run_first_round(bed)
        bed.kubelet.delete_pod(bed.pod(1, 0))
        bed.until("round 1", lambda: bed.status().get("restartRound") == 1)
        bed.until("new pod", lambda: bed.pod_names() == [bed.pod(0, 0), bed.pod(1, 1)])
        assert bed.status()["restartRound"] == 1
        assert bed.status()["restarts"] == 1
    finally:
        second.kill_operator()


def test_api_server_away_while_a_pod_is_lost(bed: Bed) -> None:
    bed.start_operator()
    run_first_round(bed)
    survivor = bed.kubelet.sidecars[bed.pod(0, 0)]
    bed.kubelet.delete_pod(bed.pod(1, 0))
    bed.plane.kill_api()
    assert bed.process is not None
    assert bed.process.poll() is None
    bed.plane.start_api()
    bed.until("round 1", lambda: bed.status().get("restartRound") == 1, 60)
    bed.until("new pod", lambda: bed.pod_names() == [bed.pod(0, 0), bed.pod(1, 1)])
    bed.until("survivor is sealed", lambda: survivor.round == 1)
    assert bed.process.poll() is None


def test_silent_node_is_lost(bed: Bed) -> None:
    """The lease stops, the sidecar does not answer, nobody confirms the delete: by force."""
    node = f"node-{bed.namespace}"
    bed.kubelet.node = node
    bed.plane.request("POST", "/api/v1/nodes", {"metadata": {"name": node}})
    leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
    lease = {"metadata": {"name": node}, "spec": {"renewTime": "2026-01-01T00:00:00.000000Z"}}
    bed.plane.request("POST", leases, lease)
    bed.start_operator()
    job = training_job()
    job["spec"]["nodeLoss"] = {"suspectAfterSeconds": 15}
    run_first_round(bed, job)
    bed.kubelet.kill_sidecar(bed.pod(1, 0))
    bed.until("round 1", lambda: bed.status().get("restartRound") == 1, 60)
    assert bed.status()["lastRecovery"]["reason"] == "NodeLost"
    # Both pods are on the silent node, but worker 0 still answers: it is not lost.
    assert bed.status()["members"] == [0, 1]
    bed.until("the corpse goes", lambda: bed.pod_names() == [bed.pod(0, 0), bed.pod(1, 1)])


def test_a_node_whose_object_was_deleted_is_lost(bed: Bed) -> None:
    """The lease goes with the object, so nothing turns stale; the sidecar does not answer."""
    node = f"node-{bed.namespace}"
    bed.kubelet.node = node
    bed.plane.request("POST", "/api/v1/nodes", {"metadata": {"name": node}})
    bed.start_operator()
    job = training_job()
    job["spec"]["nodeLoss"] = {"suspectAfterSeconds": 15}
    run_first_round(bed, job)
    bed.plane.request("DELETE", f"/api/v1/nodes/{node}")
    bed.kubelet.kill_sidecar(bed.pod(1, 0))
    bed.until("round 1", lambda: bed.status().get("restartRound") == 1, 180)
    assert bed.status()["lastRecovery"]["reason"] == "NodeLost"
    assert bed.status()["members"] == [0, 1]
    bed.until("the corpse goes", lambda: bed.pod_names() == [bed.pod(0, 0), bed.pod(1, 1)])


def test_store_is_probed_and_job_waits_for_it(bed: Bed) -> None:
    bed.start_operator()
    object_tier = {"storeRef": {"name": "main"}, "every": {"steps": 10}}
    bed.plane.request("POST", bed.path("trainingjobs"), training_job(object=object_tier))
    bed.until("no store", lambda: bed.condition("Accepted").get("reason") == "StoreNotFound")
    bed.plane.request("POST", bed.path("checkpointstores"), STORE)
    probes = bed.until("a probe's pod", bed.kubelet.pods)
    assert len(probes) == 1
    assert probes[0]["metadata"]["name"].startswith("holdfast-probe-main-")
    assert probes[0]["spec"]["containers"][0]["command"] == ["holdfast-sidecar", "probe-store"]
    assert bed.condition("Accepted")["status"] != "True"
    answer = (
        '{"available": true, "reason": "Probed", "message": "ok", "features": {"rangeGet": true}}'
    )
    bed.kubelet.finish_pod(probes[0]["metadata"]["name"], answer)
    bed.until("accepted", lambda: bed.condition("Accepted").get("status") == "True")
    found = bed.plane.request("GET", bed.path("checkpointstores", "main"))["status"]
    assert found["conditions"][0]["status"] == "True"
    assert found["features"] == {"rangeGet": True}
    names = [bed.pod(w, 0) for w in range(WORKERS)]
    bed.kubelet.confirm_deletes()
    bed.until(
        "the probe is gone", lambda: bed.kubelet.confirm_deletes() or bed.pod_names() == names
    )


def test_checkpoint_request_becomes_a_record(bed: Bed) -> None:
    bed.start_operator()
    run_first_round(bed)
    sidecar = bed.kubelet.sidecars[bed.pod(0, 0)]
    request = {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "Checkpoint",
        "metadata": {"name": "now"},
        "spec": {"jobRef": {"name": "gpt"}},
    }
    bed.plane.request("POST", bed.path("checkpoints"), request)
    bed.until("save-now", lambda: "save-now" in [kind for kind, _ in sidecar.calls])
    bed.kubelet.publish(bed.pod(0, 0), training(3, 0, 43))
    path = bed.path("checkpoints", "now")
    bed.until(
        "the record", lambda: bed.plane.request("GET", path)["status"].get("phase") == "Committed"
    )
    record = bed.plane.request("GET", path)
    assert record["spec"]["step"] == 43
    assert record["status"]["manifest"] == DIGEST
    assert record["status"]["worldSize"] == WORKERS


def test_a_deleted_checkpoint_whose_job_is_gone_does_not_hang(bed: Bed) -> None:
    """Neither one that was deleted while no operator ran, nor one that is deleted later."""
    for name in ("gpt-one", "gpt-two"):
        bed.plane.request(
            "POST",
            bed.path("checkpoints"),
            {
                "apiVersion": "holdfast.dev/v1alpha1",
                "kind": "Checkpoint",
                "metadata": {"name": name, "finalizers": [labels.DATA_FINALIZER]},
                "spec": {"jobRef": {"name": "gpt"}, "step": 10, "deletionPolicy": "DeleteData"},
            },
        )
    bed.plane.request("DELETE", bed.path("checkpoints", "gpt-one"))
    assert not bed.is_gone(bed.path("checkpoints", "gpt-one"))
    bed.start_operator()
    bed.until("the first goes", lambda: bed.is_gone(bed.path("checkpoints", "gpt-one")))
    assert not bed.is_gone(bed.path("checkpoints", "gpt-two"))
    bed.plane.request("DELETE", bed.path("checkpoints", "gpt-two"))
    bed.until("the second goes", lambda: bed.is_gone(bed.path("checkpoints", "gpt-two")))


def test_a_quota_that_refuses_pods_reaches_status_and_events(bed: Bed) -> None:
    quota = f"/api/v1/namespaces/{bed.namespace}/resourcequotas"
    body = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "pods"},
        "spec": {"hard": {"pods": "0"}},
    }
    created = bed.plane.request("POST", quota, body)
    # Nobody else fills in the status here: no controller manager runs.
    created["status"] = {"hard": {"pods": "0"}, "used": {"pods": "0"}}
    bed.plane.request("PUT", f"{quota}/pods/status", created)
    bed.start_operator()
    bed.plane.request("POST", bed.path("trainingjobs"), training_job())
    refused = bed.until(
        "the refusal",
        lambda: (c := bed.condition("Running")).get("reason") == "CreateRefused" and c,
    )
    assert "exceeded quota: pods" in refused["message"]
    events = f"/api/v1/namespaces/{bed.namespace}/events"
    bed.until(  # Events follow the status
        "its Event",
        lambda: any(
            e["reason"] == "CreateRefused" for e in bed.plane.request("GET", events)["items"]
        ),
    )
    bed.plane.request("DELETE", f"{quota}/pods")
    names = [bed.pod(w, 0) for w in range(WORKERS)]
    bed.until("pods of round 0", lambda: bed.pod_names() == names)


def test_a_job_created_again_while_everything_of_the_old_one_is_there(bed: Bed) -> None:
    """No garbage collector runs here: pods, Secret and Service of the old job stay for ever."""
    bed.start_operator()
    run_first_round(bed)
    old, old_pods = bed.uid(), set(bed.pod_names())
    authority = f"/api/v1/namespaces/holdfast-system/secrets/holdfast-ca-{old}"
    bed.plane.request("DELETE", bed.path("trainingjobs", "gpt"))
    bed.plane.request("POST", bed.path("trainingjobs"), training_job())
    names = {bed.pod(w, 0) for w in range(WORKERS)}
    assert not names & old_pods
    bed.until("the new job's pods", lambda: names <= set(bed.pod_names()))
    for name in sorted(names):
        bed.kubelet.run_pod(name)
    fresh = bed.kubelet.sidecars[bed.pod(0, 0)]
    bed.until("ROUND", lambda: fresh.rounds and all(m.address for m in fresh.rounds[-1].members))
    bed.kubelet.publish(bed.pod(0, 0), training(2, 0, 40))
    bed.until("Running", lambda: bed.condition("Running").get("status") == "True")
    assert old_pods <= set(bed.pod_names()), "they are the garbage collector's"
    bed.until("the old authority goes", lambda: bed.is_gone(authority))
    assert not bed.is_gone(authority.replace(old, bed.uid()))


def test_forged_pods_are_left_alone(bed: Bed) -> None:
    bed.start_operator()
    run_first_round(bed)
    real = bed.plane.request("GET", f"/api/v1/namespaces/{bed.namespace}/pods/{bed.pod(1, 0)}")
    meta, other = real["metadata"], f"{bed.namespace}-mallory"
    bed.plane.create_namespace(other)
    forged = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"labels": meta["labels"], "ownerReferences": meta["ownerReferences"]},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }
    for namespace, name, owners in (
        (other, meta["name"], meta["ownerReferences"]),
        (bed.namespace, "gpt-1-r0", meta["ownerReferences"]),
        (bed.namespace, "forged", []),
    ):
        identity = {"name": name, "ownerReferences": owners}
        body = {**forged, "metadata": {**forged["metadata"], **identity}}
        path = f"/api/v1/namespaces/{namespace}/pods"
        bed.plane.request("POST", path, body)
        pod = bed.plane.request("GET", f"{path}/{name}")
        bed.plane.request("PUT", f"{path}/{name}/status", {**pod, "status": {"phase": "Failed"}})
    bed.kill_operator()
    bed.start_operator()
    sidecar = bed.kubelet.sidecars[bed.pod(0, 0)]
    sidecar.since = -1
    bed.until("the coordinator is followed again", lambda: sidecar.since >= 0)
    bed.kubelet.delete_pod(bed.pod(1, 0))
    bed.until("round 1", lambda: bed.status().get("restartRound") == 1)
    bed.until("new pod", lambda: bed.pod(1, 1) in bed.pod_names())
    left = {bed.pod(0, 0), bed.pod(1, 1), "gpt-1-r0", "forged"}
    assert set(bed.pod_names()) == left
    assert not bed.is_gone(f"/api/v1/namespaces/{other}/pods/{meta['name']}")
    assert "is ignored" in bed.log()


def test_a_job_that_cannot_be_read_is_left_as_it_is(bed: Bed) -> None:
    """The CRD of a newer release lets a phase in that this operator does not know."""
    kind = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingjobs.holdfast.dev"
    bed.start_operator()
    run_first_round(bed)
    authority = f"/api/v1/namespaces/holdfast-system/secrets/holdfast-ca-{bed.uid()}"
    before = bed.plane.request("GET", kind)
    newer = copy.deepcopy(before)
    schema = newer["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["status"]["properties"]["phase"]["enum"].append("Hibernating")
    path = f"{bed.path('trainingjobs', 'gpt')}/status"
    bed.plane.request("PUT", kind, newer)

    def set_phase(phase: str) -> bool:
        job = bed.plane.request("GET", bed.path("trainingjobs", "gpt"))
        try:
            bed.plane.request("PUT", path, {**job, "status": {**job["status"], "phase": phase}})
        except ControlPlaneError:
            return False  # a conflict, or the new schema is not served yet
        return True

    try:
        bed.until("an unknown phase", lambda: set_phase("Hibernating"))
        bed.until("it is said", lambda: bed.condition("Readable").get("status") == "False")
        assert "status.phase" in bed.condition("Readable")["message"]
        bed.kubelet.delete_pod(bed.pod(1, 0))
        bed.kill_operator()
        bed.start_operator()
        bed.until(
            "reported", lambda: "cannot be read, and the operator does not change it" in bed.log()
        )
        bed.until("in sync", lambda: "in sync" in bed.log())
        assert bed.status()["phase"] == "Hibernating"
        assert bed.status()["restartRound"] == 0
        assert not bed.is_gone(authority)
        bed.until("a phase that it knows", lambda: set_phase("Running"))
        bed.until("round 1", lambda: bed.status().get("restartRound") == 1)
        bed.until("readable", lambda: bed.condition("Readable").get("status") == "True")
        bed.until("new pod", lambda: bed.pod(1, 1) in bed.pod_names())
        assert not bed.is_gone(authority)
    finally:
        current = bed.plane.request("GET", kind)
        bed.plane.request("PUT", kind, {**current, "spec": before["spec"]})
