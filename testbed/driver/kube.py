"""A small client of the test bed's cluster: objects are plain dicts, and waits report what they saw.

Nothing in this module is specific to a scenario. Every wait has a deadline and fails with the last state,
because a hanging test gives no information.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from testbed.config import FAULTS, HANG_SECONDS, POOL_LABEL

Object = dict[str, Any]
T = TypeVar("T")

GROUP = "holdfast.dev"
VERSION = "v1alpha1"
PLURALS = {
    "TrainingJob": "trainingjobs",
    "CheckpointAdoption": "checkpointadoptions",
    "Checkpoint": "checkpoints",
    "CheckpointStore": "checkpointstores",
    "CheckpointGrant": "checkpointgrants",
}


class WaitFailed(AssertionError):
    """A condition was not met before its deadline."""


def kubeconfig_path() -> str:
    base = os.environ.get("HOLDFAST_TESTBED_DIR", str(Path.home() / ".cache/holdfast/testbed"))
    return os.environ.get("KUBECONFIG", f"{base}/kubeconfig")


def wait_for(
    what: str,
    probe: Callable[[], T | None],
    *,
    timeout_seconds: float = HANG_SECONDS,
    describe: Callable[[], str] = lambda: "",
    every_seconds: float = 0.2,
) -> T:
    """Call `probe` until it returns a true value, and return that value.

    Raises WaitFailed that names `what` after `timeout_seconds`.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise WaitFailed(f"waited {timeout_seconds:.0f} s for {what}\n{describe()}")
        time.sleep(every_seconds)


