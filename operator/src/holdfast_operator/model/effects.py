"""The interface that `apply` calls: writes to the Kubernetes API, calls to sidecars, Events.

`apply.job_effects` implements it. Tests implement it over an in-memory cluster.

Methods raise only errors of holdfast_core.errors, ConflictError and NameTakenError. A create returns
normally if the object exists and belongs to the job. A delete returns normally if the object is gone or
has another uid. The implementation keeps the replies of sidecars, which `apply` does not read: they are
part of the next Observed (inventory, AckedRound, reachability). The reply to a prune is the exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from holdfast_core.api import CheckpointStatus, Gang, TrainingJobStatus
from holdfast_core.errors import HoldfastError
from holdfast_core.messages.schema import PruneReply
from holdfast_operator.model.actions import (
    CreateCertificates,
    EmitEvent,
    FinishInterruptedCommit,
    PruneObject,
    ReleasePod,
    RequestSave,
    RequestStop,
    SealWorker,
    SendRound,
    UpdateCheckpoint,
)


class ConflictError(HoldfastError):
    """The object changed or disappeared after it was read. The caller must observe and decide again."""


class NameTakenError(HoldfastError):
    """An object that does not belong to the job has the name that the job's object would get.

    The operator leaves that object alone.
    """


class Effects(Protocol):
    async def write_job_status(
        self, job: Gang, resource_version: str, status: TrainingJobStatus
    ) -> None:
        """Replace the whole status (core.api.merge_patch).

        Raises:
            ConflictError: The job is no longer at `resource_version`.
        """
        ...

    async def delete_job(self, job: Gang) -> None: ...

    async def pod_is_gone(self, job: Gang, name: str) -> bool:
        """Return whether the job has no pod of this name, or the pod is being deleted.

        The answer comes from a direct GET and not from the cache.
        """
        ...

    async def create_pod(self, job: Gang, body: Mapping[str, Any]) -> None: ...

    async def delete_pod(self, job: Gang, name: str, uid: str, *, force: bool) -> None:
        """Delete the pod if it has this uid. With `force`, the grace period is 0."""
        ...

    async def release_pod(self, job: Gang, action: ReleasePod) -> None:
        """Remove Kueue's finalizer from the pod if it has this uid."""
        ...

    async def set_disruption_budget(self, job: Gang, body: Mapping[str, Any], workers: int) -> None:
        """Create the PodDisruptionBudget of this number of workers, or change the one that exists."""
        ...

    async def create_service(
        self, job: Gang, body: Mapping[str, Any], policy: Mapping[str, Any] | None
    ) -> None:
        """Create the NetworkPolicy of the job's pods, if there is to be one, and then their Service."""
        ...

    async def create_certificates(self, job: Gang, action: CreateCertificates) -> None:
        """Issue one leaf certificate per pod, and create the Secret that holds them.

        `render.names.certificate_items` gives the keys of the Secret.
        """
        ...

    async def delete_certificates(self, job: Gang, secret: str) -> None: ...

    async def create_checkpoint(
        self, job: Gang, body: Mapping[str, Any], status: CheckpointStatus
    ) -> None:
        """Create the object if it does not exist, then write its status.

        Raises:
            NameTakenError: An object of that name exists, and does not record this commit of this job.
        """
        ...

    async def update_checkpoint(self, job: Gang, action: UpdateCheckpoint) -> None:
        """Write spec.step and the finalizers if the action has them, then the status.

        Raises:
            ConflictError: The object is gone, or no longer at `resource_version`.
        """
        ...

    async def delete_checkpoint(self, job: Gang, name: str, uid: str) -> None:
        """Delete the object, and remove our finalizer if it has one. Do not delete its data."""
        ...

    async def seal(self, job: Gang, action: SealWorker) -> None: ...

    async def finish_commit(self, job: Gang, action: FinishInterruptedCommit) -> None: ...

    async def send_round(self, job: Gang, action: SendRound) -> None: ...

    async def request_save(self, job: Gang, action: RequestSave) -> None: ...

    async def request_stop(self, job: Gang, action: RequestStop) -> None: ...

    async def prune(self, job: Gang, action: PruneObject) -> PruneReply:
        """Return what the coordinator deleted in the object store, or an empty reply while it deletes."""
        ...

    async def emit(self, job: Gang, event: EmitEvent) -> None:
        """Emit a Kubernetes Event about the job, best effort: it is rate-limited and never raises."""
        ...
