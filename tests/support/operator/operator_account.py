"""The operator's service account on a real API server: the rights that the chart gives it, and its calls.

The calls come from the server's audit log, which names the verb and the resource of each request as the
server's authorizer sees them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from tests.support.chart import NAMESPACE, RELEASE, render_chart
from tests.support.operator.waiting import poll
from tests.support.servers.control_plane import ControlPlane

from holdfast_core.api.crd import KINDS

_REPOSITORY = Path(__file__).resolve().parents[3]
USER = f"system:serviceaccount:{NAMESPACE}:{RELEASE}"
WATCHED = "watched-namespace"
"""Namespace in the rendered objects, in whose place each test puts its own."""
EVERYWHERE = "*"

_KINDS = {
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings",
    "ValidatingAdmissionPolicy": (
        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
    ),
    "ValidatingAdmissionPolicyBinding": (
        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
    ),
}


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """Permission to use a verb on a resource."""

    scope: str
    """Namespace, or EVERYWHERE."""
    resource: str
    """Such as pods, or trainingjobs/status.holdfast.dev."""
    verb: str


@dataclass(frozen=True, slots=True)
class Calls:
    """Rights that calls needed."""

    granted: set[Right]
    refused: set[Right]


def rights(objects: Iterable[Mapping[str, Any]]) -> Iterator[Right]:
    """Return the rights that the Roles and ClusterRoles of the operator give, without those for people."""
    for o in objects:
        if o["kind"] not in ("Role", "ClusterRole") or "labels" not in o["metadata"]:
            continue
        if any(label.startswith("rbac.auth") for label in o["metadata"]["labels"]):
            continue
        scope = o["metadata"].get("namespace", EVERYWHERE)
        for rule in o["rules"]:
            assert set(rule) == {"apiGroups", "resources", "verbs"}
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    for verb in rule["verbs"]:
                        yield Right(scope, _named(resource, group), verb)


def _named(resource: str, group: str) -> str:
    return f"{resource}.{group}" if group else resource


def audit_arguments(folder: Path) -> tuple[str, ...]:
    """Write an audit policy into the folder, and return the arguments that make the API server use it.

    A watch is recorded when it begins, every other request when it ends.
    """
    policy = {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{"level": "Metadata", "users": [USER]}, {"level": "None"}],
    }
    (folder / "policy.yaml").write_text(json.dumps(policy))
    return (f"--audit-policy-file={folder / 'policy.yaml'}", f"--audit-log-path={_log(folder)}")


def _log(folder: Path) -> Path:
    return folder / "audit.log"


def install_crds(plane: ControlPlane) -> None:
    """Create the CustomResourceDefinitions of the repository, and wait until all are served."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    names = []
    for file in sorted((_REPOSITORY / "crds").glob("*.yaml")):
        body = yaml.safe_load(file.read_text())
        names.append(body["metadata"]["name"])
        plane.request("POST", path, body)
    assert len(names) == len(KINDS), f"found {names} in crds/: run `make generate`"
    for name in names:
        poll(f"{name} is served", partial(_established, plane, f"{path}/{name}"))


def _established(plane: ControlPlane, path: str) -> bool:
    status = plane.request("GET", path).get("status") or {}
    return any(
        c["type"] == "Established" and c["status"] == "True" for c in status.get("conditions") or []
    )


@contextmanager
def running_account(folder: Path, *arguments: str) -> Iterator[OperatorAccount]:
    """Run an API server with the CRDs and the operator's account. Its files are in the folder.

    Args:
        folder: Folder for the audit policy, the audit log and the kubeconfig.
        arguments: Further arguments of the API server.
    """
    with ControlPlane(extra_args=(*audit_arguments(folder), *arguments)) as plane:
        install_crds(plane)
        plane.create_namespace(NAMESPACE)
        account = OperatorAccount(plane, folder)
        account.install()
        yield account


class OperatorAccount:
    """The operator's service account, for operators that watch some namespaces of a control plane.

    Args:
        folder: The folder of `audit_arguments`, with which the control plane was started.
    """

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.plane = plane
        self._log = _log(folder)
        self.kubeconfig = folder / "kubeconfig"
        objects = render_chart(folder, f"watchNamespaces={{{WATCHED}}}")
        self._of_each_namespace = [o for o in objects if o["metadata"].get("namespace") == WATCHED]
        self._others = [o for o in objects if o not in self._of_each_namespace]

    def install(self) -> None:
        """Create the account with its rights outside of the watched namespaces, and the policy on it."""
        for o in self._others:
            if o["metadata"]["name"] != f"{RELEASE}-trainingjobs":  # the policy on users
                self._create(o)
        self.plane.write_kubeconfig_of(NAMESPACE, RELEASE, self.kubeconfig)

    def may_nothing(self, namespace: str) -> None:
        """Take all rights in the namespace away, until `may_again`."""
        for o in self._bindings(namespace):
            path = _KINDS["RoleBinding"].format(namespace=namespace)
            self.plane.request("DELETE", f"{path}/{o['metadata']['name']}")

    def may_again(self, namespace: str) -> None:
        for o in self._bindings(namespace):
            self._create(o)

    def _bindings(self, namespace: str) -> list[dict[str, Any]]:
        return [o for o in self._in(namespace) if o["kind"] == "RoleBinding"]

    def may_watch(self, namespace: str) -> None:
        """Give the account the rights in a namespace that the operator will watch."""
        for o in self._in(namespace):
            self._create(o)

    def rights(self, namespace: str) -> set[Right]:
        """Return the rights of an operator that watches this namespace alone."""
        return set(rights([*self._others, *self._in(namespace)]))

    def environment(self) -> dict[str, str]:
        """Return the environment variables that the chart sets."""
        [deployment] = [o for o in self._others if o["kind"] == "Deployment"]
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        return {e["name"]: e.get("value", NAMESPACE) for e in container["env"]}

    def mark(self) -> int:
        """Return the present end of the record of calls."""
        return self._log.stat().st_size if self._log.exists() else 0

    def calls(self, since: int) -> Calls:
        """Return the rights that the server found the calls since `mark` to need."""
        granted, refused = set[Right](), set[Right]()
        with self._log.open() as log:
            log.seek(since)
            for line in log:
                if not line.endswith("\n"):
                    break  # the server is writing it
                entry = json.loads(line)
                what = entry.get("objectRef")
                if what is None:
                    continue  # discovery, which every account may read
                resource, part = what["resource"], what.get("subresource")
                right = Right(
                    what.get("namespace", EVERYWHERE),
                    _named(f"{resource}/{part}" if part else resource, what.get("apiGroup", "")),
                    entry["verb"],
                )
                allowed = entry["annotations"]["authorization.k8s.io/decision"] == "allow"
                (granted if allowed else refused).add(right)
        return Calls(granted, refused)

    def _in(self, namespace: str) -> Iterator[dict[str, Any]]:
        for o in self._of_each_namespace:
            yield {**o, "metadata": {**o["metadata"], "namespace": namespace}}

    def _create(self, o: Mapping[str, Any]) -> None:
        if o["kind"] in _KINDS:
            path = _KINDS[o["kind"]].format(namespace=o["metadata"].get("namespace"))
            self.plane.request("POST", path, o)
