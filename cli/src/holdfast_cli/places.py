"""The place from which a target is read here: a folder, or a store with the keys of the person."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.base.settings import apply_environment, current_environment
from holdfast_cli.errors import NotFound, StateError, UsageError
from holdfast_cli.gangs import parsed
from holdfast_cli.options import Session
from holdfast_cli.targets import FolderTarget, PlaceTarget, StoreTarget, Target, local_path
from holdfast_core.api import Checkpoint, CheckpointPhase, CheckpointStore

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_AZURE_ENDPOINT = "AZURE_STORAGE_ENDPOINT"


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
    stored, s3, azure = checkpoint.spec.stored, store.spec.s3, store.spec.azure
    namespace = checkpoint.namespace if stored is None else stored.job_namespace
    uid = checkpoint.status.job_uid if stored is None else stored.job_uid
    if azure is not None:
        place, prefix = f"az://{azure.account}/{azure.container}", azure.prefix
    else:
        assert s3 is not None, "the rules of the CRD require one of them"
        place, prefix = f"s3://{s3.bucket}", s3.prefix
    parts = filter(None, (place, prefix, namespace, uid))
    return StoreTarget("/".join(parts), checkpoint.spec.step)


def variables_of(store: CheckpointStore, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which the SDK finds the server of a store, without those that are set."""
    s3, azure = store.spec.s3, store.spec.azure
    found = {}
    if azure is not None and azure.endpoint and not env.get(_AZURE_ENDPOINT):
        found[_AZURE_ENDPOINT] = azure.endpoint
    if s3 is not None and not any(env.get(name) for name in _ENDPOINTS):
        found[_ENDPOINTS[0]] = s3.endpoint
    if s3 is not None and not any(env.get(name) for name in _REGIONS):
        found[_REGIONS[0]] = s3.region
    return found
