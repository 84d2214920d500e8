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
idempotent, and the next pass repeats them. Nothing is decided here.

Writes to the API are awaited. Calls to sidecars are only started, and their results are part of the next
Observed. No watch shows the Services, policies, budgets and Secrets of jobs. Their puts are repeated from
time to time, in case one was deleted.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from holdfast_core import logs
from holdfast_core.api import (
    Checkpoint,
    Gang,
    JobCondition,
    TrainingJobStatus,
    changed,
    merge_patch,
)
from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import JobUid
from holdfast_operator.base.metrics import Metrics
from holdfast_operator.kube.api import ApiError, ConflictError, NameTakenError
from holdfast_operator.kube.cluster import Cluster, Events
from holdfast_operator.model import labels
from holdfast_operator.model.actions import (
    Action,
    BeginRound,
    Call,
    Decision,
    Delete,
    DesiredObject,
    EmitEvent,
    EventKind,
    ReleasePod,
    StatusWrite,
    described,
)
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.job import JobMemory, Observed
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.render import standing_objects
from holdfast_operator.sidecars.calls import Sidecars
from holdfast_operator.sidecars.certificates import Certificates
from holdfast_operator.watch.cache import ClusterCache

_INVALID = 422
_DETAILS = frozenset({JobCondition.LAST_CHECKPOINT_SUCCEEDED, JobCondition.REMOTE_TIER_HEALTHY})


