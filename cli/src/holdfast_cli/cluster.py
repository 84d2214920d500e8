"""All access to the cluster: objects as plain dicts, and sidecars' metrics through the pod proxy."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kubernetes import client, stream
from kubernetes.client.exceptions import ApiException
from kubernetes.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION as KUBECONFIG
from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger
from urllib3.exceptions import HTTPError, ProtocolError

from holdfast_cli.errors import CommandError, NotFound, StateError, Unanswered, UsageError
from holdfast_cli.gangs import (
    KINDS,
    MAX_STREAMS,
    VERSION,
    MemberPod,
    accepted,
    members,
    newest_of,
)
from holdfast_cli.output import say
from holdfast_cli.targets import ClusterTarget, Kind, local_path
from holdfast_core.contract import METRICS_PORT
from holdfast_core.names import GROUP, JOB_UID_LABEL

REQUEST_SECONDS = (5, 30)
"""Time-outs of a request: for the connection, and for each read."""
READ_TRIES = 3
"""Tries of a read whose connection breaks, as at a restart of a load balancer."""
AWAY_SECONDS = 1.0
"""Pause between two requests to an API server that does not answer, of a verb that waits."""
METRICS_SECONDS = 3
"""Time-out of a request for the metrics of a sidecar."""
LOG_SECONDS = (5, 60)
"""Time-outs of a log that is followed: for the connection, and for each read."""
_TLS_FAILED = 0
"""Status by which the client reports errors of TLS."""
_CHUNK_BYTES = 16 * 1024
_ERROR_CHANNEL = 3
"""Channel of the protocol of `exec` on which the Status arrives."""
_HANDSHAKE = re.compile(r"Handshake status (\d+)")


@dataclass(slots=True)
class OutagePatience:
    """How long a verb that waits repeats its reads while the API server is away, as during its restart."""

    longest_seconds: float
    """Longest outage."""
    _since: float | None = None
    """When the outage began. None: the API server answers."""

    def answered(self) -> None:
        self._since = None

    def permits(self, error: Unanswered) -> bool:
        """Return whether to go on waiting after this error. Say so at the beginning of an outage."""
        if self._since is None:
            self._since = time.monotonic()
            say(f"{error}; waiting until it answers")
        return time.monotonic() - self._since <= self.longest_seconds


@dataclass(frozen=True, slots=True)
class ClusterClient:
    """Client for one kubeconfig context and namespace. Requests raise CommandError."""

    api: Any
    namespace: str
    context: str
    server: str
    """URL of the API server."""
    everywhere: bool = False
    """Whether lists contain the objects of all namespaces."""
    patience: OutagePatience | None = None
    """Set for a verb that waits: its reads are repeated while the API server does not answer."""

    @classmethod
    def connect(
        cls, context: str | None, namespace: str | None, *, everywhere: bool = False
    ) -> ClusterClient:
        """Open a context of the kubeconfig.

        Args:
            context: Name of the context; None for the active one.
            namespace: Namespace of all requests; None for the context's.
            everywhere: Whether lists contain the objects of all namespaces.

        Raises:
            CommandError: There is no kubeconfig, it cannot be used, or it lacks the context.
        """
        if not any(os.access(local_path(p), os.R_OK) for p in KUBECONFIG.split(os.pathsep)):
            raise CommandError(
                f"no kubeconfig found at {KUBECONFIG}: set KUBECONFIG to the file of your cluster"
            )
        configuration = type.__call__(client.Configuration)
        configuration.retries = False
        configuration.connection_pool_maxsize = MAX_STREAMS
        try:
            merger = KubeConfigMerger(KUBECONFIG)
            loader = KubeConfigLoader(
                merger.config,
                active_context=context,
                config_base_path=None,  # relative paths start at the file that contains them
                config_persister=merger.save_changes,
            )
            loader.load_and_set(configuration)
            api = client.ApiClient(configuration)
        except Exception as error:  # the library raises any error for a file that is no kubeconfig
            wanted = "the active context" if context is None else f"context {context}"
            raise CommandError(
                f"{wanted} of the kubeconfig {KUBECONFIG} cannot be used: {_one_line(str(error))}; "
                "kubectl config get-contexts lists the contexts"
            ) from error
        chosen = loader.current_context
        default = chosen["context"].get("namespace") or "default"
        name = str(chosen["name"])
        return cls(api, namespace or default, name, configuration.host, everywhere)

    def in_namespace(self, namespace: str) -> ClusterClient:
        """Return a client of the same connection whose requests go to this namespace."""
        return replace(self, namespace=namespace, everywhere=False)

    def patient(self, longest_seconds: float = math.inf) -> ClusterClient:
        """Return a client of the same connection for a verb that waits.

        It has answered before: otherwise the context is more likely to be wrong than the server to be away.

        Args:
            longest_seconds: For how long reads are repeated while the API server does not answer.
        """
        return replace(self, patience=OutagePatience(longest_seconds))

    def get(self, plural: str, name: str) -> dict[str, Any]:
        call = client.CustomObjectsApi(self.api).get_namespaced_custom_object
        return dict(self._request(f"{plural}/{name}", call, plural, name, tries=READ_TRIES))

    def gang(self, name: str) -> dict[str, Any]:
        """Return the TrainingJob or the CheckpointAdoption of this name.

        Raises:
            NotFound: There is neither.
        """
        found = []
        for plural in KINDS.values():
            try:
                found.append(self.get(plural, name))
            except NotFound:
                continue
        if not found:
            tried = " and ".join(f"{plural}/{name}" for plural in KINDS.values())
            raise NotFound(self._not_found(tried))
        return accepted(found)

    def items(self, plural: str, selector: str = "") -> list[dict[str, Any]]:
        custom = client.CustomObjectsApi(self.api)

        def of_all(group: str, version: str, _: str, plural: str, **options: Any) -> Any:
            return custom.list_cluster_custom_object(group, version, plural, **options)

        call = of_all if self.everywhere else custom.list_namespaced_custom_object
        labels = {"label_selector": selector} if selector else {}
        return list(self._request(plural, call, plural, tries=READ_TRIES, **labels)["items"])

    def gangs(self) -> list[dict[str, Any]]:
        return [gang for plural in KINDS.values() for gang in self.items(plural)]

    def checkpoints(self, gang: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the Checkpoints that the gang has committed."""
        return self.items("checkpoints", f"{JOB_UID_LABEL}={gang['metadata']['uid']}")

    def checkpoint_of(self, target: ClusterTarget) -> dict[str, Any]:
        """Return the Checkpoint that a target names, or that of the step of a job.

        Without a step it is the newest one of the job that is in an object store. A plain word is a job, or
        a Checkpoint where no job has the name.

        Raises:
            NotFound: There is none.
            UsageError: The target is a store, or a Checkpoint with a step.
        """
        if target.kind is Kind.STORE:
            raise UsageError(
                f"{target} is a store: name a job, a checkpoint, or the URL of the store"
            )
        gang = None
        if target.kind is not Kind.CHECKPOINT:
            try:
                gang = self.gang(target.name)
            except NotFound:
                if target.kind is Kind.JOB or target.step is not None:
                    raise
        if gang is not None:
            return newest_of(gang, self.checkpoints(gang), target.step)
        if target.step is not None:
            raise UsageError(f"{target}: a Checkpoint has one step: omit @{target.step}")
        try:
            return self.get("checkpoints", target.name)
        except NotFound as error:
            if target.kind is Kind.CHECKPOINT:
                raise
            tried = " and ".join(
                f"{plural}/{target.name}" for plural in (*KINDS.values(), "checkpoints")
            )
            raise NotFound(self._not_found(tried)) from error

    def members(self, gang: dict[str, Any]) -> list[MemberPod]:
        """Return the workers of the gang with their pods."""
        return members(gang, self.pods(f"{JOB_UID_LABEL}={gang['metadata']['uid']}"))

    def pods(self, selector: str) -> list[dict[str, Any]]:
        call = "CoreV1Api.list_namespaced_pod"
        return list(self.ask(call, self.namespace, label_selector=selector)["items"])

    def log(self, pod: str) -> str:
        """Return the whole log of a pod with one container."""
        reply = self.answer("CoreV1Api.read_namespaced_pod_log", pod, self.namespace)
        return str(reply.data.decode(errors="replace"))

    def ask(self, call: str, *arguments: Any, tries: int = READ_TRIES, **options: Any) -> Any:
        """Return the JSON of the answer to a call of the Kubernetes client.

        Args:
            call: Class and method, such as "CoreV1Api.list_node".
            arguments: Arguments of the method.
            tries: Tries of the request if its connection breaks. More than 1 only if it changes nothing.
            options: More arguments of the method.
        """
        return json.loads(self.answer(call, *arguments, tries=tries, **options).data)

    def answer(
        self,
        call: str,
        *arguments: Any,
        tries: int = READ_TRIES,
        is_streamed: bool = False,
        **options: Any,
    ) -> Any:
        """Return the answer to a call of the Kubernetes client: `headers`, and `data` unless it is streamed.

        A connection may break in the middle of the data, which is then read again.
        """
        kind, _, method = call.partition(".")
        bound = getattr(getattr(client, kind)(self.api), method)

        def request(*_: Any, **more: Any) -> Any:
            reply = bound(*arguments, _preload_content=False, **{**more, **options})
            if not is_streamed:
                _ = reply.data  # which keeps what it has read
            return reply

        return self._request(_words(method, arguments), request, "trainingjobs", tries=tries)

    def log_chunks(
        self, pod: str, container: str, *, since_seconds: int | None = None, **options: bool
    ) -> Iterator[bytes]:
        """Return the log of a container, with a time stamp before each line.

        Args:
            pod: Name of the pod.
            container: Its container.
            since_seconds: Age of the oldest lines that are needed. None: the whole log.
            options: `follow` and `previous` of the Kubernetes API.

        Raises:
            CommandError: It cannot be opened.
            ConnectionError: It broke.
        """
        since = {} if since_seconds is None else {"since_seconds": since_seconds}
        reply = self.answer(
            "CoreV1Api.read_namespaced_pod_log",
            pod,
            self.namespace,
            container=container,
            timestamps=True,
            is_streamed=True,
            _request_timeout=LOG_SECONDS,
            **since,
            **options,
        )
        try:
            yield from reply.stream(_CHUNK_BYTES)
        except HTTPError as error:
            raise ConnectionError(_one_line(str(error))) from error
        finally:
            reply.close()

    def run_in(self, pod: str, container: str, command: Sequence[str]) -> tuple[int, str]:
        """Run a command in a container, and return its exit code and its output."""
        core = client.CoreV1Api(self.api)

        def call(*_: Any, **__: Any) -> Any:
            try:
                socket = stream.stream(
                    core.connect_get_namespaced_pod_exec,
                    pod,
                    self.namespace,
                    container=container,
                    command=list(command),
                    stdout=True,
                    stderr=True,
                    _preload_content=False,
                )
            except ApiException as error:  # a refusal of the handshake has status 0
                found = _HANDSHAKE.search(str(error.reason))
                if found is not None:
                    error.status = int(found[1])
                    error.body = str(error.reason).rpartition("-+-+-")[2]
                raise
            socket.run_forever(timeout=REQUEST_SECONDS[1])
            verdict = str(socket.read_channel(_ERROR_CHANNEL))  # read_all would drop it
            text = str(socket.read_all())
            socket.close()
            return verdict, text

        verdict, text = self._request(f"a command in pod {pod}", call, "pods")
        return _exit_code(verdict, f"container {container} of pod {pod}"), text

    def create(self, plural: str, body: dict[str, Any]) -> dict[str, Any]:
        call = client.CustomObjectsApi(self.api).create_namespaced_custom_object
        return dict(self._request(f"{plural}/{body['metadata']['name']}", call, plural, body))

    def delete_with(self, plural: str, name: str, uid: str, patch: dict[str, Any]) -> None:
        """Patch an object, then delete it if it still is the object of this uid."""
        custom = client.CustomObjectsApi(self.api)

        def delete(*arguments: Any, **options: Any) -> Any:
            body = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid=uid))
            return custom.delete_namespaced_custom_object(*arguments, body=body, **options)

        self.patch(plural, name, uid, patch)
        self._request(f"{plural}/{name}", delete, plural, name)

    def patch(self, plural: str, name: str, uid: str, body: dict[str, Any]) -> None:
        """Merge these fields into an object, if it still is the object of this uid.

        A person may have deleted the object since it was read, and created another one of the same name. The
        verb has not checked the state of that one.
        """
        call = client.CustomObjectsApi(self.api).patch_namespaced_custom_object
        body = {**body, "metadata": {**body.get("metadata", {}), "uid": uid}}
        kind = "application/merge-patch+json"
        self._request(f"{plural}/{name}", call, plural, name, body, _content_type=kind)

    def _request(
        self,
        what: str,
        call: Callable[..., Any],
        plural: str,
        *arguments: Any,
        tries: int = 1,
        **options: str,
    ) -> Any:
        patience = self.patience if tries > 1 else None  # only a read can be repeated
        while True:
            try:
                reply = self._reply_to(what, call, plural, *arguments, **options)
            except Unanswered as error:
                tries -= 1
                if tries > 0 and isinstance(error.__cause__, ProtocolError):
                    continue
                if patience is None or not patience.permits(error):
                    raise
                time.sleep(AWAY_SECONDS)
                continue
            if self.patience is not None:
                self.patience.answered()
            return reply

    def _reply_to(
        self, what: str, call: Callable[..., Any], plural: str, *arguments: Any, **options: str
    ) -> Any:
        try:
            return call(
                GROUP,
                VERSION,
                self.namespace,
                plural,
                *arguments,
                _request_timeout=REQUEST_SECONDS,
                **options,
            )
        except ApiException as error:
            kind: type[CommandError] = NotFound if _is_missing_object(error) else CommandError
            if error.status == 409 and not _is_changed(error):
                kind = StateError  # it exists already
            if error.status in (_TLS_FAILED, 429) or error.status >= 500:
                kind = Unanswered
            if error.status == 404 and kind is CommandError and (served := _served(self.api)):
                raise StateError(
                    f"the API server {self.server} of context {self.context} has {plural}.{GROUP} of "
                    f"version {', '.join(served)} only, and this program knows {VERSION}: install the "
                    "holdfast-cli of the release in the cluster"
                ) from error
            raise kind(self._refused(error, what, plural)) from error
        except (HTTPError, OSError) as error:
            raise Unanswered(self._unreachable(str(error))) from error

    def _unreachable(self, cause: str) -> str:
        return (
            f"the API server {self.server} of context {self.context} cannot be reached: "
            f"{_one_line(cause)}; check that the cluster runs and that the context is the right one"
        )

    def _not_found(self, what: str) -> str:
        return (
            f"{what} not found in namespace {self.namespace} of context {self.context}: "
            "choose another namespace with -n, or correct the name"
        )

    def _refused(self, error: ApiException, what: str, plural: str) -> str:
        """Return what to do about a refusal of the API server."""
        message = _status_message(error)
        server = f"the API server {self.server} of context {self.context}"
        match error.status:
            case 0:  # _TLS_FAILED
                return self._unreachable(error.reason)
            case 401:
                return (
                    f"{server} does not accept your credentials (401): they may have expired, so log "
                    "in to the cluster again"
                )
            case 403:
                place = "all namespaces" if self.everywhere else f"namespace {self.namespace}"
                return (
                    f"{server} does not permit the request (403): {message or what}; ask an administrator "
                    f"of the cluster for this right in {place}"
                )
            case 404 if message is None:
                # The server has no such path, and answers without a Status object.
                return (
                    f"{server} has no resource {plural}.{GROUP}/{VERSION}: install Holdfast's chart "
                    "there, or choose another --context"
                )
            case 404:
                return self._not_found(what)
            case 409 | 422 if _is_changed(error):
                return f"{what} has changed meanwhile: repeat the command"
            case 409:
                return (
                    f"{what} exists already in namespace {self.namespace}: choose another name (--name, "
                    "--to-new-job), or delete it"
                )
        return f"{server} refused {what} ({error.status}): {message or error.reason}"

    def metrics(self, pod: str) -> str:
        """Return the metrics of the sidecar of a pod. The time-out is METRICS_SECONDS."""
        reply = self.answer(
            "CoreV1Api.connect_get_namespaced_pod_proxy_with_path",
            f"{pod}:{METRICS_PORT}",
            self.namespace,
            "metrics",
            tries=1,
            _request_timeout=METRICS_SECONDS,
        )
        return str(reply.data.decode(errors="replace"))


