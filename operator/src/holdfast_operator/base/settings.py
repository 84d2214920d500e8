"""The operator's settings, read once from the environment at the start.

No other module of the operator reads the environment.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from holdfast_core.errors import ConfigError
from holdfast_operator.model.installation import WorkerNetwork
from holdfast_operator.model.job import LOST_NODE_TAINTS

SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEFAULT_METRICS_PORT = 8080
DEFAULT_LEASE_SECONDS = 10
DEFAULT_SILENCE_SECONDS = 75
"""Bookmarks arrive about once a minute on every watch, so longer silence means a dead connection."""
_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one operator process."""

    sidecar_image: str
    """Image of the sidecar container and of store probes."""
    operator_namespace: str
    """Namespace of the operator, in which the jobs' certificate authorities and the lease are kept."""
    lease_name: str
    """Name of the lease by which the processes of one installation elect their leader."""
    pod_name: str
    """Name of this process in the lease. No other process that runs at the same time may have it."""
    sidecar_image_pull_policy: str = "IfNotPresent"
    watch_namespaces: tuple[str, ...] = ()
    """Namespaces that the operator watches; empty for all."""
    metrics_port: int = DEFAULT_METRICS_PORT
    health_port: int = 8081
    log_level: str = "info"
    worker_network: WorkerNetwork | None = None
    """Peers that a job's NetworkPolicy admits to its pods; None to create no NetworkPolicy."""
    failing_conditions: frozenset[tuple[str, str]] = frozenset()
    """Conditions (type and status) by which a node-problem detector reports that a node fails."""
    leaving_taints: frozenset[str] = frozenset()
    """Keys of taints that say that a node will be taken away soon."""
    workers: int = 32
    """Number of concurrent passes over jobs and stores."""
    lease_seconds: int = DEFAULT_LEASE_SECONDS
    """Seconds after the last renewal of the lease after which a standby takes it."""
    watch_silence_seconds: int = DEFAULT_SILENCE_SECONDS
    """Seconds without any byte after which a watch counts as dead and begins again."""
    kubeconfig: str | None = None
    """Path of a kubeconfig file; None to use the service account of the pod."""
    api_server: str | None = None
    """https://host:port from the pod's environment; None outside of a cluster."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Self:
        """Read the settings from `env`, by default from the process. ConfigError names the variable."""
        source = os.environ if env is None else env
        namespaces = source.get("HOLDFAST_WATCH_NAMESPACES", "").replace(",", " ").split()
        level = source.get("HOLDFAST_LOG_LEVEL", "info").lower()
        if level not in _LEVELS:
            raise ConfigError(f"HOLDFAST_LOG_LEVEL={level!r}: expected one of {', '.join(_LEVELS)}")
        return cls(
            sidecar_image=_required(source, "HOLDFAST_SIDECAR_IMAGE"),
            operator_namespace=_required(source, "HOLDFAST_OPERATOR_NAMESPACE"),
            lease_name=_required(source, "HOLDFAST_LEASE_NAME"),
            pod_name=_required(source, "HOLDFAST_POD_NAME"),
            sidecar_image_pull_policy=source.get(
                "HOLDFAST_SIDECAR_IMAGE_PULL_POLICY", "IfNotPresent"
            ),
            watch_namespaces=tuple(sorted(set(namespaces))),
            metrics_port=_whole_number(source, "HOLDFAST_METRICS_PORT", DEFAULT_METRICS_PORT),
            health_port=_whole_number(source, "HOLDFAST_HEALTH_PORT", 8081),
            log_level=level,
            worker_network=_worker_network(source),
            failing_conditions=_conditions(source, "HOLDFAST_FAILING_NODE_CONDITIONS"),
            leaving_taints=_taints(source, "HOLDFAST_LEAVING_NODE_TAINTS"),
            workers=_whole_number(source, "HOLDFAST_WORKERS", 32),
            lease_seconds=_seconds(source, "HOLDFAST_LEASE_SECONDS", DEFAULT_LEASE_SECONDS),
            watch_silence_seconds=_seconds(
                source, "HOLDFAST_WATCH_SILENCE_SECONDS", DEFAULT_SILENCE_SECONDS
            ),
            kubeconfig=source.get("KUBECONFIG") or None,
            api_server=_api_server(source),
        )


def _api_server(source: Mapping[str, str]) -> str | None:
    host = source.get("KUBERNETES_SERVICE_HOST")
    if not host:
        return None
    bracketed = f"[{host}]" if ":" in host else host
    return f"https://{bracketed}:{source.get('KUBERNETES_SERVICE_PORT', '443')}"


def _worker_network(source: Mapping[str, str]) -> WorkerNetwork | None:
    raw = source.get("HOLDFAST_WORKER_NETWORK_POLICY", "")
    if not raw:
        return None
    try:
        given = json.loads(raw)
        return WorkerNetwork(
            operator_namespace=_required(source, "HOLDFAST_OPERATOR_NAMESPACE"),
            operator_labels=tuple(sorted((str(k), str(v)) for k, v in given["operator"].items())),
            metrics_from=tuple(dict(peer) for peer in given["metricsFrom"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"HOLDFAST_WORKER_NETWORK_POLICY={raw!r}: expected a JSON object with `operator` (labels) "
            f"and `metricsFrom` (a list), as the chart sets it: {error!r}"
        ) from error


_CONDITION = re.compile(r"([A-Za-z][A-Za-z0-9./_-]{0,315})(?:=(True|False|Unknown))?")


def _conditions(source: Mapping[str, str], name: str) -> frozenset[tuple[str, str]]:
    """Parse a list such as "KernelDeadlock,GpuHealthy=False". A type without a status means True."""
    found = set()
    for word in source.get(name, "").replace(",", " ").split():
        match = _CONDITION.fullmatch(word)
        if match is None or match[1] == "Ready":
            raise ConfigError(
                f"{name} contains {word!r}, expected the type of a condition that a node-problem detector "
                "sets, such as KernelDeadlock or GpuHealthy=False: nodes that are not Ready are detected "
                "in any case; correct operator.failingNodeConditions of the chart"
            )
        found.add((match[1], match[2] or "True"))
    return frozenset(found)


_TAINT = re.compile(
    r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
)
_LOST_NODE_KEYS = frozenset(taint.key for taint in LOST_NODE_TAINTS)


def _taints(source: Mapping[str, str], name: str) -> frozenset[str]:
    """Parse a list of keys of taints."""
    keys = source.get(name, "").replace(",", " ").split()
    for key in keys:
        if _TAINT.fullmatch(key) is None or key in _LOST_NODE_KEYS:
            raise ConfigError(
                f"{name} contains {key!r}, expected the key of a taint, such as "
                "aws-node-termination-handler/spot-itn, without value and effect: nodes that Kubernetes "
                "taints as lost are detected in any case; correct operator.leavingNodeTaints of the chart"
            )
    return frozenset(keys)


def _required(source: Mapping[str, str], name: str) -> str:
    value = source.get(name, "")
    if not value:
        raise ConfigError(f"environment variable {name} is not set: the chart sets it; set it too")
    return value


def _whole_number(source: Mapping[str, str], name: str, default: int) -> int:
    raw = source.get(name)
    if raw is None or raw == "":
        return default
    if not raw.isdecimal():
        raise ConfigError(f"{name}={raw!r}: expected a whole number >= 0")
    return int(raw)


def _seconds(source: Mapping[str, str], name: str, default: int) -> int:
    found = _whole_number(source, name, default)
    if not 2 <= found <= 600:
        raise ConfigError(f"{name}={found}: expected 2 to 600 seconds")
    return found
