"""The interface that `apply` calls: writes to the Kubernetes API, calls to sidecars, Events.

`apply.job_effects` implements it. The demo implements it over processes.

Methods raise only errors of holdfast_core.errors, ConflictError and NameTakenError. The implementation keeps
the replies of sidecars, which `apply` does not read: they are part of the next Observed (inventory,
AckedRound, reachability). The reply to a prune is the exception.
"""

from __future__ import annotations

from typing import Protocol

from holdfast_core.api import Gang
from holdfast_core.errors import HoldfastError
from holdfast_core.messages.schema import PruneReply
from holdfast_operator.model.actions import (
    Call,
    Delete,
    DesiredObject,
    EmitEvent,
    ReleasePod,
    StatusWrite,
)


class ConflictError(HoldfastError):
    """The object changed or disappeared after it was read. The caller must observe and decide again."""


class NameTakenError(HoldfastError):
    """An object that does not belong to the job has the name that the job's object would get.

    The operator leaves that object alone.
    """


class Effects(Protocol):
    async def write_status(self, job: Gang, write: StatusWrite) -> None:
        """Replace the whole status (core.api.merge_patch).

        Raises:
            ConflictError: The job is no longer at the resourceVersion of the write.
        """
        ...

    async def pod_is_gone(self, job: Gang, name: str) -> bool:
        """Return whether the job has no pod of this name, or the pod is being deleted.

        The answer comes from a direct GET and not from the cache.
        """
        ...

    def is_present(self, job: Gang, wanted: DesiredObject) -> bool:
        """Return whether this object is not watched, and was put or found as it should be a while ago."""
        ...

    async def put(self, job: Gang, wanted: DesiredObject) -> None:
        """Create the object, or make the one that exists what it should be.

        Raises:
            ConflictError: The object is no longer at the resourceVersion of the body.
            NameTakenError: An object of that name exists that is not the job's.
        """
        ...

    async def delete(self, job: Gang, delete: Delete | ReleasePod) -> None:
        """Delete or release the object. Return normally if it is gone or has another uid."""
        ...

    def call(self, job: Gang, call: Call) -> PruneReply | None:
        """Start a call to a sidecar, unless the same one is under way. Never raises.

        Returns:
            The reply to a prune that has ended since, else None.
        """
        ...

    async def emit(self, job: Gang, event: EmitEvent) -> None:
        """Emit a Kubernetes Event about the job, best effort: it is rate-limited and never raises."""
        ...
