"""The cluster's MinIO as seen from this machine: through a port of the control plane's node."""

from __future__ import annotations

from minio import Minio
from minio.deleteobjects import DeleteObject

from testbed.config import CONTROL_PLANE
from testbed.driver.jobs import BUCKET, MINIO_PASSWORD, MINIO_USER
from testbed.driver.kube import Kube
from testbed.minio import NODE_PORT


def store_client(kube: Kube) -> Minio:
    node = kube.plain(kube.core.read_node(CONTROL_PLANE))
    addresses = {entry["type"]: entry["address"] for entry in node["status"]["addresses"]}
    return Minio(
        endpoint=f"{addresses['InternalIP']}:{NODE_PORT}",
        access_key=MINIO_USER,
        secret_key=MINIO_PASSWORD,
        secure=False,
    )


def delete_objects(kube: Kube, prefix: str) -> None:
    """Delete all objects below the prefix. Raises AssertionError that names those that are left."""
    store = store_client(kube)
    found = store.list_objects(BUCKET, prefix, recursive=True)
    doomed = (DeleteObject(item.object_name) for item in found)
    errors = list(store.remove_objects(BUCKET, doomed))
    assert not errors, f"MinIO does not delete {[str(error) for error in errors]}"
