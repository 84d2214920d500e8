"""Loads images into the nodes: only the blobs that a node lacks are sent, to all nodes in parallel."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from testbed import archive, cluster, config
from testbed.config import NODES, Bed
from testbed.images import IMAGES
from testbed.shell import BedError, each, run

_CTR = "ctr -n k8s.io"


def load(bed: Bed, log: Path, tags: Collection[str] = ()) -> str:
    """Load the images, by default all of the project's, of which some node lacks the current version."""
    wanted = list(tags) or [image.tag for image in IMAGES]
    if not bed.local and not tags:
        wanted.append(config.MINIO_IMAGE)
    running = [n for n in NODES if cluster.containers(bed).get(n) == "running"]
    ids = image_ids(bed, wanted)
    have = dict(zip(running, each(lambda node: node_images(bed, node), running), strict=True))
    changed = [tag for tag in wanted if any(ids[tag] not in have[node] for node in running)]
    if not changed:
        return "nodes have all images"
    known = each(lambda node: node_blobs(bed, node), running)
    try:
        return send(bed, running, changed, set.intersection(*known))
    except BedError as error:  # a node may have garbage-collected a blob in the meantime
        log.write_text(f"{error}\nloading again, with all blobs\n")
        return send(bed, running, changed, ())


def image_ids(bed: Bed, tags: Collection[str]) -> dict[str, str]:
    """Return Docker's id of each image.

    It is the digest of the image's configuration or, with Docker's containerd image store, of its index.
    """
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
    """Return both ids of each tagged image of a node (see `image_ids`)."""
    return ids_of_tagged(cluster.in_node(bed, node, f"{_CTR} images ls"))


def ids_of_tagged(listing: str) -> set[str]:
    """Return both ids of each image with a tag in the output of `ctr images ls`: REF TYPE DIGEST ...

    DIGEST is that of the image's manifest or index. CRI names each image after its configuration, too, as
    `sha256:...`. That name, and names by digest, stay after a tag has moved, so that they count only where
    a tag has the same digest.
    """
    rows = [row for line in listing.splitlines()[1:] if len(row := line.split()) > 2]
    tagged = {
        digest for name, _, digest, *_ in rows if "@" not in name and not _is_configuration(name)
    }
    return tagged | {
        name for name, _, digest, *_ in rows if digest in tagged and _is_configuration(name)
    }


def _is_configuration(name: str) -> bool:
    return name.startswith("sha256:")


def node_blobs(bed: Bed, node: str) -> set[str]:
    return set(cluster.in_node(bed, node, f"{_CTR} content ls -q").split())


def send(bed: Bed, nodes: Collection[str], tags: Collection[str], known: Collection[str]) -> str:
    """Import the images in all nodes in parallel, without the blobs in `known`."""
    file = bed.work / "load.tar"
    with file.open("wb") as out:
        archive.write_missing(bed, tags, known, out)

    def take(node: str) -> str:
        command = ["docker", "exec", "-i", node, "ctr", "-n", "k8s.io", "images", "import", "-"]
        with file.open("rb") as data:
            return run(command, env=bed.environment(), stdin=data)

    each(take, nodes)
    size = file.stat().st_size / 1e6
    file.unlink()
    return f"loaded {', '.join(tag.split('/')[1] for tag in tags)}: {size:.1f} MB per node"
