"""Write one condition of a gang and leave the rest of its status as it is.

Decisions write a status as a whole. This is for the two cases in which there is no decision: the job cannot
be parsed, or the pass over it failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from holdfast_core.api import ConditionStatus, JobCondition
from holdfast_core.clock import stamp
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.model.reasons import Reason


@dataclass(frozen=True, slots=True)
class NewCondition:
    type: JobCondition
    status: ConditionStatus
    reason: Reason
    message: str


async def write_condition(
    cluster: Cluster,
    kind: str,
    namespace: str,
    name: str,
    uid: str,
    condition: NewCondition,
    now: datetime,
) -> None:
    """Write the condition with the resourceVersion of a direct read.

    Nothing is written if the object is gone or the name has another uid now, or if status.conditions is not a
    list of conditions. Raises ConflictError and ApiError.
    """
    raw = await cluster.get(kind, namespace, name)
    if raw is None or raw["metadata"]["uid"] != uid:
        return
    conditions = _with(condition, raw, stamp(now))
    if conditions is None:
        return
    version = str(raw["metadata"]["resourceVersion"])
    await cluster.patch_status(kind, namespace, name, version, {"conditions": conditions})


def _with(condition: NewCondition, raw: Mapping[str, Any], now: str) -> list[Any] | None:
    """Return the conditions of `raw` with this one, or None if there is nothing to write."""
    conditions = (raw.get("status") or {}).get("conditions") or []
    if not isinstance(conditions, list) or not all(isinstance(c, Mapping) for c in conditions):
        return None
    kind, value = condition.type.value, condition.status.value
    old: Mapping[str, Any] = next((c for c in conditions if c.get("type") == kind), {})
    if (old.get("status"), old.get("message")) == (value, condition.message):
        return None
    same = old.get("status") == value
    new = {
        "type": kind,
        "status": value,
        "reason": condition.reason.value,
        "message": condition.message,
        "lastTransitionTime": old["lastTransitionTime"] if same else now,
        "observedGeneration": raw["metadata"].get("generation") or 0,
    }
    return [*(c for c in conditions if c.get("type") != kind), new]
