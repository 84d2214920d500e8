"""`doctor`: what is wrong with a job, a store or the installation, and the command that mends it.

It reads everything first. A read that is refused costs only its own check.
"""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import click

from holdfast_cli.checks import RIGHTS, Check, CheckLevel, Findings, Right, Unread, examine
from holdfast_cli.errors import CommandError, Exit, NotFound
from holdfast_cli.gangs import store_of
from holdfast_cli.logs import printable
from holdfast_cli.options import Session, common_options, target_argument
from holdfast_cli.output import Cell, Line, Result, Style
from holdfast_cli.targets import Kind, Target, named, without_step
from holdfast_core.api import (
    Checkpoint,
    CheckpointAdoption,
    CheckpointGrant,
    CheckpointStore,
    TrainingJob,
)
from holdfast_core.api.base import API_VERSION
from holdfast_core.api.crd import crd
from holdfast_core.clock import SystemClock
from holdfast_core.names import GROUP, JOB_UID_LABEL

if TYPE_CHECKING:
    from holdfast_cli.cluster import ClusterClient

T = TypeVar("T")
INSTEAD = "`verify` reads a checkpoint of a folder or a store, and compares its digests"
_KINDS = (TrainingJob, Checkpoint, CheckpointStore, CheckpointAdoption, CheckpointGrant)
_OPERATOR = "app.kubernetes.io/name=holdfast,app.kubernetes.io/component=operator"
_OF_CHART = "app.kubernetes.io/part-of=holdfast"
_CONNECT_SECONDS = 5
_MAX_NODES = 64
_MAX_SIDECARS = 8
_MAX_TEXT = 600
_NO_CERTIFICATE = "the connection has no certificate"


def gather(cluster: ClusterClient, job: str | None, store: str | None) -> Findings:
    """Read what the checks need, about one job, one store, or the whole namespace.

    Raises:
        NotFound: There is no such job or store.
    """
    api_version, server_time = _greeting(cluster)
    now = (
        SystemClock().utc_now()
    )  # compared with the time of the answer, so nothing may come between
    known_kinds, own = [crd(kind) for kind in _KINDS], version("holdfast-cli")
    if isinstance(api_version, Unread):  # each further request would wait for its time-out
        return Findings(now, cluster.namespace, own, api_version, known_kinds)
    gangs, stores = _objects(cluster, job, store)
    operators = _attempt(
        lambda: cluster.ask(
            "AppsV1Api.list_deployment_for_all_namespaces", label_selector=_OPERATOR
        )["items"]
    )
    pods = _pods(cluster, gangs) if store is None else []
    names = _nodes_of(pods)
    return Findings(
        now=now,
        namespace=cluster.namespace,
        version=own,
        api_version=api_version,
        server_time=server_time,
        certificate_ends=_attempt(lambda: _certificate_end(cluster)),
        served=_attempt(
            lambda: cluster.ask(
                "CustomObjectsApi.get_api_resources", GROUP, API_VERSION.rpartition("/")[2]
            )
        ),
        kinds=_attempt(lambda: [_crd(cluster, kind.PLURAL) for kind in _KINDS]),
        known_kinds=known_kinds,
        operators=operators,
        leases=_attempt(lambda: _leases(cluster, operators)),
        policies=_attempt(lambda: _of_chart(cluster, "policy")),
        bindings=_attempt(lambda: _of_chart(cluster, "policy_binding")),
        rights=_attempt(lambda: [(right, _may(cluster, right)) for right in RIGHTS]),
        stores=stores,
        gangs=gangs,
        pods=pods,
        nodes={name: _attempt(partial(cluster.ask, "CoreV1Api.read_node", name)) for name in names},
        node_leases=_attempt(lambda: _node_leases(cluster, names)),
        checkpoints=_attempt(lambda: _checkpoints(cluster, gangs, job)) if store is None else [],
        metrics=_metrics(cluster, pods),
    )


def _attempt(read: Callable[[], T]) -> T | Unread:
    try:
        return read()
    except CommandError as error:
        return Unread(str(error))


