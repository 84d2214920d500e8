"""What the restart policy of another controller costs an adopted gang. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast_operator.model.job import OwnerView

_DEFAULT_BACKOFF_LIMIT = 6
"""spec.backoffLimit of a Job that does not set it."""

NO_OWNER = OwnerView(
    "no controller creates a lost pod of this gang again: create it yourself, or let a Job create it",
    loses_all_copies=False,
)

_LOST = "every copy in memory and on nodes is lost, and only a step in the object store is left"


def other_owner(kind: str, name: str) -> OwnerView:
    text = (
        f"{kind} {name} creates the pods, and Holdfast does not know its restart policy: if it deletes the "
        "remaining pods after a failure, only a step in the object store is left"
    )
    return OwnerView(text, loses_all_copies=False)


def owner_of_job(raw: Mapping[str, Any]) -> OwnerView:
    """Return what the restart policy of a Job of batch/v1 costs."""
    meta, spec = raw["metadata"], raw.get("spec") or {}
    limit = spec.get("backoffLimit")
    limit = _DEFAULT_BACKOFF_LIMIT if limit is None else int(limit)
    job = f"Job {meta['name']} (backoffLimit {limit})"
    parent = next((r for r in meta.get("ownerReferences") or [] if r.get("controller")), None)
    if spec.get("backoffLimitPerIndex") is not None:
        return OwnerView(f"{job} creates a lost pod again, index by index", loses_all_copies=False)
    if limit == 0:
        end = "fails, which deletes the remaining pods"
        if parent is not None:
            end = f"fails, and {parent['kind']} {parent['name']} deletes all pods and creates them again"
        return OwnerView(
            f"when one pod fails, {job} {end}: {_LOST}",
            loses_all_copies=True,
            remedy="set a backoffLimit above 0 on the Jobs of the pods",
        )
    text = (
        f"{job} creates a lost pod again. After {limit} failed pods all pods are deleted, and only a step in "
        "the object store is left"
    )
    return OwnerView(text, loses_all_copies=False)
