"""Stores on a real API server, and the pods that run commands for them with the sidecar's real program."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tests.support.operator.operator_bed import OperatorBed
from tests.support.sidecar import commands

from holdfast_operator.model import labels


def create_store(
    bed: OperatorBed, name: str, keys: dict[str, str], endpoint: str, **spec: Any
) -> None:
    """Create a CheckpointStore and the Secret with its keys. `spec` is beside `s3`."""
    secrets = f"/api/v1/namespaces/{bed.namespace}/secrets"
    secret = {"metadata": {"name": f"keys-of-{name}"}, "stringData": keys}
    bed.plane.request("POST", secrets, secret)
    s3 = {
        "endpoint": endpoint,
        "bucket": "holdfast",
        "credentialsSecretRef": {"name": f"keys-of-{name}"},
    }
    store = {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "CheckpointStore",
        "metadata": {"name": name},
        "spec": {"s3": s3, **spec},
    }
    bed.plane.request("POST", bed.path("checkpointstores"), store)


def pods_of(bed: OperatorBed, store: str) -> list[Any]:
    """Return the pods that run a command for a store."""
    return [
        p for p in bed.kubelet.pods() if p["metadata"]["labels"].get(labels.STORE_NAME) == store
    ]


def run_command(bed: OperatorBed, pod: dict[str, Any], folder: Path) -> str:
    """Run the pod's command with its environment and its Secret, and return its termination message."""
    [container] = pod["spec"]["containers"]
    [source] = pod["spec"]["volumes"][0]["projected"]["sources"]
    path = f"/api/v1/namespaces/{bed.namespace}/secrets/{source['secret']['name']}"
    for key, value in bed.plane.request("GET", path)["data"].items():
        (folder / key).write_bytes(base64.b64decode(value))
    program, verb = container["command"]
    assert program == "holdfast-sidecar"
    variables = {e["name"]: e["value"] for e in container["env"]}
    code, report = commands.run_command(verb, folder, variables)
    assert code == 0, report
    return json.dumps(report)


def condition_of(bed: OperatorBed, store: str, kind: str) -> dict[str, Any]:
    """Return a condition of a store, or {} if it has none."""
    found = bed.plane.request("GET", bed.path("checkpointstores", store))
    conditions = (found.get("status") or {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind), {})