def _greeting(
    cluster: ClusterClient,
) -> tuple[dict[str, Any] | Unread, datetime | Unread]:
    """Return version and time of the API server, from one answer."""
    reply = _attempt(lambda: cluster.answer("VersionApi.get_code"))
    if isinstance(reply, Unread):
        return reply, reply
    document = json.loads(reply.data)
    try:
        return document, parsedate_to_datetime(reply.headers["Date"])
    except (KeyError, TypeError, ValueError):
        return document, Unread("its answer has no Date header")


def _certificate_end(cluster: ClusterClient) -> datetime:
    """Return the end of the API server's certificate, from a connection of our own."""
    place, settings = urlsplit(cluster.server), cluster.api.configuration
    if place.scheme != "https" or not settings.verify_ssl:
        raise CommandError(_NO_CERTIFICATE)
    context = ssl.create_default_context(cafile=settings.ssl_ca_cert)
    address = place.hostname or "", place.port or 443
    try:
        with (
            socket.create_connection(address, timeout=_CONNECT_SECONDS) as plain,
            context.wrap_socket(
                plain, server_hostname=settings.tls_server_name or place.hostname
            ) as secure,
        ):
            certificate = secure.getpeercert() or {}
    except OSError as error:
        raise CommandError(f"{place.netloc}: {error}") from error
    end = certificate.get("notAfter")
    if not isinstance(end, str):
        raise CommandError(_NO_CERTIFICATE)
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(end), UTC)


def _objects(
    cluster: ClusterClient, job: str | None, store: str | None
) -> tuple[Sequence[dict[str, Any]] | Unread, Sequence[dict[str, Any]] | Unread]:
    """Return the jobs and the stores that are looked at."""
    if store is not None:
        return [], _named(lambda: [cluster.get("checkpointstores", store)])
    if job is None:
        return _attempt(cluster.gangs), _attempt(lambda: cluster.items("checkpointstores"))
    gangs = _named(lambda: [cluster.gang(job)])
    if isinstance(gangs, Unread):
        return gangs, gangs
    used = store_of(gangs[0])
    if used is None:
        return gangs, []
    return gangs, _attempt(lambda: [cluster.get("checkpointstores", used)])


def _named(read: Callable[[], T]) -> T | Unread:
    """Read what the command line names. Raises NotFound."""
    try:
        return read()
    except NotFound:
        raise
    except CommandError as error:
        return Unread(str(error))


def _crd(cluster: ClusterClient, plural: str) -> dict[str, Any]:
    found: dict[str, Any] = cluster.ask(
        "ApiextensionsV1Api.read_custom_resource_definition", f"{plural}.{GROUP}"
    )
    return found


def _leases(
    cluster: ClusterClient, operators: Sequence[dict[str, Any]] | Unread
) -> dict[str, dict[str, Any]]:
    if isinstance(operators, Unread):
        raise CommandError(operators.why)
    found = dict[str, dict[str, Any]]()
    for operator in operators:
        meta = operator["metadata"]
        leases = cluster.ask("CoordinationV1Api.list_namespaced_lease", meta["namespace"])["items"]
        found |= {f"{meta['namespace']}/{one['metadata']['name']}": one for one in leases}
    return found


def _of_chart(cluster: ClusterClient, kind: str) -> list[dict[str, Any]]:
    call = f"AdmissionregistrationV1Api.list_validating_admission_{kind}"
    return list(cluster.ask(call, label_selector=_OF_CHART)["items"])


def _may(cluster: ClusterClient, right: Right) -> bool:
    attributes = {
        "namespace": cluster.namespace,
        "verb": right.verb,
        "group": right.group,
        "resource": right.resource,
        "subresource": right.subresource,
    }
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = cluster.ask("AuthorizationV1Api.create_self_subject_access_review", body)
    return bool(answer["status"].get("allowed"))


def _pods(
    cluster: ClusterClient, gangs: Sequence[dict[str, Any]] | Unread
) -> Sequence[dict[str, Any]] | Unread:
    if isinstance(gangs, Unread):
        return gangs
    uids = {gang["metadata"]["uid"] for gang in gangs}
    found = _attempt(lambda: cluster.pods(JOB_UID_LABEL))
    if isinstance(found, Unread):
        return found
    # A placeholder looks for a node of a missing worker, and condition WorkersMissing says so.
    return [
        pod
        for pod in found
        if pod["metadata"]["labels"][JOB_UID_LABEL] in uids
        and pod["metadata"]["labels"].get("app.kubernetes.io/component") != "placeholder"
    ]