async def write_status(
    cluster: Cluster, job: Gang, status: TrainingJobStatus
) -> tuple[Mapping[str, Any], TrainingJobStatus]:
    """Write the status. If the API server refuses it as invalid, write it again with the present details.

    Returns:
        The job as the API server has it then, and the status that was written.

    Raises:
        ConflictError: The job is gone, or has changed since it was read.
        ApiError: The API server refused the write for another reason, or refused the second one as well.
    """

    async def write(wanted: TrainingJobStatus) -> Mapping[str, Any]:
        reply: Mapping[str, Any] = await cluster.patch_status(
            job.KIND, job.namespace, job.name, job.resource_version, merge_patch(wanted)
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
    """Writes to the Kubernetes API, calls to sidecars, and Events. `JobEffects` implements it.

    Methods raise only errors of holdfast_core.errors, ConflictError and NameTakenError. The implementation
    keeps the replies of sidecars, which are part of the next Observed. The reply to a prune is the exception.
    """

    async def write_status(self, job: Gang, status: TrainingJobStatus) -> None:
        """Replace the whole status (core.api.merge_patch).

        Raises:
            ConflictError: The job has changed since it was read.
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

    def call(self, job: Gang, call: Call) -> bool:
        """Start a call to a sidecar, unless the same one is under way. Never raises.

        Returns:
            Whether the call is a prune that has succeeded since.
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
        await effects.write_status(job, write.status)
    except ConflictError:
        return Applied(conflict=True)
    except HoldfastError as error:
        return Applied(failed=(ActionFailed(write, error),), attempted=1)
    return Applied()


def _data_is_gone(delete: Delete, observed: Observed, effects: Effects) -> bool:
    """Return whether the object may be deleted: it has no data to delete, or the store has confirmed it."""
    if delete.data is None:
        return True
    return effects.call(observed.job, delete.data)


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


# --------------------------------------------------------------------------- objects that are there


SURE_SECONDS = {
    labels.NETWORK_POLICY: 600.0,
    labels.SERVICE: 600.0,
    labels.DISRUPTION_BUDGET: 600.0,
    labels.SECRET: 60.0,
}
"""Seconds after which an object is put again, by its kind. The operator does not watch these kinds, and a pod
that waits to start would wait forever for a Secret that somebody has deleted."""


class Present:
    """Records of the objects that are not watched, by job."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[JobUid, dict[tuple[str, str], tuple[Mapping[str, Any], float]]] = {}
        """Body and time of the last put, by kind and name."""
        self._taken: dict[JobUid, set[str]] = {}

    def is_fresh(self, job: Gang, wanted: DesiredObject) -> bool:
        """Return whether the object was put as it should be within SURE_SECONDS."""
        body, at = self._known.get(job.uid, {}).get((wanted.kind, wanted.name), (None, 0.0))
        limit = SURE_SECONDS.get(wanted.kind, 0.0)
        return body == wanted.body and self._clock.monotonic() - at < limit

    def is_known(self, job: Gang, wanted: DesiredObject) -> bool:
        return (wanted.kind, wanted.name) in self._known.get(job.uid, {})

    def put(self, job: Gang, wanted: DesiredObject) -> None:
        """Record that the object is as it should be."""
        if wanted.kind in SURE_SECONDS:
            self._record(job, wanted.body, self._clock.monotonic())

    def failed(self, job: Gang, wanted: DesiredObject) -> None:
        """Take an object for present if it was before, because looking for it failed."""
        body, _ = self._known.get(job.uid, {}).get((wanted.kind, wanted.name), (None, 0.0))
        if wanted.kind != labels.SECRET and body == wanted.body:
            self._record(job, wanted.body, self._found_earlier(job))

    def assume(self, job: Gang, sidecar: SidecarSettings) -> None:
        """Take the objects of a gang that trains for present, unless this process has put any.

        An earlier process has created them. A new one looks for them later: the calls for a thousand jobs
        would delay the first passes by half a minute.
        """
        if job.uid in self._known or not job.status.is_true(JobCondition.RUNNING):
            return
        for body in standing_objects(job, len(job.status.members), sidecar):
            self._record(job, body, self._found_earlier(job))

    def _record(self, job: Gang, body: Mapping[str, Any], at: float) -> None:
        key = (str(body["kind"]), str(body["metadata"]["name"]))
        self._known.setdefault(job.uid, {})[key] = (body, at)

    def _found_earlier(self, job: Gang) -> float:
        """Return when an object counts as found that is taken for present, because looking for it failed.

        It is a time within the last ten minutes that differs between jobs. When the API server is back after
        ten minutes, the operator would otherwise look for the objects of all jobs at the same moment, before
        it sees which pods were lost meanwhile.
        """
        part = zlib.crc32(job.uid.encode()) / 2**32
        return self._clock.monotonic() - part * SURE_SECONDS[labels.SERVICE]

    def secrets(self, uid: JobUid) -> frozenset[str]:
        """Return the certificate Secrets of the job that this process created or found."""
        return frozenset(name for kind, name in self._known.get(uid, {}) if kind == labels.SECRET)

    def taken_secrets(self, uid: JobUid) -> frozenset[str]:
        """Return the names for Secrets of the job that this process found in use for something else."""
        return frozenset(self._taken.get(uid, ()))

    def take_name(self, job: Gang, secret: str) -> None:
        """Record that an object that is not the job's has the name for a Secret."""
        self._taken.setdefault(job.uid, set()).add(secret)

    def deleted(self, job: Gang, kind: str, name: str) -> None:
        self._known.get(job.uid, {}).pop((kind, name), None)

    def forget(self, uid: JobUid) -> None:
        """Drop the records of a job that is gone."""
        self._known.pop(uid, None)
        self._taken.pop(uid, None)


# --------------------------------------------------------------------------- effects


_LOGGED = frozenset(
    {Reason.RECOVERED, Reason.RECOVERY_INTERRUPTED, Reason.PRUNING, Reason.DATA_KEPT}
)
"""Reasons of the Events that are also logged: each round, and what is deleted or left to a person."""
_MAY_BE_MISSING = frozenset({labels.SERVICE, labels.DISRUPTION_BUDGET})
"""Kinds without which the job can run. DNS names of the Service are for users: the gang gets its addresses in
ROUND."""


class JobEffects:
    """The effects of decisions on the cluster and on sidecars."""

    def __init__(
        self,
        cluster: Cluster,
        cache: ClusterCache,
        sidecars: Sidecars,
        certificates: Certificates,
        events: Events,
        metrics: Metrics,
        present: Present,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._sidecars = sidecars
        self._certificates = certificates
        self._events = events
        self._metrics = metrics
        self._present = present

    async def write_status(self, job: Gang, status: TrainingJobStatus) -> None:
        reply, written = await write_status(self._cluster, job, status)
        self._cache.take_job(job, reply)
        self._metrics.status_written(job, written)

    async def pod_is_gone(self, job: Gang, name: str) -> bool:
        return await self._cluster.pod_is_gone(job.namespace, name, job.uid)

    # ------------------------------------------------------------------ objects

    def is_present(self, job: Gang, wanted: DesiredObject) -> bool:
        return self._present.is_fresh(job, wanted)

    async def put(self, job: Gang, wanted: DesiredObject) -> None:
        """Create the object, or compare the one that exists.

        Another owner's Service or PodDisruptionBudget only leads to an Event.
        """
        try:
            await self._put(job, wanted)
        except NameTakenError as error:
            if wanted.kind != labels.POD:
                await self._warn(job, Reason.NAME_TAKEN, str(error))
            if wanted.kind not in _MAY_BE_MISSING:
                raise
        except HoldfastError:
            self._present.failed(job, wanted)
            raise
        self._present.put(job, wanted)

    async def _put(self, job: Gang, wanted: DesiredObject) -> None:
        body, cluster = wanted.body, self._cluster
        match wanted.kind:
            case labels.SECRET:
                await self._put_certificates(job, wanted)
            case labels.DISRUPTION_BUDGET:
                await cluster.set_disruption_budget(body)
            case labels.NETWORK_POLICY:
                await cluster.create(body)  # the operator may not read the owner of one that exists
            case Checkpoint.KIND if wanted.resource_version is not None:
                await self._change_checkpoint(body, wanted.resource_version)
            case Checkpoint.KIND:
                await self._create_checkpoint(job, body)
            case _:
                created = await cluster.create_owned(body)
                if wanted.kind == labels.POD and not created.existed:
                    self._cache.expect(job, created.uid, created=True)

    async def _put_certificates(self, job: Gang, wanted: DesiredObject) -> None:
        """Create the Secret. If one exists that no pod of the job mounts, its name is taken.

        The operator may not read it. It may be the user's, or of an operator that ended before it created
        the pods.

        Raises:
            NameTakenError: The name is taken. The next decision takes another one.
        """
        data = await self._certificates.round_data(job, wanted.leaves)
        created = await self._cluster.create_secret(wanted.body, data)
        if created.existed and not wanted.in_use and not self._present.is_known(job, wanted):
            self._present.take_name(job, wanted.name)
            raise NameTakenError(
                f"Secret {job.namespace}/{wanted.name} exists, and no pod of this job mounts it. The "
                "operator may not read it, so the certificates go to a Secret of another name. Delete this "
                "one if nothing else needs it"
            )

    async def _create_checkpoint(self, job: Gang, body: Mapping[str, Any]) -> None:
        """Create the object, then write its status.

        An object that exists already must be the record of this commit. It gets the status only if it has
        none, which happens if an operator ended between the two writes.

        Raises:
            ConflictError: The object was deleted or changed after it was created.
            NameTakenError: The object that exists is not a record of this commit.
        """
        name, cluster, status = str(body["metadata"]["name"]), self._cluster, body["status"]
        await cluster.create({k: v for k, v in body.items() if k != "status"})
        raw = await cluster.get(Checkpoint.KIND, job.namespace, name)
        if raw is None:
            raise ConflictError(
                f"Checkpoint {job.namespace}/{name} was deleted after it was created"
            )
        if not _is_record_of(raw, body):
            raise NameTakenError(
                f"Checkpoint {job.namespace}/{name} cannot record step {body['spec']['step']} of round "
                f"{status['round']} of job {job.name} (uid {job.uid}): an object of that name exists that is "
                "no record of this commit; it is left alone, delete it or rename it so that the job can go on"
            )
        if not (raw.get("status") or {}).get("phase"):
            version = str(raw["metadata"]["resourceVersion"])
            status = {**status, "objectUid": raw["metadata"]["uid"]}
            await cluster.patch_status(Checkpoint.KIND, job.namespace, name, version, status)

    async def _change_checkpoint(self, body: Mapping[str, Any], version: str) -> None:
        """Write the spec if the body has it, then the status."""
        meta, kind = body["metadata"], Checkpoint.KIND
        if "spec" in body:
            patch = {"spec": body["spec"]}
            version = await self._cluster.patch(
                kind, meta["namespace"], meta["name"], version, patch
            )
        await self._cluster.patch_status(
            kind, meta["namespace"], meta["name"], version, body["status"]
        )

    # ------------------------------------------------------------------ deletes

    async def delete(self, job: Gang, delete: Delete | ReleasePod) -> None:
        namespace = job.namespace
        if isinstance(delete, ReleasePod):
            await self._cluster.release_pod(
                namespace, delete.name, delete.uid, ends_group=delete.ends_group
            )
            return
        if delete.kind == Checkpoint.KIND:
            await self.release_checkpoint(namespace, delete.name, delete.uid)
            if delete.data is not None:
                self._metrics.pruned(job)
            return
        options: dict[str, Any] = {"gracePeriodSeconds": 0} if delete.force else {}
        if delete.kind == job.KIND:
            options["propagationPolicy"] = "Background"
        await self._cluster.delete(delete.kind, namespace, delete.name, delete.uid, options)
        if delete.kind == labels.POD:
            self._cache.expect(job, delete.uid, created=False)
        self._present.deleted(job, delete.kind, delete.name)

    async def release_checkpoint(self, namespace: str, name: str, uid: str) -> None:
        """Delete the object and remove our finalizer from it. Its data stays."""
        kind, cluster = Checkpoint.KIND, self._cluster
        raw = await cluster.get(kind, namespace, name)
        if raw is None or raw["metadata"]["uid"] != uid:
            return
        await cluster.delete(kind, namespace, name, uid)
        kept = [f for f in raw["metadata"].get("finalizers") or [] if f != Checkpoint.FINALIZER]
        if kept == (raw["metadata"].get("finalizers") or []):
            return
        again = await cluster.get(kind, namespace, name)
        if again is not None and again["metadata"]["uid"] == uid:
            version = str(again["metadata"]["resourceVersion"])
            finalizers = {"metadata": {"finalizers": kept or None}}
            await cluster.patch(kind, namespace, name, version, finalizers)

    # ------------------------------------------------------------------ sidecars, Events

    def call(self, job: Gang, call: Call) -> bool:
        return self._sidecars.call(job.uid, call)

    async def _warn(self, job: Gang, reason: Reason, message: str) -> None:
        await self.emit(job, EmitEvent(EventKind.WARNING, reason, message))

    async def emit(self, job: Gang, event: EmitEvent) -> None:
        if event.reason in _LOGGED:  # of a reason, one Event a minute is written
            logs.info(event.message, namespace=job.namespace, job=job.name)
        await self._events.emit(job, event.kind, event.reason, event.message)


def _is_record_of(raw: Mapping[str, Any], body: Mapping[str, Any]) -> bool:
    """Return whether an existing Checkpoint is the record of this commit of this job.

    It must have the job's uid as a label, the job's name and the step in its spec, and a status that is empty
    or the same. Only the operator may write that status.
    """
    its_labels, spec = raw["metadata"].get("labels") or {}, raw.get("spec") or {}
    known, status = raw.get("status") or {}, body["status"]
    return (
        its_labels.get(labels.JOB_UID) == body["metadata"]["labels"][labels.JOB_UID]
        and (spec.get("jobRef") or {}).get("name") == body["spec"]["jobRef"]["name"]
        and spec.get("step") == body["spec"]["step"]
        and all(known.get(k) in (None, status[k]) for k in ("jobUid", "round", "manifest"))
    )
