"""Pods that another controller creates become workers, on a real API server with the chart's policies.

The tests play that controller: no controller manager runs, so a Job is a record whose pods they create.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.chart import render_adoption
from tests.support.operator.builders import stored_manifest
from tests.support.operator.operator_account import OperatorAccount
from tests.support.operator.operator_bed import WORKERS, OperatorBed, training
from tests.support.servers.control_plane import ControlPlaneError

from holdfast_core.contract import SIDECAR_CONTAINER
from holdfast_core.ids import JobUid
from holdfast_core.messages.schema import CoordinatorState
from holdfast_core.names import job_prefix


class JobController:
    """The controller of a Job of batch/v1, whose pods the test creates."""

    def __init__(self, bed: OperatorBed, *, backoff_limit: int = 6, jobset: bool = False) -> None:
        self._bed = bed
        container = {"name": "train", "image": "example/trainer:1"}
        template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
        metadata: dict[str, Any] = {"name": "gpt"}
        self._labels = {"holdfast.dev/adopt": "gpt"}
        if jobset:  # as the pods of the ClusterTrainingRuntime holdfast-torch
            self._labels = {"holdfast.dev/adopt": "", "jobset.sigs.k8s.io/jobset-name": "gpt"}
            owner = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "gpt"}
            metadata["ownerReferences"] = [{**owner, "uid": "0", "controller": True}]
        spec = {
            "completions": WORKERS,
            "parallelism": WORKERS,
            "completionMode": "Indexed",
            "backoffLimit": backoff_limit,
            "template": template,
        }
        path = f"/apis/batch/v1/namespaces/{bed.namespace}/jobs"
        self._job = bed.plane.request("POST", path, {"metadata": metadata, "spec": spec})

    def create_pod(self, worker: int, **spec: Any) -> str:
        """Create the pod of an index, as the Job controller does, and return its name."""
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "gpt", "controller": True}
        body = {
            "metadata": {
                "generateName": f"gpt-{worker}-",
                "labels": {
                    **self._labels,
                    "batch.kubernetes.io/job-completion-index": str(worker),
                },
                "ownerReferences": [{**owner, "uid": self._job["metadata"]["uid"]}],
            },
            "spec": {
                "restartPolicy": "Never",
                "initContainers": [{"name": "fetch-data", "image": "example/data:1"}],
                "containers": [
                    {
                        "name": "train",
                        "image": "example/trainer:1",
                        "env": [{"name": "A", "value": "b"}],
                    },
                    {"name": "logs", "image": "example/logs:1"},
                ],
                **spec,
            },
        }
        path = f"/api/v1/namespaces/{self._bed.namespace}/pods"
        return str(self._bed.plane.request("POST", path, body)["metadata"]["name"])

    def refusal(self, **spec: Any) -> str:
        """Return the message with which the API server refuses a pod, or "" if it accepts the pod."""
        try:
            name = self.create_pod(0, **spec)
        except ControlPlaneError as error:
            return str(error)
        self._bed.kubelet.delete_pod(name)
        return ""


class TrainJobController:
    """The controllers of Kubeflow Trainer 2.0.0 and JobSet 0.8.2, whose pods the test creates.

    A TrainJob becomes a JobSet of its name, whose replicated job `node` becomes a Job.
    """

    def __init__(self, bed: OperatorBed, name: str, runtime: dict[str, Any]) -> None:
        """Create the Job of a TrainJob of WORKERS nodes that uses this ClusterTrainingRuntime."""
        self._bed, self._name = bed, name
        (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        owner = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": name}
        marks = {
            "jobset-name": name,
            "replicatedjob-name": node["name"],
            "replicatedjob-replicas": "1",
            "global-replicas": "1",
            "job-index": "0",
            "job-global-index": "0",
            "restart-attempt": "0",
        }
        self._labels = {f"jobset.sigs.k8s.io/{key}": value for key, value in marks.items()}
        spec = node["template"]["spec"]
        self._template = spec["template"]
        body = {
            "metadata": {
                "name": f"{name}-{node['name']}-0",
                "labels": {**node["template"]["metadata"]["labels"], **self._labels},
                "ownerReferences": [{**owner, "uid": "0", "controller": True}],
            },
            "spec": {
                **spec,
                "completions": WORKERS,
                "parallelism": WORKERS,
                "completionMode": "Indexed",
            },
        }
        path = f"/apis/batch/v1/namespaces/{bed.namespace}/jobs"
        self._job = bed.plane.request("POST", path, body)

    def create_pod(self, worker: int) -> str:
        """Create the pod of an index, and return its name."""
        job, index = self._job["metadata"], "batch.kubernetes.io/job-completion-index"
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job["name"], "uid": job["uid"]}
        (container,) = self._template["spec"]["containers"]
        field = {"fieldRef": {"fieldPath": f"metadata.annotations['{index}']"}}
        values = {
            "PET_NNODES": str(WORKERS),
            "PET_NPROC_PER_NODE": "auto",
            "PET_MASTER_ADDR": f"{job['name']}-0.{self._name}",
            "PET_MASTER_PORT": "29500",
        }
        env: list[dict[str, Any]] = [{"name": key, "value": v} for key, v in values.items()]
        env += [
            {"name": name, "valueFrom": field} for name in ("PET_NODE_RANK", "JOB_COMPLETION_INDEX")
        ]
        body = {
            "metadata": {
                "generateName": f"{job['name']}-{worker}-",
                "labels": {
                    **self._template["metadata"]["labels"],
                    **self._labels,
                    index: str(worker),
                },
                "annotations": {index: str(worker)},
                "ownerReferences": [{**owner, "controller": True}],
            },
            "spec": {
                **self._template["spec"],
                "subdomain": self._name,
                "hostname": f"{job['name']}-{worker}",
                "containers": [{**container, "ports": [{"containerPort": 29500}], "env": env}],
            },
        }
        path = f"/api/v1/namespaces/{self._bed.namespace}/pods"
        return str(self._bed.plane.request("POST", path, body)["metadata"]["name"])


pytestmark = pytest.mark.integration

ADOPTIONS = "checkpointadoptions"


def adoption(name: str = "gpt", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "CheckpointAdoption",
        "metadata": {"name": name},
        "spec": {
            "workers": WORKERS,
            "container": "train",
            "checkpoint": {"interval": {"steps": 10}},
            **spec,
        },
    }


@pytest.fixture(scope="module")
def policies(account: OperatorAccount, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install the policies of the chart."""
    objects = render_adoption(tmp_path_factory.mktemp("helm"))
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    account.plane.kubectl("apply", "-f", "-", stdin=text)
    yield
    account.plane.kubectl("delete", "-f", "-", stdin=text)


