"""Implementation of `Effects` on the Kubernetes API and on sidecars.

Writes to the API are awaited. Calls to sidecars are only started, and their results are part of the next
Observed. This module records which Services and Secrets this process created or found, or takes for present.
It decides nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from holdfast_core.api import (
    API_VERSION,
    Checkpoint,
    CheckpointStatus,
    Gang,
    JobCondition,
    TrainingJobStatus,
    merge_patch,
)
from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import JobUid
from holdfast_core.messages.schema import GangRequest, Prune, PruneReply
from holdfast_core.names import service_name
from holdfast_operator.apply.status_parts import write_status
from holdfast_operator.base import logs
from holdfast_operator.base.metrics import Metrics
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.kube.events import Events, Subject
from holdfast_operator.model import labels
from holdfast_operator.model.actions import (
    CreateCertificates,
    EmitEvent,
    EventKind,
    FinishInterruptedCommit,
    PruneObject,
    ReleasePod,
    RequestSave,
    RequestStop,
    SealWorker,
    SendRound,
    UpdateCheckpoint,
)
from holdfast_operator.model.effects import ConflictError, NameTakenError
from holdfast_operator.model.reasons import Reason
from holdfast_operator.render.metadata import job_labels, owner_reference
from holdfast_operator.sidecars.calls import Sidecars
from holdfast_operator.sidecars.certificates import Certificates
from holdfast_operator.watch.cache import ClusterCache

_LOGGED = frozenset({Reason.RECOVERED, Reason.RECOVERY_INTERRUPTED})
"""Reasons of the Events that are also logged: one line for each round."""

SURE_SECONDS = 600.0
"""Time after which the create of a Service or a PodDisruptionBudget is repeated, in case it was deleted. They
are not watched."""

SECRET_SURE_SECONDS = 60.0
"""Time after which, while pods wait to start, the create of their Secret is repeated."""


class JobEffects:
    """Implementation of model.effects.Effects."""

    def __init__(
        self,
        cluster: Cluster,
        cache: ClusterCache,
        sidecars: Sidecars,
        certificates: Certificates,
        events: Events,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._sidecars = sidecars
        self._certificates = certificates
        self._events = events
        self._metrics = metrics
        self._clock = clock
        self._services: dict[JobUid, dict[str, float]] = {}
        self._budgets: dict[JobUid, tuple[int, float]] = {}
        self._secrets: dict[JobUid, dict[str, float]] = {}
        self._taken: dict[JobUid, set[str]] = {}

    # ------------------------------------------------------------------ what is known to exist

    def assume_present(self, job: Gang) -> None:
        """Take the Service and the PodDisruptionBudget of a gang that trains for present.

        An earlier process has created them. A new one looks for them later: the calls for a thousand jobs
        would delay the first passes by half a minute.
        """
        if self._services.get(job.uid) or not job.status.is_true(JobCondition.RUNNING):
            return
        found_at = self._found_earlier(job)
        self._services[job.uid] = {service_name(job.name, job.uid): found_at}
        self._budgets.setdefault(job.uid, (len(job.status.members), found_at))

    def services(self, uid: JobUid) -> frozenset[str]:
        """Return the Services of the job that were created or found in the last SURE_SECONDS."""
        oldest = self._clock.monotonic() - SURE_SECONDS
        return frozenset(n for n, at in self._services.get(uid, {}).items() if at > oldest)

    def disruption_budget(self, uid: JobUid) -> int | None:
        """Return the number of workers of the PodDisruptionBudget if it was written in SURE_SECONDS."""
        workers, at = self._budgets.get(uid, (None, 0.0))
        return workers if self._clock.monotonic() - at < SURE_SECONDS else None

    def secrets(self, uid: JobUid) -> frozenset[str]:
        """Return the certificate Secrets of the job that this process created or found."""
        return frozenset(self._secrets.get(uid, {}))

    def doubtful_secrets(self, uid: JobUid) -> frozenset[str]:
        """Return the Secrets that were created or found more than SECRET_SURE_SECONDS ago.

        One of them may have been deleted since, and a pod would wait for it forever.
        """
        oldest = self._clock.monotonic() - SECRET_SURE_SECONDS
        return frozenset(n for n, at in self._secrets.get(uid, {}).items() if at <= oldest)

    def taken_secrets(self, uid: JobUid) -> frozenset[str]:
        """Return the names for Secrets of the job that this process found in use for something else."""
        return frozenset(self._taken.get(uid, ()))

    def forget(self, uid: JobUid) -> None:
        """Drop the records of a job that is gone."""
        self._services.pop(uid, None)
        self._budgets.pop(uid, None)
        self._secrets.pop(uid, None)
        self._taken.pop(uid, None)

    # ------------------------------------------------------------------ the job

    async def write_job_status(
        self, job: Gang, resource_version: str, status: TrainingJobStatus
    ) -> None:
        reply, written = await write_status(self._cluster, job, resource_version, status)
        self._cache.take_job(job, reply)
        self._metrics.status_written(job, written)

    async def delete_job(self, job: Gang) -> None:
        await self._cluster.delete_job(job)

    # ------------------------------------------------------------------ pods and what they need

    async def pod_is_gone(self, job: Gang, name: str) -> bool:
        return await self._cluster.pod_is_gone(job.namespace, name, job.uid)

    async def create_pod(self, job: Gang, body: Mapping[str, Any]) -> None:
        created = await self._cluster.create_pod(job.namespace, body)
        if not created.existed:
            self._cache.expect_created(job, created.uid)

    async def delete_pod(self, job: Gang, name: str, uid: str, *, force: bool) -> None:
        await self._cluster.delete_pod(job.namespace, name, uid, force=force)
        self._cache.expect_deleted(job, uid)

    async def release_pod(self, job: Gang, action: ReleasePod) -> None:
        await self._cluster.release_pod(
            job.namespace, action.name, action.uid, ends_group=action.ends_group
        )

    async def set_disruption_budget(self, job: Gang, body: Mapping[str, Any], workers: int) -> None:
        try:
            await self._cluster.set_disruption_budget(job.namespace, body)
        except NameTakenError as error:  # the job can run without it
            await self._warn(job, Reason.NAME_TAKEN, str(error))
        except HoldfastError:
            if self._budgets.get(job.uid, (None, 0.0))[0] == workers:
                self._budgets[job.uid] = (workers, self._found_earlier(job))
            raise
        self._budgets[job.uid] = (workers, self._clock.monotonic())

    async def create_service(
        self, job: Gang, body: Mapping[str, Any], policy: Mapping[str, Any] | None
    ) -> None:
        """Create the NetworkPolicy, and then the Service. If another owner has its name, only emit an Event.

        The job can run without the Service: its DNS names are for users, and the gang gets its addresses in
        ROUND.
        """
        name = str(body["metadata"]["name"])
        known = self._services.setdefault(job.uid, {})
        try:
            if policy is not None:
                await self._cluster.create_policy(job.namespace, policy)
            await self._cluster.create_service(job.namespace, body)
        except NameTakenError as error:
            await self._warn(job, Reason.NAME_TAKEN, str(error))
        except HoldfastError:
            if name in known:
                known[name] = self._found_earlier(job)
            raise
        known[name] = self._clock.monotonic()

    def _found_earlier(self, job: Gang) -> float:
        """Return when an object counts as found that is taken for present, because looking for it failed.

        It is a time within the last SURE_SECONDS that differs between jobs. When the API server is back after
        ten minutes, the operator would otherwise look for the objects of all jobs at the same moment, before
        it sees which pods were lost meanwhile.
        """
        return self._clock.monotonic() - zlib.crc32(job.uid.encode()) / 2**32 * SURE_SECONDS

    async def create_certificates(self, job: Gang, action: CreateCertificates) -> None:
        """Create the Secret. If one exists that no pod of the job mounts, its name is taken.

        The operator may not read it. It may be the user's, or of an operator that ended before it created
        the pods.

        Raises:
            NameTakenError: The name is taken. The next decision takes another one.
        """
        data = await self._certificates.round_data(job, action.pods)
        metadata = {"labels": job_labels(job), "ownerReferences": [owner_reference(job)]}
        created = await self._cluster.create_secret(job.namespace, action.secret, data, metadata)
        known = self._secrets.get(job.uid, {})
        if created.existed and not action.in_use and action.secret not in known:
            self._taken.setdefault(job.uid, set()).add(action.secret)
            text = (
                f"Secret {job.namespace}/{action.secret} exists, and no pod of this job mounts it. The "
                "operator may not read it, so the certificates go to a Secret of another name. Delete this "
                "one if nothing else needs it"
            )
            await self._warn(job, Reason.NAME_TAKEN, text)
            raise NameTakenError(text)
        self._secrets.setdefault(job.uid, {})[action.secret] = self._clock.monotonic()

    async def delete_certificates(self, job: Gang, secret: str) -> None:
        await self._cluster.delete_secret(job.namespace, secret)
        self._secrets.get(job.uid, {}).pop(secret, None)

    # ------------------------------------------------------------------ Checkpoint objects

    async def create_checkpoint(
        self, job: Gang, body: Mapping[str, Any], status: CheckpointStatus
    ) -> None:
        """Create the object, then write its status.

        An object that exists already must be the record of this commit. It gets the status only if it has
        none, which happens if an operator ended between the two writes.

        Raises:
            ConflictError: The object was deleted or changed after it was created.
            NameTakenError: The object that exists is not a record of this commit.
        """
        name, cluster = str(body["metadata"]["name"]), self._cluster
        await cluster.create_checkpoint(job.namespace, body)
        raw = await cluster.get_checkpoint(job.namespace, name)
        if raw is None:
            raise ConflictError(
                f"Checkpoint {job.namespace}/{name} was deleted after it was created"
            )
        if not _is_record_of(raw, body, status):
            text = (
                f"Checkpoint {job.namespace}/{name} cannot record step {body['spec']['step']} of round "
                f"{status.round} of job {job.name} (uid {job.uid}): an object of that name exists that is "
                "no record of this commit; it is left alone, delete it or rename it so that the job can go on"
            )
            await self._warn(job, Reason.NAME_TAKEN, text)
            raise NameTakenError(text)
        if not (raw.get("status") or {}).get("phase"):
            version = str(raw["metadata"]["resourceVersion"])
            patch = merge_patch(status)
            await cluster.patch_checkpoint_status(job.namespace, name, version, patch)

    async def update_checkpoint(self, job: Gang, action: UpdateCheckpoint) -> None:
        version, patch = action.resource_version, dict[str, Any]()
        if action.step is not None:
            patch["spec"] = {"step": action.step}
        if action.finalizers:
            patch["metadata"] = {"finalizers": list(action.finalizers)}
        if patch:
            version = await self._cluster.patch_checkpoint(
                job.namespace, action.name, version, patch
            )
        await self._cluster.patch_checkpoint_status(
            job.namespace, action.name, version, merge_patch(action.status)
        )

    async def delete_checkpoint(self, job: Gang, name: str, uid: str) -> None:
        await self.release_checkpoint(job.namespace, name, uid)

    async def release_checkpoint(self, namespace: str, name: str, uid: str) -> None:
        """Delete the object and remove our finalizer from it. Its data stays."""
        raw = await self._cluster.get_checkpoint(namespace, name)
        if raw is None or raw["metadata"]["uid"] != uid:
            return
        await self._cluster.delete_checkpoint(namespace, name, uid)
        kept = [f for f in raw["metadata"].get("finalizers") or [] if f != Checkpoint.FINALIZER]
        if kept == (raw["metadata"].get("finalizers") or []):
            return
        again = await self._cluster.get_checkpoint(namespace, name)
        if again is not None and again["metadata"]["uid"] == uid:
            version = str(again["metadata"]["resourceVersion"])
            await self._cluster.patch_checkpoint(
                namespace, name, version, {"metadata": {"finalizers": kept or None}}
            )

    # ------------------------------------------------------------------ sidecars

    async def seal(self, job: Gang, action: SealWorker) -> None:
        self._sidecars.seal(job.uid, action.pod_uid, action.round)

    async def finish_commit(self, job: Gang, action: FinishInterruptedCommit) -> None:
        self._sidecars.finish_commit(job.uid, action.pod_uid, action.message)

    async def send_round(self, job: Gang, action: SendRound) -> None:
        self._sidecars.send_round(job.uid, action.pod_uid, action.outgoing, action.sidecar_restarts)

    async def request_save(self, job: Gang, action: RequestSave) -> None:
        request = GangRequest(action.round, action.token)
        self._sidecars.request(job.uid, action.pod, "/v1/save-now", request)

    async def request_stop(self, job: Gang, action: RequestStop) -> None:
        path = "/v1/end" if action.job_is_over else "/v1/stop"
        request = GangRequest(action.round, action.token)
        self._sidecars.request(job.uid, action.pod, path, request)

    async def prune(self, job: Gang, action: PruneObject) -> PruneReply:
        """Start the delete in the object store, or return the reply of a delete that has ended.

        The reply is empty while the delete runs. Its end causes another pass, which calls this method again.
        """
        message = Prune(action.round, (action.checkpoint,))
        return self._sidecars.prune(job.uid, action.pod, action.name, message)

    async def _warn(self, job: Gang, reason: Reason, message: str) -> None:
        await self.emit(job, EmitEvent(EventKind.WARNING, reason, message))

    async def emit(self, job: Gang, event: EmitEvent) -> None:
        subject = Subject(API_VERSION, job.KIND, job.namespace, job.name, job.uid)
        if event.reason in _LOGGED:  # Events are limited, and every recovery is logged
            logs.info(event.message, namespace=job.namespace, job=job.name)
        await self._events.emit(subject, event.kind, event.reason, event.message)


def _is_record_of(
    raw: Mapping[str, Any], body: Mapping[str, Any], status: CheckpointStatus
) -> bool:
    """Return whether an existing Checkpoint is the record of this commit of this job.

    It must have the job's uid as a label, the job's name and the step in its spec, and a status that is empty
    or the same. Only the operator may write that status.
    """
    marks, spec = raw["metadata"].get("labels") or {}, raw.get("spec") or {}
    known = raw.get("status") or {}
    return (
        marks.get(labels.JOB_UID) == body["metadata"]["labels"][labels.JOB_UID]
        and (spec.get("jobRef") or {}).get("name") == body["spec"]["jobRef"]["name"]
        and spec.get("step") == body["spec"]["step"]
        and known.get("jobUid") in (None, status.job_uid)
        and known.get("round") in (None, status.round)
        and known.get("manifest") in (None, status.manifest)
    )
