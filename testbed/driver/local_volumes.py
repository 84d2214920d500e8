"""Local volumes of the nodes: a storage class and PersistentVolumes, as a local provisioner offers them.

A volume is a folder of the node. Nothing provisions volumes here, so each is used once, and the class and
the volumes of a scenario are deleted after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kubernetes import client

from testbed import cluster
from testbed.config import current_bed
from testbed.driver.kube import Kube, Object, ignore_missing, wait_for

_FOLDER = "/var/lib/holdfast-volumes"


@contextmanager
def local_volumes(
    kube: Kube, storage_class: str, nodes: Sequence[str], *, each: int = 4, size: str = "2Gi"
) -> Iterator[None]:
    """Offer `each` volumes of the storage class on each of the nodes, and delete them at the end.

    Scenarios that run side by side need classes of their own.
    """
    _delete(kube, storage_class)
    wait_for(
        f"the volumes of {storage_class} to go",
        lambda: not _volumes_of(kube, storage_class),
    )
    client.StorageV1Api(kube.api).create_storage_class(
        {
            "metadata": {"name": storage_class},
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        }
    )
    for node in nodes:
        volumes = [_volume(storage_class, node, number, size) for number in range(each)]
        paths = " ".join(volume["spec"]["local"]["path"] for volume in volumes)
        script = f"rm -rf {_FOLDER}/{storage_class}-*; mkdir -p {paths}"
        cluster.in_node(current_bed(), node, script)
        for volume in volumes:
            kube.core.create_persistent_volume(volume)
    try:
        yield
    finally:
        _delete(kube, storage_class)


def files_of(storage_class: str, pattern: str, nodes: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of a class whose names match the pattern of `find`, by node."""
    return {
        node: cluster.in_node(
            current_bed(), node, f"find {_FOLDER}/{storage_class}-* -name '{pattern}'"
        ).split()
        for node in nodes
    }


def _volume(storage_class: str, node: str, number: int, size: str) -> Object:
    where = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    return {
        "metadata": {
            "name": f"{storage_class}-{node}-{number}",
            "labels": {"holdfast.dev/test": storage_class},
        },
        "spec": {
            "capacity": {"storage": size},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": storage_class,
            "local": {"path": f"{_FOLDER}/{storage_class}-{number}"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [where]}]}},
        },
    }


def _volumes_of(kube: Kube, storage_class: str) -> list[Object]:
    selector = f"holdfast.dev/test={storage_class}"
    found = kube.core.list_persistent_volume(label_selector=selector)
    volumes: list[Object] = kube.plain(found)["items"]
    return volumes


def _delete(kube: Kube, storage_class: str) -> None:
    selector = f"holdfast.dev/test={storage_class}"
    kube.core.delete_collection_persistent_volume(label_selector=selector)
    with ignore_missing():
        client.StorageV1Api(kube.api).delete_storage_class(storage_class)
