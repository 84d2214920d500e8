"""All writes to Kubernetes, Events included, and the few direct reads that must not come from a cache.

A create succeeds if the object already exists and the same owner controls it. A delete succeeds if the
object is gone or its name belongs to another uid. Methods raise ApiError; patches raise ConflictError where
the object was changed or deleted meanwhile; `create_owned` raises NameTakenError where an object of another
owner has the name.

`Events` writes at most one Event a minute for each object and reason. Nothing depends on an Event: one that
cannot be written is logged and dropped.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast_core import logs
from holdfast_core.api import (
    API_VERSION,
    GANGS,
    GROUP,
    VERSION,
    ApiModel,
    Checkpoint,
    CheckpointStore,
    Gang,
    merge_patch,
)
from holdfast_core.clock import Clock, stamp
from holdfast_core.errors import HoldfastError
from holdfast_operator.kube.api import ApiError, ConflictError, KubeApi, NameTakenError
from holdfast_operator.model import labels
from holdfast_operator.model.job import Unreadable
from holdfast_operator.model.ownership import controller_of, whose

NOT_FOUND, CONFLICT, INVALID, BAD_REQUEST, FORBIDDEN = 404, 409, 422, 400, 403
_MANAGER = {"fieldManager": labels.FIELD_MANAGER}
JOB = "Job"
EVENT = "Event"
_COLLECTIONS = {
    labels.POD: ("api/v1", "pods"),
    labels.SERVICE: ("api/v1", "services"),
    labels.SECRET: ("api/v1", "secrets"),
    EVENT: ("api/v1", "events"),
    labels.NETWORK_POLICY: ("apis/networking.k8s.io/v1", "networkpolicies"),
    labels.DISRUPTION_BUDGET: ("apis/policy/v1", "poddisruptionbudgets"),
    JOB: ("apis/batch/v1", "jobs"),
    **{
        k.KIND: (f"apis/{GROUP}/{VERSION}", k.PLURAL) for k in (*GANGS, Checkpoint, CheckpointStore)
    },
}
"""API and plural of each kind that the operator writes or reads directly."""


@dataclass(frozen=True, slots=True)
class Created:
    """Result of a create."""

    uid: str
    """Uid of the object; "" where it existed and was not read."""
    existed: bool
    """Whether the object existed before."""


class Cluster:
    """Requests to the Kubernetes API about objects of the kinds in _COLLECTIONS."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    async def create(self, body: Mapping[str, Any]) -> Created:
        """Create the object. One that exists is not read. Raises ApiError."""
        path = _path(body["kind"], body["metadata"]["namespace"])
        try:
            answer = await self._api.post(path, body, _MANAGER)
        except ApiError as error:
            if error.status == CONFLICT and error.reason == "AlreadyExists":
                return Created("", existed=True)
            raise
        return Created(str(answer["metadata"]["uid"]), existed=False)

    async def create_owned(self, body: Mapping[str, Any]) -> Created:
        """Create the object, or return an existing one with the same controller.

        Raises:
            ApiError: The API server refused a request, or did not answer.
            NameTakenError: The object that exists has another controller.
        """
        created = await self.create(body)
        if not created.existed:
            return created
        meta = body["metadata"]
        found = await self._api.get(_path(body["kind"], meta["namespace"], meta["name"]))
        _require_own(body, found)
        return Created(str(found["metadata"]["uid"]), existed=True)

    async def set_disruption_budget(self, body: Mapping[str, Any]) -> None:
        """Create a PodDisruptionBudget, or give the one that exists this minAvailable. Raises ApiError.

        Raises ConflictError if it was deleted in between, and NameTakenError if it is not the job's.
        """
        created = await self.create(body)
        if created.existed:
            patch = {"spec": {"minAvailable": body["spec"]["minAvailable"]}}
            meta = body["metadata"]
            path = _path(body["kind"], meta["namespace"], meta["name"])
            # The operator may not read it. The reply to a dry run shows whose it is.
            _require_own(body, await self._patch(path, patch, {"dryRun": "All"}))
            await self._patch(path, patch)

    async def create_secret(self, body: Mapping[str, Any], data: Mapping[str, str]) -> Created:
        """Create a Secret with these texts. Raises ApiError.

        A Secret that exists is not read, because the operator may not read Secrets in tenants' namespaces.
        The caller decides whether it is the wanted one.
        """
        encoded = {k: base64.b64encode(v.encode()).decode() for k, v in data.items()}
        return await self.create({**body, "data": encoded})

    async def refusal_of_pod(self, namespace: str, body: Mapping[str, Any]) -> str | None:
        """Return the server's message if it would refuse this pod, else None. Nothing is created.

        The server also refuses fields that it does not know. In a create it would drop them without a word.
        An exceeded quota does not count as a refusal, because the pod itself is valid. Raises ApiError.
        """
        try:
            await self._api.post(
                _path(labels.POD, namespace),
                body,
                {**_MANAGER, "dryRun": "All", "fieldValidation": "Strict"},
            )
        except ApiError as error:
            if error.status == CONFLICT:
                return None
            if error.status in (INVALID, BAD_REQUEST):
                return str(error)
            if error.status == FORBIDDEN:
                # The create will be refused by the quota as well, and the job's status reports that.
                return None if "exceeded quota" in str(error) else str(error)
            raise
        return None

    async def get(self, kind: str, namespace: str, name: str) -> Any | None:
        """Return the object by a direct read, or None if there is none. Raises ApiError."""
        return await self._get(_path(kind, namespace, name))

    async def get_secret(self, namespace: str, name: str) -> dict[str, str] | None:
        """Return a Secret's data as text, or None if it does not exist. Raises ApiError.

        The operator may read Secrets in its own namespace only.
        """
        raw = await self.get(labels.SECRET, namespace, name)
        if raw is None:
            return None
        return {k: base64.b64decode(v).decode() for k, v in (raw.get("data") or {}).items()}

    async def secret_labels(self, namespace: str, selector: str) -> dict[str, dict[str, str]]:
        """Return the labels of the selected Secrets by name. Raises ApiError.

        The operator may list Secrets in its own namespace only.
        """
        raw = await self._api.get(_path(labels.SECRET, namespace), {"labelSelector": selector})
        metadata = [item["metadata"] for item in raw.get("items") or []]
        return {str(m["name"]): dict(m.get("labels") or {}) for m in metadata}

    async def pod_is_gone(self, namespace: str, name: str, owner_uid: str) -> bool:
        """Return, by a direct read, whether this owner's pod is gone or is being deleted."""
        pod = await self.get(labels.POD, namespace, name)
        owner = None if pod is None else controller_of(pod)
        if pod is None or owner is None or owner.uid != owner_uid:
            return True
        return pod["metadata"].get("deletionTimestamp") is not None

    async def job_exists(self, namespace: str, name: str, uid: str) -> bool:
        """Return, by direct reads, whether a gang of this name, of either kind, exists and has this uid."""
        for kind in GANGS:
            job = await self.get(kind.KIND, namespace, name)
            if job is not None and str(job["metadata"]["uid"]) == uid:
                return True
        return False

    async def lease_renewed(self, path: str, node: str) -> str | None:
        """Return, by a direct read, the renewTime of a node's lease, or None if there is no lease."""
        raw = await self._get(f"{path}/{node}")
        return None if raw is None else str((raw.get("spec") or {}).get("renewTime"))

    async def node_exists(self, path: str, name: str) -> bool:
        """Return, by a direct read, whether there is a Node object of this name.

        It is a LIST, because the operator needs the right to list nodes anyway.
        """
        page = await self._api.get(path, {"fieldSelector": f"metadata.name={name}"})
        return bool(page.get("items"))

    async def patch(
        self, kind: str, namespace: str, name: str, resource_version: str, patch: Mapping[str, Any]
    ) -> str:
        """Write spec or metadata as a merge patch. Return the new resourceVersion; raises ConflictError."""
        metadata = {**(patch.get("metadata") or {}), "resourceVersion": resource_version}
        reply = await self._patch(_path(kind, namespace, name), {**patch, "metadata": metadata})
        return str(reply["metadata"]["resourceVersion"])

    async def patch_status(
        self,
        kind: str,
        namespace: str,
        name: str,
        resource_version: str,
        status: Mapping[str, Any],
    ) -> Any:
        """Write a status as a merge patch. Return the object as it is then; raises ConflictError."""
        metadata = {"resourceVersion": resource_version}
        body = {"apiVersion": API_VERSION, "status": status, "metadata": metadata}
        return await self._patch(f"{_path(kind, namespace, name)}/status", body)

    async def write_status(self, read: Checkpoint | CheckpointStore, status: ApiModel) -> None:
        """Write the status of an object as it was read. Raises ConflictError if it has changed since."""
        version, patch = read.resource_version, merge_patch(status)
        await self.patch_status(read.KIND, read.namespace, read.name, version, patch)

    async def delete(
        self,
        kind: str,
        namespace: str,
        name: str,
        uid: str = "",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Delete the object if it still has this uid; "" deletes whatever has the name. Raises ApiError."""
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", **(options or {})}
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            await self._api.delete(_path(kind, namespace, name), body)
        except ApiError as error:
            if error.status not in (NOT_FOUND, CONFLICT):  # CONFLICT: the name has another uid now
                raise

    async def release_pod(self, namespace: str, name: str, uid: str, *, ends_group: bool) -> None:
        """Remove Kueue's finalizer from the pod if it still has this uid. Raises ApiError.

        The list of finalizers is not replaced, because others may add theirs at the same time.

        Args:
            ends_group: Also mark the pod as one that is not replaced in its group.
        """
        metadata: dict[str, Any] = {
            "uid": uid,
            "$deleteFromPrimitiveList/finalizers": [labels.KUEUE_FINALIZER],
        }
        if ends_group:
            metadata["annotations"] = {labels.RETRIABLE_IN_GROUP: "false"}
        try:
            await self._api.patch_strategic(
                _path(labels.POD, namespace, name), {"metadata": metadata}, _MANAGER
            )
        except ApiError as error:
            if error.status not in (NOT_FOUND, CONFLICT):  # CONFLICT: the name has another uid now
                raise

    # ------------------------------------------------------------------ parts

    async def _get(self, path: str) -> Any | None:
        """Return the object of this path, or None if there is none. Raises ApiError."""
        try:
            return await self._api.get(path)
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def _patch(
        self, path: str, body: Mapping[str, Any], options: Mapping[str, str] | None = None
    ) -> Any:
        """Return the object as it is then. Raises ConflictError and ApiError."""
        try:
            return await self._api.patch(path, body, {**_MANAGER, **(options or {})})
        except ApiError as error:
            if error.status in (CONFLICT, NOT_FOUND):
                raise ConflictError(str(error)) from error
            raise


def _require_own(body: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise NameTakenError unless the object that exists has the controller of the one to create."""
    meta, ours, theirs = body["metadata"], controller_of(body), controller_of(found)
    if ours is not None and theirs is not None and theirs.uid == ours.uid:
        return
    state = "is being deleted" if found["metadata"].get("deletionTimestamp") else "exists"
    wanted = "the operator" if ours is None else f"{ours.kind} {ours.name} (uid {ours.uid})"
    raise NameTakenError(
        f"{body['kind']} {meta['namespace']}/{meta['name']} cannot be created for {wanted}: an "
        f"object of that name {state}, and {whose(found)}. Holdfast does not change it; delete "
        "it if it is not needed"
    )


def _path(kind: str, namespace: str, name: str | None = None) -> str:
    api, plural = _COLLECTIONS[kind]
    path = f"/{api}/namespaces/{namespace}/{plural}"
    return path if name is None else f"{path}/{name}"


INTERVAL_SECONDS = 60.0
MAX_MESSAGE_CHARACTERS = 1000
_MAX_REMEMBERED = 20_000


Subject = Gang | Checkpoint | CheckpointStore | Unreadable
"""The object that an Event is about."""


@dataclass(slots=True)
class _Emitted:
    at: float
    suppressed: int = 0


class Events:
    """Writer of Events, with a limit for each object and reason."""

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock
        self._emitted: dict[tuple[str, str], _Emitted] = {}

    async def emit(self, subject: Subject, kind: str, reason: str, message: str) -> None:
        """Write an Event, unless one for this object and reason was written less than a minute ago.

        Errors are logged; HoldfastError is never raised.

        Args:
            kind: Normal or Warning.
        """
        count = self._count(subject.uid, reason)
        if count is None:
            return
        now = stamp(self._clock.utc_now())
        body = {
            "apiVersion": "v1",
            "kind": EVENT,
            "metadata": {"generateName": f"{subject.name}-", "namespace": subject.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": subject.kind,
                "namespace": subject.namespace,
                "name": subject.name,
                "uid": subject.uid,
            },
            "type": kind,
            "reason": reason,
            "message": message[:MAX_MESSAGE_CHARACTERS],
            "source": {"component": labels.FIELD_MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": count,
        }
        try:
            await self._cluster.create(body)
        except HoldfastError as error:
            logs.warning(
                f"event {reason} not written: {error}",
                namespace=subject.namespace,
                object=subject.name,
            )

    def _count(self, uid: str, reason: str) -> int | None:
        """Return the count for the Event, including those suppressed before it; None to suppress it."""
        now = self._clock.monotonic()
        known = self._emitted.get((uid, reason))
        if known is not None and now - known.at < INTERVAL_SECONDS:
            known.suppressed += 1
            return None
        if len(self._emitted) >= _MAX_REMEMBERED:
            self._emitted.clear()
        self._emitted[uid, reason] = _Emitted(now)
        return 1 if known is None else 1 + known.suppressed
