"""Carry out a decision, in a safe order.

1. The status write, alone. If it fails, the pass ends. A conflict shows that the decision is based on an old
   object. If the API server refuses a part of the status, the rest is written: a detail that a sidecar
   reported and that violates the CRD must not prevent the write of the round. The write would be refused in
   each pass, and the job would never recover.
2. Calls to sidecars are started.
3. NetworkPolicy, Service and certificates, which pods need.
4. Pods, placeholders and the PodDisruptionBudget. No worker is created if stage 3 failed.
5. Checkpoint objects and deletes.
6. Events.

The requests of one stage are concurrent. In stages 3 to 5 the error of one does not stop the others: all are
idempotent, and the next pass repeats them. This module holds no state and decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from holdfast_core.api import (
    Checkpoint,
    Gang,
    JobCondition,
    TrainingJobStatus,
    changed,
    merge_patch,
)
from holdfast_core.errors import HoldfastError
from holdfast_core.messages.schema import Prune, PruneReply
from holdfast_operator.base import logs
from holdfast_operator.kube.api import ApiError, ConflictError
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.model import labels
from holdfast_operator.model.actions import (
    Action,
    BeginRound,
    Call,
    Decision,
    Delete,
    DesiredObject,
    EmitEvent,
    ReleasePod,
    StatusWrite,
    described,
)
from holdfast_operator.model.job import JobMemory, Observed

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


CONCURRENT_CALLS = 32
"""Largest number of concurrent calls for one decision."""

_NEEDED_BY_PODS = frozenset({labels.NETWORK_POLICY, labels.SERVICE, labels.SECRET})


class Effects(Protocol):
    """Writes to the Kubernetes API, calls to sidecars, and Events. `effects.JobEffects` implements it.

    Methods raise only errors of holdfast_core.errors, ConflictError and NameTakenError. The implementation
    keeps the replies of sidecars, which are part of the next Observed. The reply to a prune is the exception.
    """

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


@dataclass(frozen=True, slots=True)
class ActionFailed:
    action: Action
    error: HoldfastError

    def __str__(self) -> str:
        return f"{described(self.action)}: {self.error}"


class ActionsFailed(HoldfastError):
    """Error of a pass in which actions failed. The text names the first of them."""

    def __init__(self, failed: tuple[ActionFailed, ...], attempted: int) -> None:
        super().__init__(f"{len(failed)} of {attempted} actions failed: {failed[0]}")
        self.first = failed[0]


@dataclass(frozen=True, slots=True)
class Applied:
    """Result of carrying out a decision."""

    conflict: bool = False
    """Whether the job had changed since it was observed. Then no action was carried out."""
    not_gone: tuple[str, ...] = ()
    """Names of pods that the decision treated as gone and that exist, because the cache lags. If there is
    one, no action was carried out."""
    failed: tuple[ActionFailed, ...] = ()
    attempted: int = 0
    """Number of actions that were tried."""

    @property
    def complete(self) -> bool:
        return not (self.conflict or self.not_gone or self.failed)

    @property
    def error(self) -> ActionsFailed | None:
        return ActionsFailed(self.failed, self.attempted) if self.failed else None


async def apply(decision: Decision, observed: Observed, effects: Effects) -> Applied:
    """Carry out a decision.

    Each HoldfastError is returned in the result. Other exceptions, such as cancellation, are raised.
    """
    job = observed.job
    if decision.status is not None:
        outcome = await _write(decision.status, observed, effects)
        if not outcome.complete:
            return outcome
    for call in decision.calls:
        effects.call(job, call)

    async def one(action: DesiredObject | Delete | ReleasePod) -> None:
        if isinstance(action, DesiredObject):
            await effects.put(job, action)
        elif not isinstance(action, Delete) or _data_is_gone(action, observed, effects):
            await effects.delete(job, action)

    absent = [o for o in decision.objects if not effects.is_present(job, o)]
    first = [o for o in absent if o.kind in _NEEDED_BY_PODS]
    records = [o for o in absent if o.kind == Checkpoint.KIND]
    then = [o for o in absent if o not in first and o not in records]
    failed = await _all(first, one)
    if failed:
        # Without its Secret, a pod would only wait in ContainerCreating.
        then = [o for o in then if not _is_worker(o)]
    failed += await _all(then, one)
    failed += await _all([*records, *decision.deletes], one)
    for event in decision.events:
        await effects.emit(job, event)
    writes = 0 if decision.status is None else 1
    attempted = writes + len(decision.calls) + len(absent) + len(decision.deletes)
    return Applied(failed=tuple(failed), attempted=attempted)


def memory_after(decision: Decision, observed: Observed, applied: Applied) -> JobMemory:
    """Return the memory for the next Observed, corrected for the actions that failed. Pure.

    Times at which a state was first seen are kept even if a call failed: a seal that fails in each pass must
    not restart the wait for holders in each pass. Records of actions that were not carried out are dropped.
    The time of a status write is kept even if the write failed. So the operator tries to write progress as
    rarely while the API server is away as at any other time, and the writes of all jobs are not due at the
    same moment when it is back.
    """
    refused, old = _refused_create(applied), observed.memory
    new = replace(decision.memory, create_refused=refused, record_refused=_refused_record(applied))
    if any(map(is_placeholder, decision.objects)):
        new = replace(new, placeholders_refused=_refused_placeholder(applied))
    written = not (
        applied.conflict
        or applied.not_gone
        or any(isinstance(f.action, StatusWrite) for f in applied.failed)
    )
    if written:
        unmarked = {o.name for o, _ in _failed_objects(applied) if o.kind == Checkpoint.KIND}
        requests = (
            replace(r, marked=r.marked and r.name not in unmarked) for r in new.save_requests
        )
        return replace(new, save_requests=tuple(requests))
    same_round = old.round == new.round
    return replace(
        new,
        create_refused=old.create_refused if same_round else "",
        record_refused=old.record_refused if same_round else "",
        placeholders_refused=old.placeholders_refused if same_round else "",
        save_requests=old.save_requests,
        done=old.done if same_round else {},
        levels_written_at=new.levels_written_at if applied.failed else old.levels_written_at,
        counted_at=new.counted_at if old.counted_at is None else old.counted_at,
        blocked_counted_seconds=old.blocked_counted_seconds if same_round else 0.0,
    )


def _failed_objects(applied: Applied) -> list[tuple[DesiredObject, HoldfastError]]:
    return [(f.action, f.error) for f in applied.failed if isinstance(f.action, DesiredObject)]


def _refused_create(applied: Applied) -> str:
    needed = [
        (o, e) for o, e in _failed_objects(applied) if o.kind in _NEEDED_BY_PODS or _is_worker(o)
    ]
    if not needed:
        return ""
    (first, error), more = needed[0], len(needed) - 1
    others = f" (and {more} more)" if more else ""
    return f"{described(first)}{others} was refused: {error}"


def _refused_placeholder(applied: Applied) -> str:
    errors = [str(error) for o, error in _failed_objects(applied) if is_placeholder(o)]
    return errors[0] if errors else ""


def _refused_record(applied: Applied) -> str:
    for wanted, error in _failed_objects(applied):
        records = wanted.kind == Checkpoint.KIND and "spec" in wanted.body
        if records and not isinstance(error, ConflictError):
            return f"Checkpoint {wanted.name} cannot be written: {error}"
    return ""


def is_placeholder(wanted: DesiredObject) -> bool:
    """Return whether the object is a placeholder of a missing worker."""
    return wanted.labels.get(labels.COMPONENT) == labels.COMPONENT_PLACEHOLDER


def _is_worker(wanted: DesiredObject) -> bool:
    return wanted.kind == labels.POD and not is_placeholder(wanted)


async def _write(write: StatusWrite, observed: Observed, effects: Effects) -> Applied:
    job = observed.job
    try:
        if isinstance(write, BeginRound):
            present = [n for n in write.confirm_gone if not await effects.pod_is_gone(job, n)]
            if present:
                return Applied(not_gone=tuple(present))
        await effects.write_status(job, write)
    except ConflictError:
        return Applied(conflict=True)
    except HoldfastError as error:
        return Applied(failed=(ActionFailed(write, error),), attempted=1)
    return Applied()


def _data_is_gone(delete: Delete, observed: Observed, effects: Effects) -> bool:
    """Return whether the object may be deleted: it has no data to delete, or the store has confirmed it."""
    if delete.data is None:
        return True
    reply = effects.call(observed.job, delete.data)
    message = delete.data.message
    wanted = message.checkpoints if isinstance(message, Prune) else ()
    gone = {(d.step, d.round) for d in reply.deleted} if reply is not None else set()
    return all((c.step, c.round) in gone for c in wanted)


async def _all(
    actions: Sequence[DesiredObject | Delete | ReleasePod],
    one: Callable[[DesiredObject | Delete | ReleasePod], Awaitable[None]],
) -> list[ActionFailed]:
    slots = asyncio.Semaphore(CONCURRENT_CALLS)

    async def guarded(action: DesiredObject | Delete | ReleasePod) -> ActionFailed | None:
        async with slots:
            try:
                await one(action)
            except HoldfastError as error:
                return ActionFailed(action, error)
            except Exception as error:
                error.add_note(described(action))  # the error alone names no object
                raise
        return None

    outcomes = await asyncio.gather(*(guarded(a) for a in actions))
    return [o for o in outcomes if o is not None]
