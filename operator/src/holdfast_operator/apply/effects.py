"""The effects of decisions on the Kubernetes API and on sidecars, and which objects are known to be there.

Writes to the API are awaited. Calls to sidecars are only started, and their results are part of the next
Observed. No watch shows the Services, policies, budgets and Secrets of jobs. Their puts are repeated from
time to time, in case one was deleted.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from holdfast_core.api import Checkpoint, Gang, JobCondition
from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import JobUid
from holdfast_core.messages.schema import PruneReply
from holdfast_operator.apply.apply import write_status
from holdfast_operator.base import logs
from holdfast_operator.base.metrics import Metrics
from holdfast_operator.kube.api import ConflictError, NameTakenError
from holdfast_operator.kube.cluster import Cluster, Events
from holdfast_operator.model import labels
from holdfast_operator.model.actions import (
    Call,
    Delete,
    DesiredObject,
    EmitEvent,
    EventKind,
    ReleasePod,
    StatusWrite,
)
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.render import standing_objects
from holdfast_operator.sidecars.calls import Sidecars
from holdfast_operator.sidecars.certificates import Certificates
from holdfast_operator.watch.cache import ClusterCache

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


_LOGGED = frozenset({Reason.RECOVERED, Reason.RECOVERY_INTERRUPTED})
"""Reasons of the Events that are also logged: one line for each round."""
_MAY_BE_MISSING = frozenset({labels.SERVICE, labels.DISRUPTION_BUDGET})
"""Kinds without which the job can run. DNS names of the Service are for users: the gang gets its addresses in
ROUND."""


class JobEffects:
    """Implementation of apply.Effects."""

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

    async def write_status(self, job: Gang, write: StatusWrite) -> None:
        reply, written = await write_status(
            self._cluster, job, write.resource_version, write.status
        )
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
            await cluster.patch_status(Checkpoint.KIND, job.namespace, name, version, status)

    async def _change_checkpoint(self, body: Mapping[str, Any], version: str) -> None:
        """Write the spec and the finalizers that the body has, then the status."""
        meta, kind = body["metadata"], Checkpoint.KIND
        patch = {"spec": body["spec"]} if "spec" in body else dict[str, Any]()
        if "finalizers" in meta:
            patch["metadata"] = {"finalizers": meta["finalizers"]}
        if patch:
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

    def call(self, job: Gang, call: Call) -> PruneReply | None:
        return self._sidecars.call(job.uid, call)

    async def _warn(self, job: Gang, reason: Reason, message: str) -> None:
        await self.emit(job, EmitEvent(EventKind.WARNING, reason, message))

    async def emit(self, job: Gang, event: EmitEvent) -> None:
        if event.reason in _LOGGED:  # Events are limited, and every recovery is logged
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
