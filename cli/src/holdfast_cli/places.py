"""The place from which a target is read here: a folder, or a store with the keys of the person."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.base.settings import apply_environment, current_environment
from holdfast_cli.errors import NotFound, StateError, UsageError
from holdfast_cli.gangs import parsed
from holdfast_cli.options import Session
from holdfast_cli.targets import FolderTarget, PlaceTarget, StoreTarget, Target, local_path
from holdfast_core.api import (
    AzureSpec,
    Checkpoint,
    CheckpointPhase,
    CheckpointStore,
    GoogleSpec,
    S3Spec,
)

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_AZURE_ENDPOINT = "AZURE_STORAGE_ENDPOINT"
_GOOGLE_ENDPOINT = "GOOGLE_BASE_URL"


def place_of(session: Session, target: Target) -> PlaceTarget:
    """Return the folder or the store of a target.

    A checkpoint of the cluster is in its CheckpointStore. This process reads it with the keys of the person,
    as any store. Endpoint and region are those of the CheckpointStore, unless variables of the person name
    others: an endpoint may have another name outside of the cluster.

    Raises:
        NotFound: There is no such folder, job or checkpoint.
        StateError: The checkpoint is in no object store, or is being deleted.
        UsageError: Two targets of one command are in stores with different endpoints.
    """
    if isinstance(target, FolderTarget):
        path = local_path(target.place)
        if not path.exists():
            raise NotFound(f"there is no folder {target.place}: correct the name")
        return FolderTarget(str(path), target.step)
    if isinstance(target, StoreTarget):
        return target
    cluster = session.cluster(target)
    checkpoint = parsed(Checkpoint, cluster.checkpoint_of(target))
    name = expect_stored(checkpoint)
    store = parsed(CheckpointStore, cluster.get("checkpointstores", name))
    env = current_environment()
    of_person = {key: value for key, value in env.items() if key not in session.variables}
    for variable, value in variables_of(store, of_person).items():
        if session.variables.setdefault(variable, value) != value:
            raise UsageError(
                f"{target} is in a store with another {variable} than the targets before it ({value} and "
                f"{session.variables[variable]}): read them one by one"
            )
    apply_environment(session.variables)
    return stored_place(checkpoint, store)


def expect_stored(checkpoint: Checkpoint) -> str:
    """Return the name of the CheckpointStore. Raises StateError if it cannot be read from a store."""
    name, store = checkpoint.name, checkpoint.status.store
    if checkpoint.deleting or checkpoint.status.phase is CheckpointPhase.DELETING:
        raise StateError(
            f"checkpoint {name} is being deleted: `kubectl holdfast list {checkpoint.job}` lists the others"
        )
    if store is None or not checkpoint.persisted:
        raise StateError(
            f"checkpoint {name} is not in an object store, from which it could be read here: `kubectl "
            f"holdfast list {checkpoint.job}` lists the others"
        )
    return store


def stored_place(checkpoint: Checkpoint, store: CheckpointStore) -> StoreTarget:
    """Return the URL of the job in the store, and the step."""
    stored, found = checkpoint.spec.stored, store.spec.place
    namespace = checkpoint.namespace if stored is None else stored.job_namespace
    uid = checkpoint.status.job_uid if stored is None else stored.job_uid
    match found:
        case AzureSpec():
            place = f"az://{found.account}/{found.container}"
        case GoogleSpec():
            place = f"gs://{found.bucket}"
        case S3Spec():
            place = f"s3://{found.bucket}"
    parts = filter(None, (place, found.prefix, namespace, uid))
    return StoreTarget("/".join(parts), checkpoint.spec.step)


def variables_of(store: CheckpointStore, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which the SDK finds the server of a store, without those that are set."""
    place = store.spec.place
    wanted: dict[tuple[str, ...], str | None]
    match place:
        case AzureSpec():
            wanted = {(_AZURE_ENDPOINT,): place.endpoint}
        case GoogleSpec():
            wanted = {(_GOOGLE_ENDPOINT,): place.endpoint}
        case S3Spec():
            wanted = {_ENDPOINTS: place.endpoint, _REGIONS: place.region}
    return {
        names[0]: value
        for names, value in wanted.items()
        if value and not any(env.get(name) for name in names)
    }
