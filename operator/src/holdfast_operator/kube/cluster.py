"""All writes to Kubernetes, and the few direct reads that must not come from a cache.

A create succeeds if the object already exists and the same owner controls it. A delete succeeds if the
object is gone or its name belongs to another uid. Methods raise ApiError; patches raise ConflictError where
the object was changed or deleted meanwhile; creates of pods and Services raise NameTakenError where an object
of another owner has the name.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast_core.api import (
    API_VERSION,
    GANGS,
    GROUP,
    VERSION,
    Checkpoint,
    CheckpointStore,
    Gang,
)
from holdfast_operator.kube.api import ApiError, KubeApi
from holdfast_operator.model import labels
from holdfast_operator.model.effects import ConflictError, NameTakenError
from holdfast_operator.model.ownership import controller_of, whose

NOT_FOUND, CONFLICT, INVALID, BAD_REQUEST, FORBIDDEN = 404, 409, 422, 400, 403
_MANAGER = {"fieldManager": labels.FIELD_MANAGER}


@dataclass(frozen=True, slots=True)
class Created:
    """Result of a create."""

    uid: str
    """Uid of the object; "" where it existed and was not read."""
    existed: bool
    """Whether the object existed before."""


class Cluster:
    """Typed requests to the Kubernetes API."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    # ------------------------------------------------------------------ pods, services

    async def create_pod(self, namespace: str, body: Mapping[str, Any]) -> Created:
        """Create a pod. Raises NameTakenError and ApiError."""
        return await self._create_owned(f"/api/v1/namespaces/{namespace}/pods", body)

    async def create_service(self, namespace: str, body: Mapping[str, Any]) -> Created:
        """Create a Service. Raises NameTakenError and ApiError."""
        return await self._create_owned(f"/api/v1/namespaces/{namespace}/services", body)

    async def create_policy(self, namespace: str, body: Mapping[str, Any]) -> Created:
        """Create a NetworkPolicy. Raises ApiError. The owner of one that exists is not compared."""
        path = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
        return await self._create(path, body)

    async def set_disruption_budget(self, namespace: str, body: Mapping[str, Any]) -> None:
        """Create a PodDisruptionBudget, or give the one that exists this minAvailable. Raises ApiError.

        Raises ConflictError if it was deleted in between, and NameTakenError if it is not the job's.
        """
        path = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
        created = await self._create(path, body)
        if created.existed:
            patch = {"spec": {"minAvailable": body["spec"]["minAvailable"]}}
            name = f"{path}/{body['metadata']['name']}"
            # The operator may not read it. The reply to a dry run shows whose it is.
            _require_own(body, await self._patch(name, patch, {"dryRun": "All"}))
            await self._patch(name, patch)

    async def refusal_of_pod(self, namespace: str, body: Mapping[str, Any]) -> str | None:
        """Return the server's message if it would refuse this pod, else None. Nothing is created.

        The server also refuses fields that it does not know. In a create it would drop them without a word.
        An exceeded quota does not count as a refusal, because the pod itself is valid. Raises ApiError.
        """
        try:
            await self._api.post(
                f"/api/v1/namespaces/{namespace}/pods",
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

    async def pod_is_gone(self, namespace: str, name: str, owner_uid: str) -> bool:
        """Return, by a direct read, whether this owner's pod is gone or is being deleted."""
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
        """Delete the pod if it still has this uid; `force` sets a grace period of 0. Raises ApiError."""
        options: dict[str, Any] = {"preconditions": {"uid": uid}}
        if force:
            options["gracePeriodSeconds"] = 0
        await self._delete(f"/api/v1/namespaces/{namespace}/pods/{name}", options)

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
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        try:
            await self._api.patch_strategic(path, {"metadata": metadata}, _MANAGER)
        except ApiError as error:
            if error.status not in (NOT_FOUND, CONFLICT):  # CONFLICT: the name has another uid now
                raise

    # ------------------------------------------------------------------ our kinds

    async def patch_job_status(
        self, job: Gang, resource_version: str, status: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Write the whole status as a merge patch. Return the job as it is then; raises ConflictError."""
        path = _ours(job.namespace, job.PLURAL, job.name)
        reply: Mapping[str, Any] = await self._patch_status(path, resource_version, status)
        return reply

    async def patch_status(
        self,
        plural: str,
        namespace: str,
        name: str,
        resource_version: str,
        status: Mapping[str, Any],
    ) -> None:
        """Write a part of the status of one of our kinds. Raises ConflictError."""
        await self._patch_status(_ours(namespace, plural, name), resource_version, status)

    async def patch_store_status(
        self, namespace: str, name: str, resource_version: str, status: Mapping[str, Any]
    ) -> None:
        path = _ours(namespace, CheckpointStore.PLURAL, name)
        await self._patch_status(path, resource_version, status)

    async def patch_checkpoint_status(
        self, namespace: str, name: str, resource_version: str | None, status: Mapping[str, Any]
    ) -> None:
        path = _ours(namespace, Checkpoint.PLURAL, name)
        await self._patch_status(path, resource_version, status)

    async def patch_checkpoint(
        self, namespace: str, name: str, resource_version: str, patch: Mapping[str, Any]
    ) -> str:
        """Write spec or metadata as a merge patch. Return the new resourceVersion; raises ConflictError."""
        metadata = {**(patch.get("metadata") or {}), "resourceVersion": resource_version}
        path = _ours(namespace, Checkpoint.PLURAL, name)
        reply = await self._patch(path, {**patch, "metadata": metadata})
        return str(reply["metadata"]["resourceVersion"])

    async def job_exists(self, namespace: str, name: str, uid: str) -> bool:
        """Return, by direct reads, whether a gang of this name, of either kind, exists and has this uid."""
        for kind in GANGS:
            try:
                job = await self._api.get(_ours(namespace, kind.PLURAL, name))
            except ApiError as error:
                if error.status == NOT_FOUND:
                    continue
                raise
            if str(job["metadata"]["uid"]) == uid:
                return True
        return False

    async def get_job(self, plural: str, namespace: str, name: str) -> Any:
        """Read a gang's object directly and return its JSON. Raises ApiError."""
        return await self._api.get(_ours(namespace, plural, name))

    async def get_batch_job(self, namespace: str, name: str) -> Any | None:
        """Return the Job of batch/v1 of this name, or None if there is none. Raises ApiError."""
        return await self._get(f"/apis/batch/v1/namespaces/{namespace}/jobs/{name}")

    async def create_checkpoint(self, namespace: str, body: Mapping[str, Any]) -> Created:
        """Create a Checkpoint. If one exists, the caller must check which job it belongs to.

        Checkpoints have no owner reference. Raises ApiError.
        """
        return await self._create(_ours(namespace, Checkpoint.PLURAL), body)

    async def get_checkpoint(self, namespace: str, name: str) -> Any | None:
        return await self._get(_ours(namespace, Checkpoint.PLURAL, name))

    async def delete_checkpoint(self, namespace: str, name: str, uid: str) -> None:
        path = _ours(namespace, Checkpoint.PLURAL, name)
        await self._delete(path, {"preconditions": {"uid": uid}})

    async def delete_job(self, job: Gang) -> None:
        path = _ours(job.namespace, job.PLURAL, job.name)
        options = {"preconditions": {"uid": job.uid}, "propagationPolicy": "Background"}
        await self._delete(path, options)

    # ------------------------------------------------------------------ secrets

    async def create_secret(
        self,
        namespace: str,
        name: str,
        data: Mapping[str, str],
        metadata: Mapping[str, Any],
    ) -> Created:
        """Create an immutable Secret with these texts. Raises ApiError.

        A Secret that exists is not read, because the operator may not read Secrets in tenants' namespaces.
        The caller decides whether it is the wanted one.
        """
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
        """Return a Secret's data as text, or None if it does not exist. Raises ApiError.

        The operator may read Secrets in its own namespace only.
        """
        try:
            raw = await self._api.get(f"/api/v1/namespaces/{namespace}/secrets/{name}")
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        return {k: base64.b64decode(v).decode() for k, v in (raw.get("data") or {}).items()}

    async def secret_labels(self, namespace: str, selector: str) -> dict[str, dict[str, str]]:
        """Return the labels of the selected Secrets by name. Raises ApiError.

        The operator may list Secrets in its own namespace only.
        """
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
        """Return, by a direct read, the renewTime of a node's lease, or None if there is no lease."""
        try:
            raw = await self._api.get(f"{path}/{node}")
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        return str((raw.get("spec") or {}).get("renewTime"))

    async def node_exists(self, path: str, name: str) -> bool:
        """Return, by a direct read, whether there is a Node object of this name.

        It is a LIST, because the operator needs the right to list nodes anyway.
        """
        page = await self._api.get(path, {"fieldSelector": f"metadata.name={name}"})
        return bool(page.get("items"))

    # ------------------------------------------------------------------ parts

    async def _create_owned(self, path: str, body: Mapping[str, Any]) -> Created:
        """Create an object, or return an existing one with the same controller, else raise NameTakenError."""
        created = await self._create(path, body)
        if not created.existed:
            return created
        found = await self._api.get(f"{path}/{body['metadata']['name']}")
        _require_own(body, found)
        return Created(str(found["metadata"]["uid"]), existed=True)

    async def _create(self, path: str, body: Mapping[str, Any]) -> Created:
        try:
            answer = await self._api.post(path, body, _MANAGER)
        except ApiError as error:
            if error.status == CONFLICT and error.reason == "AlreadyExists":
                return Created("", existed=True)
            raise
        return Created(str(answer["metadata"]["uid"]), existed=False)

    async def _get(self, path: str) -> Any | None:
        """Return the object of this path, or None if there is none. Raises ApiError."""
        try:
            return await self._api.get(path)
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def _delete(self, path: str, options: Mapping[str, Any]) -> None:
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
        try:
            await self._api.delete(path, body)
        except ApiError as error:
            if error.status not in (NOT_FOUND, CONFLICT):  # CONFLICT: the name has another uid now
                raise

    async def _patch_status(
        self, path: str, resource_version: str | None, status: Mapping[str, Any]
    ) -> Any:
        body: dict[str, Any] = {"apiVersion": API_VERSION, "status": status}
        if resource_version is not None:
            body["metadata"] = {"resourceVersion": resource_version}
        return await self._patch(f"{path}/status", body)

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


def _ours(namespace: str, plural: str, name: str | None = None) -> str:
    path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{plural}"
    return path if name is None else f"{path}/{name}"
