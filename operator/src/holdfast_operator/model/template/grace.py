"""How long a worker pod may take to leave: its grace period, and the part in which its ranks stop. Pure.

A long grace period delays nothing: a pod leaves as soon as its sidecar has flushed, and its launcher kills
ranks that do not stop in their part. So the bounds are wide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast_core.api import Gang
from holdfast_operator.model.template.shape import pod_spec

STOP_SECONDS = 30
"""Shortest time for the ranks to reach the step at which they stop, save it and exit."""
STOP_STEPS = 4
"""Steps of mean length in this time: the ranks stop at a step two ahead of the request (ADR 0017)."""
FLUSH_SECONDS = 30
"""Shortest time for the flush."""
UNMEASURED_FLUSH_SECONDS = 120
"""Time for the flush before one was measured."""
MAX_GRACE_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Grace:
    """Times of a pod that leaves, in seconds since its SIGTERM."""

    stop_seconds: int
    """The launcher kills the ranks that still run after this time."""
    total_seconds: int
    """terminationGracePeriodSeconds of the pod."""


def grace_of(job: Gang) -> Grace:
    """Return the times of new pods: the template's grace period if it has one, else an upper bound.

    Half of a grace period that the user has chosen is for the ranks. Adopted pods have the grace period of
    their controller's template, which the admission policy divides in the same way.
    """
    chosen = pod_spec(job).get("terminationGracePeriodSeconds")
    if isinstance(chosen, int):
        return Grace(chosen // 2, chosen)
    status = job.status
    stop, flush = STOP_SECONDS, UNMEASURED_FLUSH_SECONDS
    if status.step and status.goodput is not None:
        mean = status.goodput.training_seconds / status.step
        stop = max(stop, math.ceil(STOP_STEPS * mean))
    if status.flush_seconds is not None:
        flush = max(FLUSH_SECONDS, 2 * status.flush_seconds)
    stop = min(stop, MAX_GRACE_SECONDS // 2)
    return Grace(stop, min(stop + flush, MAX_GRACE_SECONDS))