def _served(api: Any) -> list[str]:
    """Return the versions of the custom resources of Holdfast. Empty: it is not installed."""
    try:
        reply = client.ApisApi(api).get_api_versions(
            _preload_content=False, _request_timeout=REQUEST_SECONDS
        )
        document = json.loads(reply.data)
    except (ApiException, HTTPError, OSError):
        return []
    groups = {group["name"]: group["versions"] for group in document["groups"]}
    versions = [str(one["version"]) for one in groups.get(GROUP, [])]
    return [] if VERSION in versions else versions


def _is_missing_object(error: ApiException) -> bool:
    """Return whether the server knows the resource and has no such object."""
    return error.status == 404 and _status_message(error) is not None


def _is_changed(error: ApiException) -> bool:
    """Return whether the object has changed, or was replaced, since it was read.

    Another 409 says that an object of this name exists. Where a patch names another uid than that of the
    object, the server says that this field is immutable.
    """
    if error.status == 422:
        return "metadata.uid" in (_status_message(error) or "")
    return _status_field(error, "reason") == "Conflict"


def _status_message(error: ApiException) -> str | None:
    return _status_field(error, "message")


def _status_field(error: ApiException, field: str) -> str | None:
    """Return a field of the Status object in the server's answer, or None if there is none."""
    try:
        return str(json.loads(error.body)[field])
    except (ValueError, TypeError, KeyError):
        return None


def _exit_code(verdict: str, place: str) -> int:
    """Return the exit code in the Status that ends a command in a container.

    Raises CommandError if there is no such Status yet, or no command was started.
    """
    if not verdict:
        raise CommandError(f"the command in {place} has not ended within {REQUEST_SECONDS[1]} s")
    status = json.loads(verdict)
    if status.get("status") == "Success":
        return 0
    causes = (status.get("details") or {}).get("causes") or []
    codes = [cause["message"] for cause in causes if cause.get("reason") == "ExitCode"]
    if not codes:
        raise CommandError(f"no command could be started in {place}: {status.get('message')}")
    return int(codes[0])


def _words(method: str, arguments: Sequence[Any]) -> str:
    """Return what a call is about: `read_namespaced_pod` of "gpt-0" is "pod gpt-0"."""
    verb, _, kind = method.replace("_namespaced", "").partition("_")
    names = [str(arguments[0])] if arguments and verb not in ("list", "get") else []
    return " ".join([*kind.split("_"), *names])


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")
