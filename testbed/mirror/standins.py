"""Images that replace public ones, published in the mirror's registry under the public names."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from pathlib import Path

from testbed import config, host, nodeimage, template
from testbed.config import Bed
from testbed.shell import run
from testbed.steps import Step

ADDRESS = "127.0.0.1:5000"
NODE = config.KINDEST_NODE.split("@")[0]
"""The node image by tag, because a stand-in does not have the pinned digest."""
_HERE = Path(__file__).resolve().parent
_KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "failCgroupV1": False,
    "featureGates": {"KubeletInUserNamespace": True},
}
"""Kubelet configuration for a host with cgroup v1 or without CAP_SYS_RESOURCE, on which the published node
image does not run."""
_DROP_INS = "etc/kubernetes/kubelet.conf.d"


def repository(tag: str) -> tuple[str, str]:
    """Return repository and tag of an image in a registry for Docker Hub: ("library/python", "3.13-slim")."""
    name, version = tag.split(":")
    return (name if "/" in name else f"library/{name}"), version


def published(tag: str) -> bool:
    name, version = repository(tag)
    connection = http.client.HTTPConnection(ADDRESS, timeout=10)
    try:
        connection.request("GET", f"/v2/{name}/tags/list")
        answer = connection.getresponse()
        return answer.status == 200 and version in (json.load(answer)["tags"] or [])
    finally:
        connection.close()


def publish(bed: Bed, tag: str, log: Path) -> None:
    """Push the engine's image and delete it from the engine, so that the test bed must pull it."""
    env, name = bed.environment(), f"{ADDRESS}/{':'.join(repository(tag))}"
    run(["docker", "tag", tag, name], env=env, log=log)
    run(["docker", "push", "-q", name], env=env, log=log)
    run(["docker", "rmi", tag, name], env=env, log=log)


def debian(bed: Bed, log: Path) -> None:
    folder = host.debootstrap(bed, "debian", config.OFFLINE_SUITE, [], log)
    nodeimage.import_rootfs(bed, folder, config.REGISTRY_TORCH_BASE, log, 'CMD ["bash"]')
    run(["rm", "-rf", folder])
    publish(bed, config.REGISTRY_TORCH_BASE, log)


def python(bed: Bed, log: Path) -> None:
    command = ["docker", "build", "-q", "--network=host", "-t", config.REGISTRY_BASE, "-"]
    text = (_HERE / "python.Dockerfile").read_bytes()
    run(command, env=bed.environment(), log=log, stdin=text)
    publish(bed, config.REGISTRY_BASE, log)


def node(bed: Bed, log: Path) -> None:
    """Build local mode's node image with the contents of a published one: images and a pod network."""
    images = nodeimage.component_images(bed, log)
    run(["rm", "-rf", bed.template])
    template.add(bed, [*images, nodeimage.ROOTFS_IMAGE], log)
    run(["docker", "rmi", *images], env=bed.environment(), log=log)
    files = nodeimage.node_files(bed, log)
    store = files / "var/lib/containerd"
    store.parent.mkdir(parents=True, exist_ok=True)
    bed.template.rename(store)
    network = (_HERE / "cni.yaml").read_text().replace("HELPER_IMAGE", nodeimage.ROOTFS_IMAGE)
    (files / "kind/manifests/default-cni.yaml").write_text(network)
    (files / _DROP_INS).mkdir(parents=True, exist_ok=True)
    (files / _DROP_INS / "10-host.conf").write_text(json.dumps(_KUBELET))
    flags = files / "etc/default/kubelet"
    flags.write_text(f"{flags.read_text().rstrip()} --config-dir=/{_DROP_INS}\n")
    nodeimage.import_node(bed, files, NODE, log)
    publish(bed, NODE, log)


def steps(bed: Bed) -> list[Step]:
    """Return the steps that build and publish the stand-ins.

    A step runs again if its inputs change or the registry has lost its image.
    """

    def step(tag: str, make: Callable[[Bed, Path], None], *inputs: str | Path) -> Step:
        return Step(
            f"stand-in {tag.split('/')[-1].split(':')[0]}",
            lambda log: make(bed, log),
            inputs=(tag, *inputs),
            present=lambda: published(tag),
            advice="needs Debian's mirror",
        )

    own = (_HERE / "cni.yaml", Path(__file__))
    rootfs = (config.NODE_SUITE, nodeimage.NODE_PACKAGES, nodeimage.ROOTFS_IMAGE)
    return [
        step(config.REGISTRY_TORCH_BASE, debian, config.OFFLINE_SUITE),
        step(config.REGISTRY_BASE, python, _HERE / "python.Dockerfile"),
        nodeimage.rootfs_step(bed, "node", *rootfs),
        step(NODE, node, nodeimage.node_tag(), *own),
    ]
