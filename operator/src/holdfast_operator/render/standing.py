"""The objects that a gang has for as long as it exists. Pure."""

from __future__ import annotations

from typing import Any

from holdfast_core.api import Gang
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.render.disruption_budget import render_disruption_budget
from holdfast_operator.render.network_policy import render_network_policy
from holdfast_operator.render.service import render_service


def standing_objects(job: Gang, workers: int, sidecar: SidecarSettings) -> list[dict[str, Any]]:
    """Return NetworkPolicy, Service and PodDisruptionBudget of a gang of this number of workers."""
    network = sidecar.network
    policies = [] if network is None else [render_network_policy(job, network)]
    return [*policies, render_service(job), render_disruption_budget(job, workers)]
