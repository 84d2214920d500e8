"""Local volumes of the nodes: storage classes and PersistentVolumes, as a local provisioner offers them.

A volume is a folder of the node. Nothing provisions volumes here, so each is used once, and the classes and
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
    kube: Kube, classes: Sequence[str], nodes: Sequence[str], *, each: int = 4, size: str = "2Gi"
) -> Iterator[None]:
    """Offer `each` volumes of each storage class on each of the nodes, and delete them at the end.

    Scenarios that run side by side need classes of their own.
    """
    storage = client.StorageV1Api(kube.api)
    _delete(kube, classes)
    wait_for(
        f"the volumes of {', '.join(classes)} to go",
        lambda: not any(_volumes_of(kube, name) for name in classes),
        timeout_seconds=60,
    )
    for name in classes:
        storage.create_storage_class(
            {
                "metadata": {"name": name},
                "provisioner": "kubernetes.io/no-provisioner",
                "volumeBindingMode": "WaitForFirstConsumer",
            }
        )
        for node in nodes:
            volumes = [_volume(name, node, number, size) for number in range(each)]
            paths = " ".join(volume["spec"]["local"]["path"] for volume in volumes)
            script = f"rm -rf {_FOLDER}/{name}-*; mkdir -p {paths}"
            cluster.in_node(current_bed(), node, script)
            for volume in volumes:
                kube.core.create_persistent_volume(volume)
    try:
        yield
    finally:
        _delete(kube, classes)


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


def _delete(kube: Kube, classes: Sequence[str]) -> None:
    storage = client.StorageV1Api(kube.api)
    for name in classes:
        kube.core.delete_collection_persistent_volume(label_selector=f"holdfast.dev/test={name}")
        with ignore_missing():
            storage.delete_storage_class(name)
