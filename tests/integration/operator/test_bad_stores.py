"""Stores that do not work: the sidecar's real probe finds the reason, and store and job report it."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.operator.operator_bed import OperatorBed, training_job
from tests.support.servers.minio_server import MinioServer
from tests.support.servers.store_server import ACCESS_KEY, SECRET_KEY

from holdfast_operator.model import labels
from holdfast_operator.model.ownership import PROBE_PREFIX

pytestmark = pytest.mark.integration

WRONG_KEYS = {"accessKey": ACCESS_KEY, "secretKey": "not-the-secret-key"}
TEXTS = ("SignatureDoesNotMatch", "the secret key does not belong to this access key")
"""Parts of the message of the probe. `test_object_probe.py` has the messages of all other bad stores."""


@pytest.fixture(scope="module")
def minio() -> Iterator[MinioServer]:
    with MinioServer() as server:
        yield server


def test_a_store_that_does_not_work_reports_why_on_itself_and_on_its_job(
    empty_bed: OperatorBed, minio: MinioServer, tmp_path: Path
) -> None:
    name, reason, bed = "wrong-key", "AccessDenied", empty_bed
    bed.start_operator()
    create_store(bed, name, WRONG_KEYS, f"http://{minio.endpoint}")
    object_tier = {"storeRef": {"name": name}, "every": {"steps": 10}}
    bed.plane.request("POST", bed.path("trainingjobs"), training_job(object=object_tier))
    probe = bed.until("a probe's pod", lambda: next(iter(probes_of(bed, name)), None))
    report = run_probe(bed, probe, tmp_path)
    bed.kubelet.probe_answer = report  # of each further probe, too

    found = bed.until(
        "the store is not available",
        lambda: (c := store_condition(bed, name)).get("status") == "False" and c,
    )
    assert found["reason"] == reason, found
    for text in TEXTS:
        assert text in found["message"]
    assert SECRET_KEY not in found["message"], "no secret is ever repeated"
    assert WRONG_KEYS["secretKey"] not in found["message"]
    bed.until("the store's Event", lambda: texts_of_events(bed, name, reason, TEXTS))

    accepted = bed.until(
        "the job is not accepted",
        lambda: (c := bed.condition("Accepted")).get("reason") == "StoreUnavailable" and c,
    )
    assert accepted["status"] == "False"
    for text in (f"CheckpointStore {name}", *TEXTS):
        assert text in accepted["message"]
    bed.until("the job's Event", lambda: texts_of_events(bed, "gpt", "StoreUnavailable", TEXTS))
    of_job = [pod for pod in bed.pod_names() if not pod.startswith(PROBE_PREFIX)]
    assert of_job == [], "no pod waits for a store that does not work"


def create_store(bed: OperatorBed, name: str, keys: dict[str, str], endpoint: str) -> None:
    """Create a CheckpointStore and the Secret with its keys."""
    secrets = f"/api/v1/namespaces/{bed.namespace}/secrets"
    secret = {"metadata": {"name": f"keys-of-{name}"}, "stringData": keys}
    bed.plane.request("POST", secrets, secret)
    spec = {
        "endpoint": endpoint,
        "bucket": "holdfast",
        "credentialsSecretRef": {"name": f"keys-of-{name}"},
    }
    store = {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "CheckpointStore",
        "metadata": {"name": name},
        "spec": {"s3": spec},
    }
    bed.plane.request("POST", bed.path("checkpointstores"), store)


def probes_of(bed: OperatorBed, store: str) -> list[Any]:
    return [
        p for p in bed.kubelet.pods() if p["metadata"]["labels"].get(labels.STORE_NAME) == store
    ]


def run_probe(bed: OperatorBed, pod: dict[str, Any], folder: Path) -> str:
    """Run the pod's command with its environment and its Secret, and return its termination message."""
    [container] = pod["spec"]["containers"]
    [source] = pod["spec"]["volumes"][0]["projected"]["sources"]
    path = f"/api/v1/namespaces/{bed.namespace}/secrets/{source['secret']['name']}"
    for key, value in bed.plane.request("GET", path)["data"].items():
        (folder / key).write_bytes(base64.b64decode(value))
    program, *arguments = container["command"]
    assert program == "holdfast-sidecar"
    environment = {
        **os.environ,
        **{e["name"]: e["value"] for e in container["env"]},
        "HOLDFAST_STORE_DIR": str(folder),
        "HOLDFAST_TERMINATION_LOG": str(folder / "termination-log"),
    }
    command = [sys.executable, "-m", "holdfast_sidecar", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return (folder / "termination-log").read_text()


def store_condition(bed: OperatorBed, name: str) -> dict[str, Any]:
    store = bed.plane.request("GET", bed.path("checkpointstores", name))
    conditions = (store.get("status") or {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == "Available"), {})


def texts_of_events(bed: OperatorBed, name: str, reason: str, texts: tuple[str, ...]) -> list[str]:
    """Return the messages of the Events of this reason about an object that contain all `texts`."""
    events = bed.plane.request("GET", f"/api/v1/namespaces/{bed.namespace}/events")["items"]
    return [
        e["message"]
        for e in events
        if (e["involvedObject"]["name"], e["reason"]) == (name, reason)
        and all(text in e["message"] for text in texts)
    ]