@pytest.fixture
def adopting(empty_bed: OperatorBed, policies: None) -> OperatorBed:
    """Return a namespace with a CheckpointAdoption whose pods can be created."""
    bed = empty_bed
    bed.start_operator()
    adopt(bed, adoption())
    return bed


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "certificates mounted": (
        {"volumeMounts": [{"name": "holdfast-certs", "mountPath": "/c"}]},
        "name a volume that starts with holdfast-",
    ),
    "the node volume mounted": (
        {"volumeMounts": [{"name": "holdfast-node", "mountPath": "/n"}]},
        "name a volume that starts with holdfast-",
    ),
    "certificates as a variable": (
        {
            "env": [
                {
                    "name": "K",
                    "valueFrom": {
                        "secretKeyRef": {"name": "gpt-holdfast-certs-0", "key": "worker-1.key"}
                    },
                }
            ]
        },
        "hold certificates of a gang",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("role", ["train", "helper", "init"])
def test_a_pod_that_reaches_for_the_sidecar_is_refused(
    adopting: OperatorBed, case: str, role: str
) -> None:
    """The trainer itself, another container and an init container try it. A pod without it is accepted."""
    fields, expected = HOSTILE[case]
    path = f"/api/v1/namespaces/{adopting.namespace}/pods?dryRun=All"
    trainer, other = ({"name": n, "image": "example/trainer:1"} for n in ("train", role))
    labels = {"holdfast.dev/adopt": "gpt", "batch.kubernetes.io/job-completion-index": "0"}

    def pod(**more: Any) -> dict[str, Any]:
        containers = [trainer] if role != "train" else []
        lists = {"containers": [*containers, {**other, **more}]}
        if role == "init":
            lists = {"containers": [trainer], "initContainers": [{**other, **more}]}
        return {"metadata": {"name": "probe", "labels": labels}, "spec": lists}

    assert SIDECAR_CONTAINER in json.dumps(tried(adopting, path, pod()))
    assert expected in json.dumps(tried(adopting, path, pod(**fields)))


def adopt(bed: OperatorBed, body: dict[str, Any]) -> None:
    """Create a CheckpointAdoption and wait until its pods can be created.

    The API server puts each of the two policies in force, and reads each CheckpointAdoption for them, at a
    time of its own.
    """
    name = body["metadata"]["name"]
    uid = JobUid(bed.plane.request("POST", bed.path(ADOPTIONS), body)["metadata"]["uid"])
    prefix = job_prefix(name, uid)
    secret = f"/api/v1/namespaces/{bed.namespace}/secrets/{prefix}-holdfast-certs-0"
    bed.until("injection", lambda: status(bed, name).get("injection"))
    bed.until("certificates", lambda: not bed.is_gone(secret))  # a kubelet waits for them
    labels = {"holdfast.dev/adopt": name, "batch.kubernetes.io/job-completion-index": "0"}

    def created(container: str) -> str:
        spec = {"containers": [{"name": container, "image": "example/trainer:1"}]}
        pod = {"metadata": {"name": "probe", "labels": labels}, "spec": spec}
        path = f"/api/v1/namespaces/{bed.namespace}/pods?dryRun=All"
        return json.dumps(tried(bed, path, pod))

    own = body["spec"]["container"]
    bed.until("pods get the sidecar", lambda: SIDECAR_CONTAINER in created(own))
    bed.until("other pods are refused", lambda: "was not adopted" in created("main"))


def tried(bed: OperatorBed, path: str, body: dict[str, Any]) -> Any:
    try:
        return bed.plane.request("POST", path, body)["spec"]
    except ControlPlaneError as error:
        return str(error).replace(SIDECAR_CONTAINER, "sidecar")


def status(bed: OperatorBed, name: str = "gpt") -> dict[str, Any]:
    found = bed.plane.request("GET", bed.path(ADOPTIONS, name))
    return dict(found.get("status") or {})


def condition(bed: OperatorBed, kind: str, name: str = "gpt") -> dict[str, Any]:
    found = [c for c in status(bed, name).get("conditions", []) if c["type"] == kind]
    return found[0] if found else {}


def rounds_are_sent(bed: OperatorBed, round_: int) -> bool:
    sent = [s.rounds[-1] for s in bed.kubelet.sidecars.values() if s.rounds]
    return len(sent) == WORKERS and all(
        r.round == round_ and all(m.address for m in r.members) for r in sent
    )


def run_gang(bed: OperatorBed, controller: JobController, state: CoordinatorState) -> list[str]:
    """Create the pods and run them until the gang trains, with this state of its coordinator."""
    pods = [controller.create_pod(w) for w in range(WORKERS)]
    for pod in pods:
        bed.kubelet.run_pod(pod)
    bed.until("ROUND 0", lambda: rounds_are_sent(bed, 0))
    bed.kubelet.publish(pods[0], state)
    bed.until("Running", lambda: condition(bed, "Running").get("status") == "True")
    return pods


@pytest.mark.fault("An adopted pod is replaced while no operator runs")
def test_a_lost_pod_of_a_job_costs_one_round_even_without_an_operator(
    adopting: OperatorBed,
) -> None:
    bed = adopting
    controller = JobController(bed)
    first, lost = run_gang(bed, controller, training(2, 0, 40))
    assert condition(bed, "Adopted")["message"].startswith(
        "Job gpt (backoffLimit 6) creates a lost pod"
    )
    uid = JobUid(bed.plane.request("GET", bed.path(ADOPTIONS, "gpt"))["metadata"]["uid"])
    manifest = stored_manifest(uid, 40, ranks=WORKERS)
    survivor = bed.kubelet.sidecars[first]
    survivor.complete(manifest)
    bed.kill_operator()
    bed.kubelet.delete_pod(lost)
    fresh = controller.create_pod(1)
    bed.kubelet.run_pod(fresh)
    bed.start_operator()
    bed.until("ROUND 1", lambda: rounds_are_sent(bed, 1))
    message = bed.kubelet.sidecars[fresh].rounds[-1]
    assert message.restore_point.step == 40
    assert [m.pod for m in message.members] == ["worker-0", "worker-1"]
    assert status(bed)["members"] == [0, 1]
    assert len(bed.pod_names()) == WORKERS  # the operator has neither created nor deleted a pod
    bed.kubelet.publish(first, training(9, 1, 50))
    bed.until("Running again", lambda: condition(bed, "Running").get("status") == "True")
    assert status(bed)["restarts"] == 1
    assert status(bed)["recoveries"][-1]["reason"] == "PodLost"


@pytest.mark.fault("All pods of an adopted gang are deleted and created again")
def test_all_pods_may_go_and_come_back_as_after_a_suspension(adopting: OperatorBed) -> None:
    bed = adopting
    controller = JobController(bed)
    nothing_committed = replace(training(2, 0, 5), last_local=None, last_replicated=None)
    for pod in run_gang(bed, controller, nothing_committed):
        bed.kubelet.delete_pod(pod)
    bed.until("round 1 waits for pods", lambda: status(bed).get("restartRound", 0) >= 1)
    for worker in range(WORKERS):
        bed.kubelet.run_pod(controller.create_pod(worker))
    bed.until("ROUND 1", lambda: rounds_are_sent(bed, status(bed)["restartRound"]))


@pytest.mark.fault("A controller deletes all pods when one fails, and the job has no store")
def test_without_a_store_a_gang_whose_copies_would_all_be_lost_is_refused(
    adopting: OperatorBed,
) -> None:
    bed = adopting
    controller = JobController(bed, backoff_limit=0, jobset=True)
    sidecars = [bed.kubelet.run_pod(controller.create_pod(w)) for w in range(WORKERS)]
    found = bed.until(
        "Adopted=False",
        lambda: c if (c := condition(bed, "Adopted")).get("status") == "False" else None,
    )
    assert found["reason"] == "LocalCopiesWouldBeLost"
    for part in ("JobSet gpt deletes all pods", "no object store", "checkpoint.object"):
        assert part in found["message"]
    assert not any(s.rounds for s in sidecars)


def test_the_pods_of_a_trainjob_of_the_charts_runtime_are_workers(
    adopting: OperatorBed, tmp_path: Path
) -> None:
    bed = adopting
    adopt(bed, adoption("lm", container="node"))
    objects = render_adoption(tmp_path, "example/trainer:1")
    (runtime,) = (o for o in objects if o["kind"] == "ClusterTrainingRuntime")
    controller = TrainJobController(bed, "lm", runtime)
    for worker in range(WORKERS):
        name = controller.create_pod(worker)
        pod = bed.plane.request("GET", f"/api/v1/namespaces/{bed.namespace}/pods/{name}")
        assert pod["metadata"]["labels"]["holdfast.dev/job"] == "lm"
        assert pod["metadata"]["labels"]["holdfast.dev/worker"] == str(worker)
        (node,) = pod["spec"]["containers"]
        assert {"name": "HOLDFAST_WORKER", "value": str(worker)} in node["env"]
        assert {"name": "PET_NNODES", "value": str(WORKERS)} in node["env"]
        bed.kubelet.run_pod(name)
    bed.until("ROUND 0", lambda: rounds_are_sent(bed, 0))
    found = bed.until("Adopted", lambda: condition(bed, "Adopted", "lm"))
    assert found["message"].startswith("Job lm-node-0 (backoffLimit 100) creates a lost pod again")


def test_a_pod_of_a_pytorch_job_is_refused_and_the_replacement_is_named(
    adopting: OperatorBed,
) -> None:
    owner = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "gpt", "uid": "0"}
    labels = {"holdfast.dev/adopt": "gpt", "training.kubeflow.org/replica-index": "0"}
    body = {
        "metadata": {"name": "gpt-master-0", "labels": labels, "ownerReferences": [owner]},
        "spec": {"containers": [{"name": "train", "image": "example/trainer:1"}]},
    }
    path = f"/api/v1/namespaces/{adopting.namespace}/pods"
    with pytest.raises(ControlPlaneError, match=r"belongs to a PyTorchJob.*create a TrainJob"):
        adopting.plane.request("POST", path, body)