def _nodes_of(pods: Sequence[dict[str, Any]] | Unread) -> list[str]:
    if isinstance(pods, Unread):
        return []
    return sorted({pod["spec"].get("nodeName") for pod in pods} - {None})[:_MAX_NODES]


def _node_leases(cluster: ClusterClient, names: Iterable[str]) -> list[dict[str, Any]]:
    found = []
    for name in names:
        with suppress(NotFound):  # the node is gone, or it has no kubelet yet
            call = "CoordinationV1Api.read_namespaced_lease"
            found.append(cluster.ask(call, name, "kube-node-lease"))
    return found


def _checkpoints(
    cluster: ClusterClient, gangs: Sequence[dict[str, Any]] | Unread, job: str | None
) -> list[dict[str, Any]]:
    if job is None or isinstance(gangs, Unread):
        return cluster.items("checkpoints")
    return [item for gang in gangs for item in cluster.checkpoints(gang)]


def _metrics(
    cluster: ClusterClient, pods: Sequence[dict[str, Any]] | Unread
) -> dict[str, str | Unread]:
    if isinstance(pods, Unread):
        return {}
    running = [
        pod["metadata"]["name"]
        for pod in pods
        if (pod.get("status") or {}).get("phase") == "Running"
    ]
    return {name: _attempt(partial(cluster.metrics, name)) for name in running[:_MAX_SIDECARS]}


_STYLES: dict[CheckLevel, Style] = {
    CheckLevel.OK: "green",
    CheckLevel.WARNING: "yellow",
    CheckLevel.FAILURE: "red",
    CheckLevel.UNKNOWN: "yellow",
}


def doctor_result(checks: Sequence[Check], namespace: str | None = None) -> Result:
    """Return the list of checks, and the exit code: FAILED if one of them has failed.

    Args:
        namespace: What -n named. None: the namespace of the context, which the commands use by themselves.
    """
    lines: list[Line] = []
    for check in checks:
        lines.append(Cell(f"{check.level:8}{_text(check.name)}", _STYLES[check.level]))
        lines += [f"          {label} {text}" for label, text in _details(check)]
    counts = {level: sum(check.level is level for check in checks) for level in CheckLevel}
    words = ", ".join(f"{counts[level]} {level}" for level in CheckLevel if counts[level])
    failed = counts[CheckLevel.FAILURE] > 0
    if namespace is not None and any(check.mend for check in checks):
        lines.append(f"add -n {namespace} to the commands that name no namespace")
    lines.append(words)
    return Result(list(checks), lines, Exit.FAILED if failed else Exit.SUCCESS)


def _details(check: Check) -> Iterable[tuple[str, str]]:
    where = f" ({_text(check.looked_at)})" if check.looked_at else ""
    yield "found:   ", f"{_text(check.found)}{where}"
    if check.level in (CheckLevel.WARNING, CheckLevel.FAILURE):
        if check.expected:
            yield "expected:", _text(check.expected)
        if check.mend:
            yield "to mend: ", _text(check.mend)


def _text(text: str) -> str:
    return printable(" ".join(text.split()))[:_MAX_TEXT]


@click.command(
    "doctor",
    help="Say what is wrong with a job, a store or the installation, and the command that mends it. Exit "
    "code: 0 nothing has failed, 1 a check has failed.",
)
@target_argument(Kind.JOB, Kind.STORE, required=False)
@common_options
@click.pass_obj
def command(session: Session, target: Target | None) -> Result:
    if target is None:
        checks = examine(gather(session.cluster(), None, None))
        return doctor_result(checks, session.namespace)
    found = without_step(named(target, "doctor", (Kind.JOB, Kind.STORE), INSTEAD), "doctor")
    job, store = (None, found.name) if found.kind is Kind.STORE else (found.name, None)
    return doctor_result(examine(gather(session.cluster(found), job, store)), session.namespace)
