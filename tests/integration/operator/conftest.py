"""A real API server with our CRDs. The operator runs as a process, and the tests act as the kubelet."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml
from tests.support.chart import NAMESPACE
from tests.support.operator.operator_account import OperatorAccount, audit_arguments
from tests.support.operator.operator_bed import OperatorBed
from tests.support.operator.played_kubelet import PlayedKubelet
from tests.support.operator.waiting import poll
from tests.support.servers.control_plane import ControlPlane

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorAccount]:
    """Start the API server, or fail with the command to run if the test bed's binaries are missing.

    The admission plugin is on in OpenShift: an object may block the deletion of its owner only if its creator
    may update the owner's finalizers.
    """
    folder = tmp_path_factory.mktemp("operator-account")
    plugin = "--enable-admission-plugins=OwnerReferencesPermissionEnforcement"
    with ControlPlane(extra_args=(*audit_arguments(folder), plugin)) as plane:
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        names = []
        for file in sorted((REPOSITORY / "crds").glob("*.yaml")):
            body = yaml.safe_load(file.read_text())
            names.append(body["metadata"]["name"])
            plane.request("POST", path, body)
        assert len(names) == 4, f"expected four CRDs in crds/, found {names}: run `make generate`"
        for name in names:
            poll(f"{name} is served", partial(_established, plane, f"{path}/{name}"))
        plane.create_namespace(NAMESPACE)
        account = OperatorAccount(plane, folder)
        account.install()
        yield account


def _established(plane: ControlPlane, path: str) -> bool:
    status = plane.request("GET", path).get("status") or {}
    return any(
        c["type"] == "Established" and c["status"] == "True" for c in status.get("conditions") or []
    )


@pytest.fixture
def empty_bed(
    account: OperatorAccount, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[OperatorBed]:
    """Return a namespace without a job and without a running operator.

    A test fails if the operator has made a call for which the chart gives it no right.
    """
    namespace = f"t{abs(hash(request.node.name)) % 10**8}"
    account.plane.create_namespace(namespace)
    account.may_watch(namespace)
    kubelet = PlayedKubelet(account.plane, namespace)
    bed = OperatorBed(account, namespace, tmp_path, kubelet)
    begin = account.mark()
    try:
        yield bed
    finally:
        if bed.process is not None:
            bed.kill_operator()
        kubelet.close()
    # A server that has just started refuses every call until it has read the rights.
    assert sorted(account.calls(begin).refused - account.rights(namespace)) == []


@pytest.fixture
def bed(empty_bed: OperatorBed) -> OperatorBed:
    """Return a job that trains in round 0, with a running operator."""
    empty_bed.start_operator()
    empty_bed.train()
    return empty_bed
