"""All access to the cluster: our kinds as plain dicts, and sidecars' metrics through the pod proxy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException, OpenApiException
from urllib3.exceptions import HTTPError

from holdfast_core.contract import METRICS_PORT
from holdfast_core.errors import HoldfastError
from holdfast_core.names import pod_name

GROUP, VERSION = "holdfast.dev", "v1alpha1"
_SAMPLE = re.compile(r"^holdfast_newest_step\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class ClusterError(HoldfastError):
    """Error for the terminal: no usable kubeconfig, a refusal of the API server, or a failed save."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Client for one kubeconfig context and namespace.

    Requests raise ClusterError if the API server refuses them, and urllib3 errors if it cannot be reached.
    """

    api: Any
    namespace: str

    @classmethod
    def connect(cls, context: str | None, namespace: str | None) -> Cluster:
        """Open a context; None for the active one. Raises ClusterError.

        Args:
            namespace: Namespace of all requests; None for the active context's.
        """
        try:
            api = config.new_client_from_config(context=context)
            _, active = config.list_kube_config_contexts()
        except config.ConfigException as error:
            raise ClusterError(f"no usable kubeconfig: {error}") from error
        default = active["context"].get("namespace", "default")
        return cls(api, namespace or default)

    def get(self, plural: str, name: str) -> dict[str, Any]:
        try:
            found = client.CustomObjectsApi(self.api).get_namespaced_custom_object(
                GROUP, VERSION, self.namespace, plural, name
            )
        except ApiException as error:
            raise _explained(error, f"{plural}/{name}", self.namespace) from error
        return dict(found)

    def items(self, plural: str) -> list[dict[str, Any]]:
        try:
            found = client.CustomObjectsApi(self.api).list_namespaced_custom_object(
                GROUP, VERSION, self.namespace, plural
            )
        except ApiException as error:
            raise _explained(error, plural, self.namespace) from error
        return list(found["items"])

    def create(self, plural: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            made = client.CustomObjectsApi(self.api).create_namespaced_custom_object(
                GROUP, VERSION, self.namespace, plural, body
            )
        except ApiException as error:
            raise _explained(
                error, f"{plural}/{body['metadata']['name']}", self.namespace
            ) from error
        return dict(made)

    def tiers(self, job: dict[str, Any]) -> dict[int, dict[str, int]]:
        """Return the newest step by rank and tier, from the metrics of the members' sidecars.

        Sidecars that cannot be read, with a time-out of 3 s, are left out.
        """
        core = client.CoreV1Api(self.api)
        meta = job["metadata"]
        tiers: dict[int, dict[str, int]] = {}
        for worker, birth in enumerate(job.get("status", {}).get("members") or []):
            pod = f"{pod_name(meta['name'], meta['uid'], worker, birth)}:{METRICS_PORT}"
            try:
                text = core.connect_get_namespaced_pod_proxy_with_path(
                    pod, self.namespace, "metrics", _request_timeout=3
                )
            except (ApiException, OpenApiException, HTTPError):
                continue
            for labels_text, value in _SAMPLE.findall(str(text)):
                labels = dict(_LABEL.findall(labels_text))
                tiers.setdefault(int(labels["rank"]), {})[labels["tier"]] = int(float(value))
        return tiers


def _explained(error: ApiException, what: str, namespace: str) -> ClusterError:
    if error.status == 404:
        return ClusterError(f"{what} not found in namespace {namespace}")
    if error.status == 403:
        return ClusterError(
            f"not allowed: {what} in namespace {namespace}; ask for the role holdfast-view"
        )
    return ClusterError(f"{what} in namespace {namespace}: {error.status} {error.reason}")
