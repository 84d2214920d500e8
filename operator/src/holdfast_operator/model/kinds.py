"""Kinds of the Kubernetes objects that the operator creates for a job, beside its own kinds."""

from __future__ import annotations

POD = "Pod"
SERVICE = "Service"
SECRET = "Secret"
NETWORK_POLICY = "NetworkPolicy"
DISRUPTION_BUDGET = "PodDisruptionBudget"
