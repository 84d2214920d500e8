"""A real API server with our CRDs. The operator runs as a process, and the tests act as the kubelet."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml
from tests.support.operator.operator_bed import OperatorBed
from tests.support.operator.played_kubelet import PlayedKubelet
from tests.support.operator.waiting import poll
from tests.support.servers.control_plane import ControlPlane

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """Start the API server, or fail with the command to run if the test bed's binaries are missing."""
    with ControlPlane() as plane:
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        names = []
        for file in sorted((REPOSITORY / "crds").glob("*.yaml")):
            body = yaml.safe_load(file.read_text())
            names.append(body["metadata"]["name"])
            plane.request("POST", path, body)
        assert len(names) == 3, f"expected three CRDs in crds/, found {names}: run `make generate`"
        for name in names:
            poll(f"{name} is served", partial(_established, plane, f"{path}/{name}"))
        plane.create_namespace("holdfast-system")
        yield plane


def _established(plane: ControlPlane, path: str) -> bool:
    status = plane.request("GET", path).get("status") or {}
    return any(
        c["type"] == "Established" and c["status"] == "True" for c in status.get("conditions") or []
    )


@pytest.fixture
def empty_bed(
    control_plane: ControlPlane, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[OperatorBed]:
    """Return a namespace without a job and without a running operator."""
    namespace = f"t{abs(hash(request.node.name)) % 10**8}"
    control_plane.create_namespace(namespace)
    kubelet = PlayedKubelet(control_plane, namespace)
    bed = OperatorBed(control_plane, namespace, tmp_path, kubelet)
    try:
        yield bed
    finally:
        if bed.process is not None:
            bed.kill_operator()
        kubelet.close()


@pytest.fixture
def bed(empty_bed: OperatorBed) -> OperatorBed:
    """Return a job that trains in round 0, with a running operator."""
    empty_bed.start_operator()
    empty_bed.train()
    return empty_bed
