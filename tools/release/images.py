"""The images of a release, as OCI layouts with labels and a software bill of materials.

Operator and sidecar are those that the test bed has built. The SDK's image is the base of these two, and
one layer with the SDK.
"""

from __future__ import annotations

import io
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from testbed import images as built
from testbed.config import current_bed
from testbed.shell import BedError, run
from tools.release import archive, oci_image, sbom, sdk_image
from tools.release.oci_image import Change, Saved
from tools.release.source import ReleaseError, Source

PLATFORMS = {"amd64": "x86_64-manylinux_2_28", "arm64": "aarch64-manylinux_2_28"}
"""uv's name of each platform, by the architecture of an image."""


@dataclass(frozen=True, slots=True)
class Image:
    name: str
    description: str


OPERATOR = Image("operator", "The Holdfast operator")
SIDECAR = Image("sidecar", "The Holdfast sidecar, in each worker's pod")
SDK = Image("sdk", "The Holdfast SDK in /opt/holdfast, for images of trainers")


def build(root: Path, source: Source, out: Path) -> None:
    """Write each image and its bill of materials: holdfast-NAME-VERSION.oci.tar and .cdx.json."""
    bed = current_bed()
    tags = {f"holdfast/{one.name}:dev": one for one in (OPERATOR, SIDECAR)}
    base = next(built.base_of(bed, one) for one in built.IMAGES if one.tag in tags)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "saved.tar"
        for tag, image in [*tags.items(), (base, SDK)]:
            try:
                run(["docker", "save", "-o", file, tag], env=bed.environment())
            except BedError as error:
                raise ReleaseError(
                    f"the image {tag} cannot be read: {error}. Build it with `make images`"
                ) from error
            saved = oci_image.read_saved(file)
            layer = sdk_layer(root, source, saved) if image is SDK else None
            write(image, source, saved, layer, out)


def sdk_layer(root: Path, source: Source, base: Saved) -> bytes:
    """Return the layer that brings /opt/holdfast to an image on this base."""
    machine = base.config["architecture"]
    if machine not in PLATFORMS:
        raise ReleaseError(
            f"the base image is for {machine}, and the SDK has wheels for {', '.join(PLATFORMS)}"
        )
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "files"
        sdk_image.fill(root, source, files, platform=PLATFORMS[machine])
        return packed(files, source)


def packed(files: Path, source: Source) -> bytes:
    layer = io.BytesIO()
    archive.tar(archive.folder_files(files, "opt/holdfast/"), source.epoch, layer)
    return layer.getvalue()


def write(image: Image, source: Source, saved: Saved, layer: bytes | None, out: Path) -> None:
    """Write one image of the release, with the layer of the SDK if it is given."""
    name = f"holdfast/{image.name}"
    entrypoint = ("python3", "/opt/holdfast/copy_to.py") if layer is not None else ()
    change = Change(labels(image, source), source.epoch, layer, entrypoint)
    document, layers = oci_image.changed(saved, change)
    config = archive.encode(document)
    manifest = archive.encode(
        {
            "schemaVersion": 2,
            "mediaType": archive.MANIFEST_TYPE,
            "config": archive.descriptor(oci_image.CONFIG_TYPE, config),
            "layers": layers,
            "annotations": labels(image, source),
        }
    )
    subject = archive.descriptor(archive.MANIFEST_TYPE, manifest)
    found = sbom.package_files(data for _, data in saved.blobs())
    if layer is not None:
        found |= sbom.package_files([archive.stream(layer)])
    listed = sbom.components(found)
    bill = sbom.document(name, source.version, subject["digest"], source.epoch, listed)
    text = (json.dumps(bill, indent=1) + "\n").encode()
    empty = b"{}"
    attached = archive.encode(
        {
            "schemaVersion": 2,
            "mediaType": archive.MANIFEST_TYPE,
            "artifactType": sbom.MEDIA_TYPE,
            "config": archive.descriptor(archive.EMPTY_TYPE, empty),
            "layers": [archive.descriptor(sbom.MEDIA_TYPE, text)],
            "subject": subject,
        }
    )
    named = subject | {
        "annotations": {
            archive.REF_NAME: source.version,
            "io.containerd.image.name": f"docker.io/{name}:{source.version}",
        },
        "platform": {"os": "linux", "architecture": saved.config["architecture"]},
    }
    bills = archive.descriptor(archive.MANIFEST_TYPE, attached, artifactType=sbom.MEDIA_TYPE)
    blobs = [config, manifest, text, empty, attached, *([layer] if layer is not None else [])]
    stem = f"holdfast-{image.name}-{source.version}"
    files = archive.layout([named, bills], blobs)
    files["manifest.json"] = oci_image.docker_list(f"{name}:{source.version}", config, layers)
    oci_image.write_layout(out / f"{stem}.oci.tar", saved, files, source.epoch)
    archive.write(out / f"{stem}.cdx.json", text)


def labels(image: Image, source: Source) -> dict[str, str]:
    return {
        "org.opencontainers.image.title": f"holdfast/{image.name}",
        "org.opencontainers.image.description": image.description,
        "org.opencontainers.image.version": source.version,
        "org.opencontainers.image.revision": source.revision,
        "org.opencontainers.image.licenses": "Apache-2.0",
    }
