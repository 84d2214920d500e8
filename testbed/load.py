"""Bring images into the nodes: only the blobs that a node lacks are sent, to all nodes at once."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections.abc import Collection
from pathlib import Path

from testbed import cluster, config
from testbed.config import CLUSTER, NODES, Bed
from testbed.images import IMAGES
from testbed.shell import BedError, each, run

_CTR = "ctr -n k8s.io"


def load(bed: Bed, log: Path, tags: Collection[str] = ()) -> str:
    """Load the images (by default all of ours) that some node does not have as they are now."""
    wanted = list(tags) or [image.tag for image in IMAGES]
    if not bed.local and not tags:
        wanted.append(config.MINIO_IMAGE)
    running = [n for n in NODES if cluster.containers(bed).get(n) == "running"]
    ids = image_ids(bed, wanted)
    have = dict(zip(running, each(lambda node: node_images(bed, node), running), strict=True))
    changed = [tag for tag in wanted if any(ids[tag] not in have[node] for node in running)]
    if not changed:
        return "nodes have all images"
    if not bed.local:
        run(["kind", "load", "docker-image", "--name", CLUSTER, *changed], env=bed.environment())
        return f"loaded {', '.join(changed)}"
    known = each(lambda node: node_blobs(bed, node), running)
    archive = missing_archive(bed, changed, set.intersection(*known))
    outcome = each(lambda node: import_archive(bed, node, archive), running)
    with log.open("a") as file:
        file.writelines(outcome)
    size = len(archive) / 1e6
    return f"loaded {', '.join(t.split('/')[1] for t in changed)}: {size:.1f} MB a node"


def image_ids(bed: Bed, tags: Collection[str]) -> dict[str, str]:
    """Docker's ids, which are the ids that the nodes' CRI gives too."""
    form = "{{index .RepoTags 0}} {{.Id}}"
    found: dict[str, str] = {}
    for tag in tags:
        command = ["docker", "image", "inspect", "-f", form, tag]
        out = run(command, env=bed.environment(), check=False).split()
        if not out:
            raise BedError(f"image {tag} is not built", "python3 -m testbed images")
        found[tag] = out[1]
    return found


def node_images(bed: Bed, node: str) -> set[str]:
    """`id` of each tagged image of a node. A tag that moved leaves its old id without a tag."""
    listed = json.loads(cluster.in_node(bed, node, "crictl images -o json"))
    return {str(image["id"]) for image in listed["images"] if image.get("repoTags")}


def node_blobs(bed: Bed, node: str) -> set[str]:
    return set(cluster.in_node(bed, node, f"{_CTR} content ls -q").split())


def missing_archive(bed: Bed, tags: Collection[str], known: Collection[str]) -> bytes:
    """An OCI archive of the images without the blobs that every node has."""
    out = io.BytesIO()
    save = ["docker", "save", *tags]
    with (
        subprocess.Popen(save, stdout=subprocess.PIPE, env=bed.environment()) as process,
        tarfile.open(fileobj=out, mode="w") as target,
    ):
        assert process.stdout is not None
        filter_archive(process.stdout, target, known)
        process.stdout.read()
    if process.returncode:
        raise BedError(f"docker save failed: exit {process.returncode}")
    return out.getvalue()


def filter_archive(source: object, target: tarfile.TarFile, known: Collection[str]) -> None:
    """Copy a `docker save` stream, leaving out known blobs and Docker's own older index."""
    with tarfile.open(fileobj=source, mode="r|") as saved:  # type: ignore[call-overload]  # a pipe
        for member in saved:
            name = member.name
            if not member.isfile() or name in ("manifest.json", "repositories"):
                continue
            if name.startswith("blobs/sha256/") and f"sha256:{Path(name).name}" in known:
                continue
            target.addfile(member, saved.extractfile(member))


def import_archive(bed: Bed, node: str, archive: bytes) -> str:
    command = ["docker", "exec", "-i", node, "ctr", "-n", "k8s.io", "images", "import", "-"]
    return run(command, env=bed.environment(), stdin=archive, timeout_seconds=600)
