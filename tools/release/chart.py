"""The chart: a package for Helm, the same as an OCI artefact, and what Artifact Hub shows of it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import yaml
from tools.release import archive, notes
from tools.release.archive import File
from tools.release.source import Source

CONFIG_TYPE = "application/vnd.cncf.helm.config.v1+json"
CONTENT_TYPE = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
IMAGES = ("operator", "sidecar")


def build(root: Path, source: Source, out: Path) -> None:
    """Write holdfast-VERSION.tgz, and holdfast-chart-VERSION.oci.tar with the same package."""
    about = yaml.safe_load((root / "charts/holdfast/Chart.yaml").read_text())
    about["annotations"] = hub_annotations(root, source.version)
    files = archive.folder_files(root / "charts/holdfast", "holdfast/")
    files["holdfast/Chart.yaml"] = File(_yaml(about).encode())
    files["holdfast/LICENSE"] = File((root / "LICENSE").read_bytes())
    package = archive.tar_gz(files, source.epoch)
    archive.write(out / f"holdfast-{source.version}.tgz", package)
    packed = io.BytesIO()
    archive.tar(oci_layout(about, package, source), source.epoch, packed)
    archive.write(out / f"holdfast-chart-{source.version}.oci.tar", packed.getvalue())


def oci_layout(about: dict[str, Any], package: bytes, source: Source) -> dict[str, File]:
    """Return the OCI layout that `helm push` would write to a registry."""
    config = archive.encode(about)
    manifest = archive.encode(
        {
            "schemaVersion": 2,
            "mediaType": archive.MANIFEST_TYPE,
            "config": archive.descriptor(CONFIG_TYPE, config),
            "layers": [archive.descriptor(CONTENT_TYPE, package)],
            "annotations": {
                "org.opencontainers.image.title": about["name"],
                "org.opencontainers.image.description": about["description"],
                "org.opencontainers.image.version": source.version,
                "org.opencontainers.image.revision": source.revision,
                "org.opencontainers.image.licenses": "Apache-2.0",
            },
        }
    )
    named = archive.descriptor(
        archive.MANIFEST_TYPE, manifest, annotations={archive.REF_NAME: source.version}
    )
    return archive.layout([named], [config, package, manifest])


def hub_annotations(root: Path, version: str) -> dict[str, str]:
    """Return the annotations of Chart.yaml that Artifact Hub reads. Lists are YAML within a string."""
    crds = [yaml.safe_load(path.read_text()) for path in sorted((root / "crds").glob("*.yaml"))]
    examples = sorted((root / "examples/objects").glob("*.yaml"))
    return {
        "artifacthub.io/license": "Apache-2.0",
        "artifacthub.io/operator": "true",
        "artifacthub.io/operatorCapabilities": "Full Lifecycle",
        "artifacthub.io/images": _yaml(
            [{"name": name, "image": f"holdfast/{name}:{version}"} for name in IMAGES]
        ),
        "artifacthub.io/crds": _yaml([_described(crd) for crd in crds]),
        "artifacthub.io/crdsExamples": _yaml(
            [yaml.safe_load(path.read_text()) for path in examples]
        ),
        "artifacthub.io/changes": _yaml(notes.changes(root, version)),
    }


def _described(crd: dict[str, Any]) -> dict[str, str]:
    version = crd["spec"]["versions"][0]
    return {
        "kind": crd["spec"]["names"]["kind"],
        "version": version["name"],
        "name": crd["metadata"]["name"],
        "displayName": crd["spec"]["names"]["kind"],
        "description": version["schema"]["openAPIV3Schema"]["description"],
    }


def _yaml(document: Any) -> str:
    return yaml.safe_dump(document, sort_keys=False, width=1000, allow_unicode=True)
