"""The operator as a process that has only the rights of the chart's `watchNamespaces`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.api_objects import job_object
from tests.support.operator.waiting import poll
from tests.support.servers.control_plane import ControlPlane
from tests.support.servers.ports import free_port

pytestmark = pytest.mark.integration

CHART = Path(__file__).resolve().parents[2] / "charts" / "holdfast"
RELEASE = "narrow"
SYSTEM = "narrow-system"
WATCHED, OTHER = "team-watched", "team-a"
VALUES = (
    f"watchNamespaces={{{WATCHED}}}",
    "crds.install=false",
    "rbac.aggregate=false",
    "admissionPolicy.enabled=false",
)

Helm = Callable[..., subprocess.CompletedProcess[str]]
Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def operator_log(
    cluster: ControlPlane, helm: Helm, render: Render, tmp_path: Path
) -> Iterator[Path]:
    """Return the log of an operator that runs with a token of the release's service account."""
    cluster.create_namespace(SYSTEM)
    cluster.create_namespace(WATCHED)
    sets = [part for value in VALUES for part in ("--set", value)]
    at = ("-n", SYSTEM, f"--kubeconfig={cluster.kubeconfig}")
    helm("install", RELEASE, str(CHART), *at, *sets)
    token = cluster.kubectl("create", "token", RELEASE, "-n", SYSTEM).strip()
    (tmp_path / "token").write_text(token)
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [
            {
                "name": "c",
                "cluster": {
                    "server": cluster.url,
                    "certificate-authority": str(cluster.dir / "ca.crt"),
                },
            }
        ],
        "users": [{"name": "u", "user": {"tokenFile": "token"}}],
    }
    (tmp_path / "config").write_text(json.dumps(config))
    [deployment] = [o for o in render(*VALUES) if o["kind"] == "Deployment"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    environment = {
        **os.environ,
        **{e["name"]: e.get("value", SYSTEM) for e in container["env"]},
        "KUBECONFIG": str(tmp_path / "config"),
        "HOLDFAST_METRICS_PORT": str(free_port()),
        "HOLDFAST_HEALTH_PORT": str(free_port()),
    }
    log = tmp_path / "operator.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast_operator"], env=environment, stdout=file, stderr=file
        )
    try:
        yield log
    finally:
        process.kill()
        process.wait()
        helm("uninstall", RELEASE, *at)


def names(cluster: ControlPlane, kind: str, namespace: str) -> list[str]:
    return cluster.kubectl("get", kind, "-n", namespace, "-o", "name").split()


def test_the_operator_runs_jobs_of_its_namespaces_only(
    cluster: ControlPlane, operator_log: Path
) -> None:
    for namespace in (OTHER, WATCHED):
        body = job_object("seen")
        cluster.apply({**body, "metadata": {**body["metadata"], "namespace": namespace}})

    def pods() -> list[str]:
        return names(cluster, "pods", WATCHED)

    try:
        poll("the pods of the watched namespace's job", lambda: len(pods()) == 4, 120)
    except AssertionError as error:
        raise AssertionError(f"{error}\nlog: {operator_log.read_text()[-4000:]}") from error
    assert len(names(cluster, "networkpolicies", WATCHED)) == 1
    assert names(cluster, "pods", OTHER) == []
    other = json.loads(cluster.kubectl("get", "tj", "seen", "-n", OTHER, "-o", "json"))
    assert "status" not in other
    lines = operator_log.read_text().splitlines()
    assert [line for line in lines if "403" in line or "orbidden" in line] == []
