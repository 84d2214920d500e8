"""The only code that writes to Kubernetes, and the few direct reads that must not come from a cache.

Creates tolerate that the object exists where the same owner controls it, deletes that it is gone or
has another uid; what is left is an ApiError, ConflictError where somebody else was faster, or
NameTakenError where an object of another owner has the name. Decides nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast_core.api import (
    API_VERSION,
    GROUP,
    VERSION,
    Checkpoint,
    CheckpointStore,
    TrainingJob,
)
from holdfast_operator.kube.api import ApiError, KubeApi
from holdfast_operator.model import labels
from holdfast_operator.model.effects import ConflictError, NameTakenError
from holdfast_operator.model.ownership import controller_of, whose

NOT_FOUND, CONFLICT, INVALID, BAD_REQUEST, FORBIDDEN = 404, 409, 422, 400, 403
_MANAGER = {"fieldManager": labels.FIELD_MANAGER}


@dataclass(frozen=True, slots=True)
class Created:
    uid: str
    existed: bool
    """The object was there already; uid is "" where it may not be read (Secrets)."""


class Cluster:
    def __init__(self, api: KubeApi) -> None:
        self._api = api

    # ------------------------------------------------------------------ pods, services

    async def create_pod(self, namespace: str, body: Mapping[str, Any]) -> Created:
        """Raises NameTakenError, ApiError."""
        return await self._create_owned(f"/api/v1/namespaces/{namespace}/pods", body)

    async def create_service(self, namespace: str, body: Mapping[str, Any]) -> Created:
        """Raises NameTakenError, ApiError."""
        return await self._create_owned(f"/api/v1/namespaces/{namespace}/services", body)

    async def create_network_policy(self, namespace: str, body: Mapping[str, Any]) -> Created:
        path = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
        return await self._create(path, body)

    async def refusal_of_pod(self, namespace: str, body: Mapping[str, Any]) -> str | None:
        """Ask the server, without creating anything, whether it would take this pod: its words if
        the pod itself is wrong, None if it is fine. Quota is no fault of the pod."""
        try:
            await self._api.post(
                f"/api/v1/namespaces/{namespace}/pods", body, {**_MANAGER, "dryRun": "All"}
            )
        except ApiError as error:
            if error.status == CONFLICT:
                return None
            if error.status in (INVALID, BAD_REQUEST):
                return str(error)
            if error.status == FORBIDDEN:
                # The create itself will be refused as well, and the job says so.
                return None if "exceeded quota" in str(error) else str(error)
            raise
        return None

    async def pod_is_gone(self, namespace: str, name: str, owner_uid: str) -> bool:
        """A direct read: True if this owner has no such pod, or it is being deleted."""
        try:
            pod = await self._api.get(f"/api/v1/namespaces/{namespace}/pods/{name}")
        except ApiError as error:
            if error.status == NOT_FOUND:
                return True
            raise
        owner = controller_of(pod)
        if owner is None or owner.uid != owner_uid:
            return True
        return pod["metadata"].get("deletionTimestamp") is not None

    async def delete_pod(self, namespace: str, name: str, uid: str, *, force: bool) -> None:
        options: dict[str, Any] = {"preconditions": {"uid": uid}}
        if force:
            options["gracePeriodSeconds"] = 0
        await self._delete(f"/api/v1/namespaces/{namespace}/pods/{name}", options)

    # ------------------------------------------------------------------ our kinds

    async def patch_job_status(
        self, namespace: str, name: str, resource_version: str, status: Mapping[str, Any]
    ) -> str:
        """Merge patch of the whole status. Returns the new resourceVersion; raises ConflictError."""
        path = _ours(namespace, TrainingJob.PLURAL, name)
        return await self._patch_status(path, resource_version, status)

    async def patch_store_status(
        self, namespace: str, name: str, resource_version: str, status: Mapping[str, Any]
    ) -> str:
        path = _ours(namespace, CheckpointStore.PLURAL, name)
        return await self._patch_status(path, resource_version, status)

    async def patch_checkpoint_status(
        self, namespace: str, name: str, resource_version: str | None, status: Mapping[str, Any]
    ) -> str:
        path = _ours(namespace, Checkpoint.PLURAL, name)
        return await self._patch_status(path, resource_version, status)

    async def patch_checkpoint(
        self, namespace: str, name: str, resource_version: str, patch: Mapping[str, Any]
    ) -> str:
        """Merge patch of spec or metadata. Returns the new resourceVersion; raises ConflictError."""
        metadata = {**(patch.get("metadata") or {}), "resourceVersion": resource_version}
        path = _ours(namespace, Checkpoint.PLURAL, name)
        return await self._patch(path, {**patch, "metadata": metadata})

    async def job_exists(self, namespace: str, name: str, uid: str) -> bool:
        """A direct read: whether this very job, and no later one of its name, is there now."""
        try:
            job = await self._api.get(_ours(namespace, TrainingJob.PLURAL, name))
        except ApiError as error:
            if error.status == NOT_FOUND:
                return False
            raise
        return str(job["metadata"]["uid"]) == uid

    async def get_job(self, namespace: str, name: str) -> Any:
        """As the server has it, unparsed. Raises ApiError."""
        return await self._api.get(_ours(namespace, TrainingJob.PLURAL, name))

    async def create_checkpoint(self, namespace: str, body: Mapping[str, Any]) -> Created:
        """Where one exists, the caller compares whose record it is: Checkpoints have no owner."""
        return await self._create(_ours(namespace, Checkpoint.PLURAL), body)

    async def get_checkpoint(self, namespace: str, name: str) -> Any | None:
        try:
            return await self._api.get(_ours(namespace, Checkpoint.PLURAL, name))
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def delete_checkpoint(self, namespace: str, name: str, uid: str) -> None:
        path = _ours(namespace, Checkpoint.PLURAL, name)
        await self._delete(path, {"preconditions": {"uid": uid}})

    async def delete_job(self, namespace: str, name: str, uid: str) -> None:
        path = _ours(namespace, TrainingJob.PLURAL, name)
        await self._delete(path, {"preconditions": {"uid": uid}, "propagationPolicy": "Background"})

    # ------------------------------------------------------------------ secrets

    async def create_secret(
        self,
        namespace: str,
        name: str,
        data: Mapping[str, str],
        metadata: Mapping[str, Any],
    ) -> Created:
        """An immutable Secret with these texts. One that exists is not read: in namespaces of
        tenants the operator may not, so the name must be one that no other object has."""
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "immutable": True,
            "metadata": {**metadata, "name": name, "namespace": namespace},
            "data": {k: base64.b64encode(v.encode()).decode() for k, v in data.items()},
        }
        return await self._create(f"/api/v1/namespaces/{namespace}/secrets", body)

    async def get_secret(self, namespace: str, name: str) -> dict[str, str] | None:
        """Only in the operator's own namespace. Raises ApiError."""
        try:
            raw = await self._api.get(f"/api/v1/namespaces/{namespace}/secrets/{name}")
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        return {k: base64.b64decode(v).decode() for k, v in (raw.get("data") or {}).items()}

    async def secret_labels(self, namespace: str, selector: str) -> dict[str, dict[str, str]]:
        """Labels by name, only in the operator's own namespace. Raises ApiError."""
        path = f"/api/v1/namespaces/{namespace}/secrets"
        raw = await self._api.get(path, {"labelSelector": selector})
        metadata = [item["metadata"] for item in raw.get("items") or []]
        return {str(m["name"]): dict(m.get("labels") or {}) for m in metadata}

    async def delete_secret(self, namespace: str, name: str) -> None:
        await self._delete(f"/api/v1/namespaces/{namespace}/secrets/{name}", {})

    # ------------------------------------------------------------------ others

    async def create_event(self, namespace: str, body: Mapping[str, Any]) -> None:
        await self._api.post(f"/api/v1/namespaces/{namespace}/events", body, _MANAGER)

    async def lease_renewed(self, path: str, node: str) -> str | None:
        """renewTime of a node's lease now; None if there is none."""
        try:
            raw = await self._api.get(f"{path}/{node}")
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        return str((raw.get("spec") or {}).get("renewTime"))

    # ------------------------------------------------------------------ parts

    async def _create_owned(self, path: str, body: Mapping[str, Any]) -> Created:
        """Create, or meet what is there: "exists" is not "ours", so the controllers are compared."""
        created = await self._create(path, body)
        if not created.existed:
            return created
        meta, ours = body["metadata"], controller_of(body)
        found = await self._api.get(f"{path}/{meta['name']}")
        theirs = controller_of(found)
        if ours is not None and theirs is not None and theirs.uid == ours.uid:
            return Created(str(found["metadata"]["uid"]), existed=True)
        state = "is being deleted" if found["metadata"].get("deletionTimestamp") else "exists"
        wanted = "its creator" if ours is None else f"{ours.kind} {ours.name} (uid {ours.uid})"
        raise NameTakenError(
            f"{body['kind']} {meta['namespace']}/{meta['name']} cannot be created for {wanted}: one of "
            f"that name {state}, and {whose(found)}; it is left alone, delete it if it is not needed"
        )

    async def _create(self, path: str, body: Mapping[str, Any]) -> Created:
        try:
            answer = await self._api.post(path, body, _MANAGER)
        except ApiError as error:
            if error.status == CONFLICT and error.reason == "AlreadyExists":
                return Created("", existed=True)
            raise
        return Created(str(answer["metadata"]["uid"]), existed=False)

    async def _delete(self, path: str, options: Mapping[str, Any]) -> None:
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
        try:
            await self._api.delete(path, body)
        except ApiError as error:
            if error.status not in (NOT_FOUND, CONFLICT):  # CONFLICT: another uid has the name now
                raise

    async def _patch_status(
        self, path: str, resource_version: str | None, status: Mapping[str, Any]
    ) -> str:
        body: dict[str, Any] = {"apiVersion": API_VERSION, "status": status}
        if resource_version is not None:
            body["metadata"] = {"resourceVersion": resource_version}
        return await self._patch(f"{path}/status", body)

    async def _patch(self, path: str, body: Mapping[str, Any]) -> str:
        try:
            answer = await self._api.patch(path, body, _MANAGER)
        except ApiError as error:
            if error.status in (CONFLICT, NOT_FOUND):
                raise ConflictError(str(error)) from error
            raise
        return str(answer["metadata"]["resourceVersion"])


def _ours(namespace: str, plural: str, name: str | None = None) -> str:
    path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{plural}"
    return path if name is None else f"{path}/{name}"
