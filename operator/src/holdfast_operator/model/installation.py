"""Settings of the installation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkerNetwork:
    """Settings of the installation for the network of workers."""

    operator_namespace: str
    operator_labels: tuple[tuple[str, str], ...]
    """Labels that select the operator's pod."""
    metrics_from: tuple[dict[str, Any], ...] = ()
    """NetworkPolicyPeers that may read metrics. Empty: any client may read them."""


@dataclass(frozen=True, slots=True)
class SidecarSettings:
    """Settings of the installation for the sidecar container."""

    image: str
    pull_policy: str = "IfNotPresent"
    network: WorkerNetwork | None = None
    """Settings of the workers' NetworkPolicy. None: the operator creates none."""
