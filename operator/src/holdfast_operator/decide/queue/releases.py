"""Remove Kueue's finalizer from pods that would stay forever. Pure.

Kueue keeps the finalizer until the pod is replaced, its group has finished or its Workload is deleted. For
the pods of a job that is deleted, suspended or over, none of that may happen, and a pod on a lost node never
becomes Failed. So a pod that is being deleted loses the finalizer, and then ends as it would without Kueue:
its kubelet or a forced delete removes the object, and Kueue counts it until then.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.actions import ReleasePod
from holdfast_operator.model.job import PodView


def leaving(pods: Iterable[PodView]) -> list[ReleasePod]:
    """Return the releases of the pods that are being deleted."""
    return [
        ReleasePod(p.name, p.uid, ends_group=False)
        for p in pods
        if p.has_kueue_finalizer and p.terminating
    ]


def ended(pods: Iterable[PodView]) -> list[ReleasePod]:
    """Return the releases of pods that have ended and stay for their logs, of a job that is over.

    Kueue would otherwise wait for their replacements, and keep the quota of the group until then.
    """
    return [
        ReleasePod(p.name, p.uid, ends_group=True)
        for p in pods
        if p.has_kueue_finalizer and p.ended and not p.terminating
    ]


def due(world: World, *, is_over: bool) -> list[ReleasePod]:
    """Return all releases that are due.

    Args:
        world: The job and its pods.
        is_over: Whether the job has completed or failed.
    """
    pods = world.observed.pods
    return [*leaving(pods), *(ended(pods) if is_over else ())]
