"""The images of a release: an OCI layout with labels, and a bill of materials of what the image has."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tools.release import images, oci_image
from tools.release.source import ReleaseError, Source


def tarred(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def save(path: Path, *layers: bytes, architecture: str = "amd64") -> None:
    """Write an image with these layers, as Docker 28 does: an index, a manifest and Docker's own list."""
    blobs: dict[str, bytes] = {}

    def add(data: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    described = [add(one, "application/vnd.docker.image.rootfs.diff.tar") for one in layers]
    config = {
        "architecture": architecture,
        "os": "linux",
        "created": "2026-01-01T00:00:00Z",
        "config": {
            "Env": ["PATH=/usr/bin"],
            "Entrypoint": ["holdfast-sidecar"],
            "User": "65532:65532",
            "Labels": {"dev.holdfast.inputs": "0123"},
        },
        "rootfs": {"type": "layers", "diff_ids": [one["digest"] for one in described]},
        "history": [{"created_by": "base"} for _ in layers],
    }
    about = add(json.dumps(config).encode(), "application/vnd.docker.container.image.v1+json")
    manifest = {"schemaVersion": 2, "config": about, "layers": described}
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    index = {"schemaVersion": 2, "manifests": [add(json.dumps(manifest).encode(), kind)]}
    files = {"index.json": json.dumps(index).encode(), "manifest.json": b"[]", **blobs}
    path.write_bytes(tarred(files))


SOURCE = Source("1.2.3", "a" * 40, 1_700_000_000)
PACKAGES = "usr/lib/python3.13/site-packages"
STATUS = b"""Package: libc6
Status: install ok installed
Version: 2.41-12+deb13u1

Package: removed
Status: deinstall ok config-files
Version: 1
"""
BASE = tarred(
    {
        "var/lib/dpkg/status": STATUS,
        f"{PACKAGES}/old-1.0.dist-info/METADATA": b"Name: old\nVersion: 1.0\n\nWords.\n",
    }
)
ON_TOP = tarred(
    {
        f"{PACKAGES}/.wh.old-1.0.dist-info": b"",
        f"{PACKAGES}/Holdfast_Core-1.2.3.dist-info/METADATA": b"Name: Holdfast_Core\nVersion: 1.2.3\n",
        f"{PACKAGES}/holdfast_core/METADATA": b"Name: no-package\nVersion: 9\n",
    }
)


@pytest.fixture
def saved(tmp_path: Path) -> oci_image.Saved:
    save(tmp_path / "saved.tar", BASE, ON_TOP)
    return oci_image.read_saved(tmp_path / "saved.tar")


class Layout:
    """Read an OCI layout in an archive, and check each blob that is read."""

    def __init__(self, path: Path) -> None:
        with tarfile.open(path) as files:
            self.files = {one.name: files.extractfile(one).read() for one in files}  # type: ignore[union-attr]

    def blob(self, descriptor: dict[str, Any]) -> bytes:
        data = self.files[oci_image.blob_name(descriptor["digest"])]
        assert f"sha256:{hashlib.sha256(data).hexdigest()}" == descriptor["digest"]
        assert len(data) == descriptor["size"]
        return data

    def document(self, descriptor: dict[str, Any]) -> Any:
        return json.loads(self.blob(descriptor))

    @property
    def manifests(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.files["index.json"])["manifests"]
        return found


def test_a_released_image_keeps_its_layers_and_gets_labels(
    saved: oci_image.Saved, tmp_path: Path
) -> None:
    images.write(images.SIDECAR, SOURCE, saved, None, tmp_path)

    layout = Layout(tmp_path / "holdfast-sidecar-1.2.3.oci.tar")
    image, _ = layout.manifests
    assert image["annotations"]["org.opencontainers.image.ref.name"] == "1.2.3"
    assert image["platform"] == {"os": "linux", "architecture": "amd64"}
    manifest = layout.document(image)
    assert [layout.blob(one) for one in manifest["layers"]] == [BASE, ON_TOP]
    assert {one["mediaType"] for one in manifest["layers"]} == {oci_image.LAYER_TYPE}
    config = layout.document(manifest["config"])
    assert config["config"]["Entrypoint"] == ["holdfast-sidecar"]
    assert config["config"]["Labels"] == {
        "org.opencontainers.image.title": "holdfast/sidecar",
        "org.opencontainers.image.description": "The Holdfast sidecar, in each worker's pod",
        "org.opencontainers.image.version": "1.2.3",
        "org.opencontainers.image.revision": "a" * 40,
        "org.opencontainers.image.licenses": "Apache-2.0",
    }
    assert config["created"] == "2023-11-14T22:13:20Z"


def test_docker_loads_a_released_image_by_its_name(saved: oci_image.Saved, tmp_path: Path) -> None:
    images.write(images.SIDECAR, SOURCE, saved, None, tmp_path)

    layout = Layout(tmp_path / "holdfast-sidecar-1.2.3.oci.tar")
    manifest = layout.document(layout.manifests[0])
    (listed,) = json.loads(layout.files["manifest.json"])
    assert listed["RepoTags"] == ["holdfast/sidecar:1.2.3"]
    assert layout.files[listed["Config"]] == layout.blob(manifest["config"])
    assert [layout.files[name] for name in listed["Layers"]] == [BASE, ON_TOP]


def test_the_bill_of_materials_has_what_the_image_has_and_refers_to_it(
    saved: oci_image.Saved, tmp_path: Path
) -> None:
    images.write(images.OPERATOR, SOURCE, saved, None, tmp_path)

    layout = Layout(tmp_path / "holdfast-operator-1.2.3.oci.tar")
    image, attached = layout.manifests
    manifest = layout.document(attached)
    assert manifest["subject"]["digest"] == image["digest"]
    assert layout.blob(manifest["config"]) == b"{}"
    text = layout.blob(manifest["layers"][0])
    assert text == (tmp_path / "holdfast-operator-1.2.3.cdx.json").read_bytes()
    bill = json.loads(text)
    assert bill["metadata"]["component"]["bom-ref"] == image["digest"]
    assert [one["purl"] for one in bill["components"]] == [
        "pkg:deb/debian/libc6@2.41-12%2Bdeb13u1",
        "pkg:pypi/holdfast-core@1.2.3",
    ]


def test_the_sdk_is_one_layer_whose_program_copies_it_to_a_volume(
    saved: oci_image.Saved, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    (files / "bin").mkdir(parents=True)
    (files / "bin/holdfast").write_text("#!/bin/sh\necho started\n")
    (files / "bin/holdfast").chmod(0o755)
    (files / "copy_to.py").write_text((images_root() / "copy_to.py").read_text())
    images.write(images.SDK, SOURCE, saved, images.packed(files, SOURCE), tmp_path)

    layout = Layout(tmp_path / "holdfast-sdk-1.2.3.oci.tar")
    manifest = layout.document(layout.manifests[0])
    config = layout.document(manifest["config"])
    assert (
        len(manifest["layers"]) == len(config["rootfs"]["diff_ids"]) == len(config["history"]) == 3
    )
    layer = layout.blob(manifest["layers"][-1])
    assert config["rootfs"]["diff_ids"][-1] == manifest["layers"][-1]["digest"]
    root, volume = tmp_path / "root", tmp_path / "volume"
    volume.mkdir()
    with tarfile.open(fileobj=io.BytesIO(layer)) as entries:
        # Python 3.11 before 3.11.4 has no filters, and no argument `filter`.
        entries.extraction_filter = getattr(tarfile, "tar_filter", lambda member, path: member)
        entries.extractall(root)
    program, script = config["config"]["Entrypoint"]
    assert program == "python3"
    assert config["config"]["Cmd"] == []
    subprocess.run([sys.executable, f"{root}{script}", volume], check=True)
    assert subprocess.check_output([volume / "bin/holdfast"]) == b"started\n"


def images_root() -> Path:
    return Path(images.__file__).parent


def test_the_same_image_gives_the_same_bytes(saved: oci_image.Saved, tmp_path: Path) -> None:
    written = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        images.write(images.SDK, SOURCE, saved, BASE, tmp_path / name)
        written.append({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()})
    assert written[0] == written[1]
    assert sorted(written[0]) == ["holdfast-sdk-1.2.3.cdx.json", "holdfast-sdk-1.2.3.oci.tar"]


def test_an_archive_of_an_old_engine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.tar").write_bytes(tarred({"manifest.json": b"[]"}))
    with pytest.raises(ReleaseError, match=r"old\.tar: index\.json is missing.*Docker 25"):
        oci_image.read_saved(tmp_path / "old.tar")


def test_a_base_without_wheels_for_its_machine_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "saved.tar", BASE, architecture="s390x")
    base = oci_image.read_saved(tmp_path / "saved.tar")
    with pytest.raises(ReleaseError, match="for s390x, and the SDK has wheels for amd64, arm64"):
        images.sdk_layer(Path(), SOURCE, base)
