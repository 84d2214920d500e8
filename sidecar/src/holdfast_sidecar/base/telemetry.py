"""What a component reports of its work: numbers for Prometheus, and failures for the job's status."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_sidecar.base.failures import Failures
from holdfast_sidecar.base.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Telemetry:
    """The metrics and the current failures of one sidecar."""

    metrics: Metrics
    failures: Failures
