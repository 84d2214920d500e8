"""A small image in the form in which `docker save` writes it."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any


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
