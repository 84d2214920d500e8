"""Write a job's status even if the API server refuses a part of it.

The status contains the round, on which the job depends, and details for users that sidecars reported. A
detail that violates the CRD must not prevent the write of the round: the write would be refused in each pass,
and the job would never recover.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast_core.api import Gang, JobCondition, TrainingJobStatus, changed, merge_patch
from holdfast_operator.base import logs
from holdfast_operator.kube.api import ApiError
from holdfast_operator.kube.cluster import Cluster

_INVALID = 422
_DETAILS = frozenset({JobCondition.LAST_CHECKPOINT_SUCCEEDED, JobCondition.REMOTE_TIER_HEALTHY})


async def write_status(
    cluster: Cluster, job: Gang, resource_version: str, status: TrainingJobStatus
) -> tuple[Mapping[str, Any], TrainingJobStatus]:
    """Write the status. If the API server refuses it as invalid, write it again with the present details.

    Returns:
        The job as the API server has it then, and the status that was written.

    Raises:
        ConflictError: The job is gone, or no longer at `resource_version`.
        ApiError: The API server refused the write for another reason, or refused the second one as well.
    """

    async def write(wanted: TrainingJobStatus) -> Mapping[str, Any]:
        reply: Mapping[str, Any] = await cluster.patch_status(
            job.KIND, job.namespace, job.name, resource_version, merge_patch(wanted)
        )
        return reply

    try:
        return await write(status), status
    except ApiError as error:
        kept = with_known_details(status, job.status)
        if error.status != _INVALID or kept == status:
            raise
        logs.warning(
            f"the API server refused the status: {error}. It is written again without the new "
            "details",
            namespace=job.namespace,
            job=job.name,
        )
    return await write(kept), kept


def with_known_details(new: TrainingJobStatus, known: TrainingJobStatus) -> TrainingJobStatus:
    """Return `new` with the details of `known`, the status that the API server has.

    A detail is a part on which no decision of a later pass depends. The messages of all other conditions
    become empty.
    """
    conditions = (
        (known.condition(c.type) if c.type in _DETAILS else changed(c, message=""))
        for c in new.conditions
    )
    return changed(
        new,
        step=known.step,
        recoveries=known.recoveries,
        goodput=known.goodput,
        conditions=tuple(c for c in conditions if c is not None),
    )
