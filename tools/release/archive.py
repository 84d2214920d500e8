"""Archives and OCI layouts whose bytes depend on their contents alone."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
REF_NAME = "org.opencontainers.image.ref.name"


@dataclass(frozen=True, slots=True)
class File:
    data: bytes
    executable: bool = False


def folder_files(folder: Path, prefix: str) -> dict[str, File]:
    """Return the files below a folder, by their path below `prefix`."""
    return {
        f"{prefix}{path.relative_to(folder).as_posix()}": File(
            path.read_bytes(), os.access(path, os.X_OK)
        )
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def tar(files: Mapping[str, File], epoch: int, out: IO[bytes]) -> None:
    """Write a tar archive: sorted names, one time, owner 0, without extended headers."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(files[name].data), epoch
            member.mode = 0o755 if files[name].executable else 0o644
            archive.addfile(member, io.BytesIO(files[name].data))


def tar_gz(files: Mapping[str, File], epoch: int) -> bytes:
    """Return a gzipped tar archive. The header of gzip has neither a name nor a time."""
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=packed, mode="wb", compresslevel=6, mtime=0) as out:
        tar(files, epoch, out)  # type: ignore[arg-type]  # GzipFile is a binary stream, not an IO
    return packed.getvalue()


def encode(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def descriptor(media_type: str, data: bytes, **more: Any) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data), **more}


def layout(manifests: Iterable[dict[str, Any]], blobs: Iterable[bytes]) -> dict[str, File]:
    """Return the files of an OCI layout with these descriptors in its index."""
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": list(manifests)}
    files = {
        "oci-layout": File(encode({"imageLayoutVersion": "1.0.0"})),
        "index.json": File(encode(index)),
    }
    for blob in blobs:
        files[f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}"] = File(blob)
    return files


def write(path: Path, data: bytes) -> None:
    """Write a file under another name first, so that an interrupted release leaves no part of a file."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(data)
    partial.replace(path)


def stream(data: bytes) -> IO[bytes]:
    return io.BytesIO(data)