class Kube:
    """One connection to the cluster. `get`, `pod` and `proxy_text` return None for a missing object."""

    def __init__(self) -> None:
        self.api = config.new_client_from_config(kubeconfig_path())
        self.core = client.CoreV1Api(self.api)
        self.custom = client.CustomObjectsApi(self.api)

    def plain(self, model: Any) -> Any:
        return self.api.sanitize_for_serialization(model)

    def read(self, request: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Send a request of a generated client, and return its answer as the server sent it.

        The client would build a model of each object first. Waits ask for pods several times a second, and
        their models then take more CPU time than everything else in a test.
        """
        response = request(*arguments, **options, _preload_content=False)
        return json.loads(response.data)

    # ---------------------------------------------------------------- our kinds

    def create(self, body: Object) -> Object:
        created: Object = self.custom.create_namespaced_custom_object(
            GROUP, VERSION, body["metadata"]["namespace"], PLURALS[body["kind"]], body
        )
        return created

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        try:
            found: Object = self.custom.get_namespaced_custom_object(
                GROUP, VERSION, namespace, PLURALS[kind], name
            )
        except ApiException as error:
            if error.status == 404:
                return None
            raise
        return found

    def items(self, kind: str, namespace: str) -> list[Object]:
        found = self.custom.list_namespaced_custom_object(GROUP, VERSION, namespace, PLURALS[kind])
        items: list[Object] = found["items"]
        return items

    def patch(self, kind: str, namespace: str, name: str, body: Object) -> None:
        self.custom.patch_namespaced_custom_object(
            GROUP, VERSION, namespace, PLURALS[kind], name, body
        )

    def delete(self, kind: str, namespace: str, name: str) -> None:
        with ignore_missing():
            self.custom.delete_namespaced_custom_object(
                GROUP, VERSION, namespace, PLURALS[kind], name
            )

    # ---------------------------------------------------------------- core kinds

    def ensure_namespace(self, name: str, *, restricted: bool = True, pool: str = FAULTS) -> None:
        """Create a namespace, unless it exists, whose pods run on the nodes of the pool."""
        labels = {POOL_LABEL: pool}
        if restricted:
            labels["pod-security.kubernetes.io/enforce"] = "restricted"
        try:
            self.core.create_namespace({"metadata": {"name": name, "labels": labels}})
        except ApiException as error:
            if error.status != 409:
                raise

    def delete_namespace(self, name: str) -> None:
        with ignore_missing():
            self.core.delete_namespace(name)

    def wait_namespace_gone(self, name: str, timeout_seconds: float = HANG_SECONDS) -> None:
        """Wait until a deleted namespace and all of its objects are gone."""
        wait_for(
            f"namespace {name} to go",
            lambda: all(
                item["metadata"]["name"] != name
                for item in self.read(self.core.list_namespace)["items"]
            ),
            timeout_seconds=timeout_seconds,
        )

    @contextmanager
    def new_namespace(self, name: str, *, pool: str) -> Iterator[str]:
        """Create a namespace for the length of the block. One that a killed run has left is deleted first."""
        self.delete_namespace(name)
        self.wait_namespace_gone(name)
        self.ensure_namespace(name, pool=pool)
        try:
            yield name
        finally:
            self.delete_namespace(name)

    def ensure_secret(self, namespace: str, name: str, values: dict[str, str]) -> None:
        body = {"metadata": {"name": name}, "stringData": values}
        try:
            self.core.create_namespaced_secret(namespace, body)
        except ApiException as error:
            if error.status != 409:
                raise
            self.core.replace_namespaced_secret(name, namespace, body)

    def pods(self, namespace: str, selector: str = "") -> list[Object]:
        items: list[Object] = self.read(
            self.core.list_namespaced_pod, namespace, label_selector=selector
        )["items"]
        return items

    def pod(self, namespace: str, name: str) -> Object | None:
        try:
            found: Object = self.read(self.core.read_namespaced_pod, name, namespace)
        except ApiException as error:
            if error.status == 404:
                return None
            raise
        return found

    def delete_pod(self, namespace: str, name: str, *, grace_seconds: int | None = None) -> None:
        with ignore_missing():
            self.core.delete_namespaced_pod(name, namespace, grace_period_seconds=grace_seconds)

    def lose_pods(self, namespace: str, names: Sequence[str]) -> None:
        """Delete pods without a grace period, all at once.

        A round that begins for the first one could otherwise restore from those that are still there.
        """
        with ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(lambda name: self.delete_pod(namespace, name, grace_seconds=0), names))

    def evict_pod(self, namespace: str, name: str) -> None:
        """Evict a pod as `kubectl drain` does, as soon as its PodDisruptionBudget allows it."""
        body = {"metadata": {"name": name, "namespace": namespace}}

        def evicted() -> bool:
            try:
                self.core.create_namespaced_pod_eviction(name, namespace, body)
            except ApiException as error:
                if error.status == 429:
                    return False
                raise
            return True

        wait_for(f"the eviction of {namespace}/{name}", evicted)

    def logs(self, namespace: str, pod: str, container: str, *, previous: bool = False) -> str:
        try:
            response = self.core.read_namespaced_pod_log(
                pod, namespace, container=container, previous=previous, _preload_content=False
            )
        except ApiException as error:
            return f"(no log of {pod}/{container}: {error.status} {error.reason})"
        return str(response.data.decode("utf-8", "replace"))

    def events(self, namespace: str) -> list[Object]:
        items: list[Object] = self.read(self.core.list_namespaced_event, namespace)["items"]
        return items

    def proxy_text(self, namespace: str, pod: str, port: int, path: str) -> str | None:
        """Send a GET through the API server's pod proxy. Returns None if the pod does not answer."""
        try:
            text = self.core.connect_get_namespaced_pod_proxy_with_path(
                f"{pod}:{port}", namespace, path.lstrip("/"), _request_timeout=3
            )
        except (ApiException, client.exceptions.OpenApiException, HTTPError):
            return None
        return str(text)


@contextmanager
def ignore_missing() -> Iterator[None]:
    try:
        yield
    except ApiException as error:
        if error.status != 404:
            raise


def condition(item: Object | None, kind: str) -> Object:
    """Return the condition of this type, or an empty dict."""
    for entry in (item or {}).get("status", {}).get("conditions", []):
        if entry.get("type") == kind:
            found: Object = entry
            return found
    return {}


def is_true(item: Object | None, kind: str) -> bool:
    return bool(condition(item, kind).get("status") == "True")


def show(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, default=str)