def test_a_pod_gets_the_same_sidecar_as_the_pod_of_a_training_job(adopting: OperatorBed) -> None:
    bed = adopting
    name = JobController(bed).create_pod(1)
    path = f"/api/v1/namespaces/{bed.namespace}/pods/{name}"
    spec = bed.plane.request("GET", path)["spec"]
    assert [c["name"] for c in spec["initContainers"]] == [SIDECAR_CONTAINER, "fetch-data"]
    adopted, trainer = spec["initContainers"][0], spec["containers"][0]
    assert {"name": "A", "value": "b"} in trainer["env"]
    assert {"name": "HOLDFAST_WORKER", "value": "1"} in trainer["env"]
    assert {"name": "HOLDFAST_STOP_SECONDS", "value": "30"} in trainer["env"]
    assert spec["containers"][1].get("env") is None
    assert spec["terminationGracePeriodSeconds"] == 60
    bed.plane.request("DELETE", path, {"gracePeriodSeconds": 0})

    job = adoption()
    job["kind"], job["metadata"]["name"] = "TrainingJob", "own"
    del job["spec"]["container"]
    command = ["holdfast", "run", "--", "python", "train.py"]
    container = {"name": "trainer", "image": "example/trainer:1", "command": command}
    # The grace period that the policy gives to a pod whose controller chose none.
    job["spec"]["template"] = {
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 60}
    }
    bed.plane.request("POST", bed.path("trainingjobs"), job)
    [own] = bed.until(
        "the pod of a TrainingJob",
        lambda: [
            c
            for p in bed.kept_pods()
            if p["metadata"]["labels"].get("holdfast.dev/worker") == "1"
            for c in p["spec"].get("initContainers", [])
        ],
    )
    # The pods of a TrainingJob have no token of their service account.
    token = "/var/run/secrets/kubernetes.io/serviceaccount"
    adopted["volumeMounts"] = [m for m in adopted["volumeMounts"] if m["mountPath"] != token]
    differ = {"env", "image"}
    assert {k: v for k, v in adopted.items() if k not in differ} == {
        k: v for k, v in own.items() if k not in differ
    }
    assert sorted(e["name"] for e in adopted["env"]) == sorted(e["name"] for e in own["env"])


