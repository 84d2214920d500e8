"""What `apply` needs from the outside world: the Kubernetes client, the sidecar client, Events.

The edges implement it; tests implement it over an in-memory cluster. Methods raise only errors of
holdfast_core.errors, ConflictError and NameTakenError. Creates return normally if the object exists
and is the job's own, deletes if it is gone or has another uid. Replies of sidecars are kept by the
implementation and come back in the next Observed (inventory, AckedRound, reachability): `apply` does
not look into them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from holdfast_core.errors import HoldfastError
from holdfast_core.messages.schema import PruneReply
from holdfast_operator.model.actions import (
    AskSave,
    AskStop,
    CheckpointRecord,
    CreateCertificates,
    EmitEvent,
    PruneObject,
    SealWorker,
    SendRound,
)
from holdfast_operator.model.job import JobStatusView, JobView


class ConflictError(HoldfastError):
    """The object changed since it was read (409 on resourceVersion): observe, decide again."""


class NameTakenError(HoldfastError):
    """An object that is not ours has the name that ours would get: nothing is done to it."""


class Effects(Protocol):
    async def write_job_status(
        self, job: JobView, resource_version: str, status: JobStatusView
    ) -> None:
        """Replace the whole status (watch.views.status_to_dict). Raises ConflictError."""
        ...

    async def delete_job(self, job: JobView) -> None: ...

    async def pod_is_gone(self, job: JobView, name: str) -> bool:
        """A direct GET, not the cache: True if the job has no such pod, or it is on its way out."""
        ...

    async def create_pod(self, job: JobView, body: Mapping[str, Any]) -> None: ...

    async def delete_pod(self, job: JobView, name: str, uid: str, *, force: bool) -> None:
        """uid is a precondition; force: grace period 0."""
        ...

    async def create_network_policy(self, job: JobView, body: Mapping[str, Any]) -> None: ...

    async def create_service(self, job: JobView, body: Mapping[str, Any]) -> None: ...

    async def create_certificates(self, job: JobView, action: CreateCertificates) -> None:
        """Issue one leaf per pod and create the Secret (keys: render.names.certificate_items)."""
        ...

    async def delete_certificates(self, job: JobView, secret: str) -> None: ...

    async def create_checkpoint(
        self, job: JobView, body: Mapping[str, Any], record: CheckpointRecord
    ) -> None:
        """Create the object (if it is not there), then write its status. Raises NameTakenError
        where an object of that name is no record of this commit of this job."""
        ...

    async def update_checkpoint(
        self, job: JobView, name: str, resource_version: str, record: CheckpointRecord
    ) -> None:
        """Write the status; set spec.step if record.checkpoint is set and spec.step is not.
        Raises ConflictError."""
        ...

    async def delete_checkpoint(self, job: JobView, name: str, uid: str) -> None:
        """Remove our finalizer, if it is there, and delete the object."""
        ...

    async def seal(self, job: JobView, action: SealWorker) -> None: ...

    async def send_round(self, job: JobView, action: SendRound) -> None: ...

    async def ask_save(self, job: JobView, action: AskSave) -> None: ...

    async def ask_stop(self, job: JobView, action: AskStop) -> None: ...

    async def prune(self, job: JobView, action: PruneObject) -> PruneReply: ...

    async def emit(self, job: JobView, event: EmitEvent) -> None:
        """Best effort: rate-limited, never raises."""
        ...
