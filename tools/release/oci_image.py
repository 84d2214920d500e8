"""An image as `docker save` writes it, and the same as an OCI layout with other labels and more layers."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from tools.release import archive
from tools.release.source import ReleaseError

CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
_DOCKER = {
    "application/vnd.docker.image.rootfs.diff.tar": LAYER_TYPE,
    "application/vnd.docker.image.rootfs.diff.tar.gzip": f"{LAYER_TYPE}+gzip",
}
"""The types of layers in OCI by those of Docker, whose bytes are the same."""


@dataclass(frozen=True, slots=True)
class Saved:
    """An image in an archive: its configuration, and the descriptors of its layers."""

    path: Path
    config: dict[str, Any]
    layers: tuple[dict[str, Any], ...]

    def blobs(self) -> Iterator[tuple[str, IO[bytes]]]:
        """Yield each layer's digest and bytes, first layer first."""
        with tarfile.open(self.path) as files:
            for one in self.layers:
                data = files.extractfile(blob_name(one["digest"]))
                assert data is not None
                yield one["digest"], data


def blob_name(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def read_saved(path: Path) -> Saved:
    """Read an archive with one image, for one platform."""
    with tarfile.open(path) as files:
        names = set(files.getnames())

        def document(name: str) -> Any:
            if name not in names:
                raise ReleaseError(
                    f"{path.name}: {name} is missing. `docker save` writes an OCI layout from Docker 25 on"
                )
            data = files.extractfile(name)
            assert data is not None
            return json.loads(data.read())

        found = document("index.json")
        while "manifests" in found:
            images = [
                one
                for one in found["manifests"]
                if one.get("platform", {}).get("os") != "unknown"
                and blob_name(one["digest"]) in names
            ]
            if len(images) != 1:
                raise ReleaseError(f"{path.name}: expected one image, found {len(images)}")
            found = document(blob_name(images[0]["digest"]))
        config = document(blob_name(found["config"]["digest"]))
    layers = (
        one | {"mediaType": _DOCKER.get(one["mediaType"], one["mediaType"])}
        for one in found["layers"]
    )
    return Saved(path, config, tuple(layers))


@contextmanager
def open_layer(data: IO[bytes]) -> Iterator[tarfile.TarFile]:
    with tarfile.open(fileobj=data) as entries:
        yield entries


@dataclass(frozen=True, slots=True)
class Change:
    """What a release changes in a saved image."""

    labels: dict[str, str]
    epoch: int
    layer: bytes | None = None
    """A tar archive that becomes the last layer."""
    entrypoint: tuple[str, ...] = ()
    """Replaces the program of the image; empty to keep it."""


def changed(saved: Saved, change: Change) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the configuration and the layers of the image with the change."""
    created = datetime.fromtimestamp(change.epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    inside = saved.config.get("config", {}) | {"Labels": dict(sorted(change.labels.items()))}
    if change.entrypoint:
        inside |= {"Entrypoint": [*change.entrypoint], "Cmd": [], "User": "65532:65532"}
    config = saved.config | {"created": created, "config": inside}
    layers = list(saved.layers)
    if change.layer is not None:
        digest = archive.digest_of(change.layer)
        layers.append(archive.descriptor(LAYER_TYPE, change.layer))
        rootfs = saved.config["rootfs"]
        config["rootfs"] = rootfs | {"diff_ids": [*rootfs["diff_ids"], digest]}
        step = {"created": created, "created_by": f"holdfast release: layer {digest}"}
        config["history"] = [*saved.config.get("history", []), step]
    return config, layers


def docker_list(tag: str, config: bytes, layers: list[dict[str, Any]]) -> archive.File:
    """Return Docker's manifest.json, without which `docker load` of most engines reads no OCI layout."""
    found = {
        "Config": blob_name(archive.digest_of(config)),
        "RepoTags": [tag],
        "Layers": [blob_name(one["digest"]) for one in layers],
    }
    return archive.File(archive.encode([found]))


def write_layout(out: Path, saved: Saved, files: Mapping[str, archive.File], epoch: int) -> None:
    """Write the files of an OCI layout, and the layers of the saved image."""
    partial = out.with_name(f".{out.name}.partial")
    with tarfile.open(partial, "w", format=tarfile.GNU_FORMAT) as target:

        def add(name: str, data: IO[bytes], size: int) -> None:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = size, epoch, 0o644
            target.addfile(entry, data)

        for name, file in sorted(files.items()):
            add(name, archive.stream(file.data), len(file.data))
        sizes = {one["digest"]: one["size"] for one in saved.layers}
        written = set[str]()
        for digest, data in saved.blobs():
            if digest not in written:
                add(blob_name(digest), data, sizes[digest])
                written.add(digest)
    partial.replace(out)
