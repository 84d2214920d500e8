"""Settings of the installation, and how often it looks at each job.

Nothing waits for routine news: the progress of the ranks, the goodput, the age of the newest checkpoint. With
few jobs they are seconds old. With a thousand jobs they would take all of the operator's time, so they are as
old as the time in which the operator gets round to each job.
"""

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


JOBS_PER_SECOND = 25.0
"""Jobs that are looked at in a second without an urgent reason. A look is an answer to a poll and a pass, and
some write the status. It takes some 5 ms of processor time."""


def routine_seconds(jobs: int) -> float:
    """Return the shortest time between two routine looks at one of so many jobs."""
    return jobs / JOBS_PER_SECOND