def test_a_pod_mounts_the_token_of_the_stores_web_identity_in_its_sidecar(
    adopting: OperatorBed,
) -> None:
    bed = adopting
    bed.kill_operator()
    found = bed.plane.request("GET", bed.path(ADOPTIONS, "gpt"))
    found["status"]["injection"] |= {
        "tokenAudience": "api://AzureADTokenExchange",
        "caSecret": "ca",
    }
    bed.plane.request("PUT", f"{bed.path(ADOPTIONS, 'gpt')}/status", found)
    path = f"/api/v1/namespaces/{bed.namespace}/pods?dryRun=All"
    labels = {"holdfast.dev/adopt": "gpt", "batch.kubernetes.io/job-completion-index": "0"}
    pod = {
        "metadata": {"name": "probe", "labels": labels},
        "spec": {"containers": [{"name": "train", "image": "example/trainer:1"}]},
    }

    def volumes() -> list[dict[str, Any]]:
        spec = tried(bed, path, pod)
        named = spec["volumes"] if isinstance(spec, dict) else []
        return [v for v in named if v["name"] == "holdfast-store"]

    [volume] = bed.until("the store's volume", volumes)
    token = {"audience": "api://AzureADTokenExchange", "expirationSeconds": 3600}
    ca = {"name": "ca", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    assert volume["projected"]["sources"] == [
        {"serviceAccountToken": {**token, "path": "webToken"}},
        {"secret": ca},
    ]
    spec = tried(bed, path, pod)
    mounts = {
        c["name"]: any(m["name"] == "holdfast-store" for m in c.get("volumeMounts", []))
        for c in (*spec["initContainers"], *spec["containers"])
    }
    assert mounts == {SIDECAR_CONTAINER: True, "train": False}


@pytest.mark.fault("A labelled pod cannot be adopted")
def test_a_pod_that_cannot_be_adopted_is_refused_in_words(adopting: OperatorBed) -> None:
    controller = JobController(adopting)
    other = [{"name": "main", "image": "example/trainer:1"}]
    foreign = [{"name": SIDECAR_CONTAINER, "image": "example/sidecar:1"}]
    assert controller.refusal() == ""
    text = controller.refusal(containers=other)
    assert "spec.container is one of the containers of the pod (found main)" in text
    assert "has an init container of its own" in controller.refusal(initContainers=foreign)
    assert "set both to false" in controller.refusal(shareProcessNamespace=True)
    adopting.plane.request("DELETE", adopting.path(ADOPTIONS, "gpt"))
    text = adopting.until("the policy has noticed the deletion", controller.refusal)
    assert f"Expected: CheckpointAdoption gpt of namespace {adopting.namespace} exists" in text


def test_a_training_job_of_the_same_name_is_refused_in_words(adopting: OperatorBed) -> None:
    job = adoption()
    job["kind"] = "TrainingJob"
    del job["spec"]["container"]
    command = ["holdfast", "run", "--", "python", "train.py"]
    container = {"name": "trainer", "image": "example/trainer:1", "command": command}
    job["spec"]["template"] = {"spec": {"containers": [container]}}
    adopting.plane.request("POST", adopting.path("trainingjobs"), job)
    found = adopting.until("Accepted", lambda: adopting.condition("Accepted"))
    assert (found["status"], found["reason"]) == ("False", "NameTaken")
