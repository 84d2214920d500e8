"""Settings of the installation that are part of the objects of every job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkerNetwork:
    """Settings of the installation for the network of workers."""

    operator_namespace: str
    operator_labels: tuple[tuple[str, str], ...]
    """Labels that select the operator's pod."""
    metrics_from: tuple[dict[str, Any], ...] = ()
    """NetworkPolicyPeers that may read metrics. Empty: any client may read them."""


def _default_resources() -> dict[str, Any]:
    return {
        "requests": {"cpu": "100m", "memory": "256Mi"},
        "limits": {"memory": "1Gi"},
    }


@dataclass(frozen=True, slots=True)
class SidecarSettings:
    """Settings of the installation for the sidecar container."""

    image: str
    pull_policy: str = "IfNotPresent"
    resources: Mapping[str, Any] = field(default_factory=_default_resources)
    """Resources of the container. The default has no CPU limit, because throttling would delay the durable
    write of a step."""
    drain_command: tuple[str, ...] = ("holdfast-sidecar", "pre-stop")
    probe_command: tuple[str, ...] = ("holdfast-sidecar", "healthz")
    network: WorkerNetwork | None = None
    """Settings of the workers' NetworkPolicy. None: the operator creates none."""
