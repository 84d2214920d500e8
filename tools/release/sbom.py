"""The software bill of materials of an image: its Debian and Python packages, read from its layers."""

from __future__ import annotations

import posixpath
import uuid
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from email.parser import BytesHeaderParser
from typing import IO, Any

from tools.release.oci_image import open_layer

MEDIA_TYPE = "application/vnd.cyclonedx+json"
_STATUS = "var/lib/dpkg/status"
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"


def interesting(path: str) -> bool:
    folder, name = posixpath.split(path)
    of_python = name == "METADATA" and folder.endswith(".dist-info")
    return of_python or path == _STATUS or folder == f"{_STATUS}.d"


def package_files(layers: Iterable[IO[bytes]]) -> dict[str, bytes]:
    """Return the files that name packages, as the image has them: a later layer replaces and deletes."""
    found: dict[str, bytes] = {}
    for layer in layers:
        with open_layer(layer) as entries:
            for entry in entries:
                path = posixpath.normpath(entry.name).lstrip("/")
                folder, name = posixpath.split(path)
                if name.startswith(_WHITEOUT):
                    gone = folder if name == _OPAQUE else f"{folder}/{name[len(_WHITEOUT) :]}"
                    for known in [p for p in found if p == gone or p.startswith(f"{gone}/")]:
                        del found[known]
                elif entry.isfile() and interesting(path):
                    data = entries.extractfile(entry)
                    found[path] = data.read() if data else b""
    return found


def components(files: dict[str, bytes]) -> list[dict[str, Any]]:
    """Return CycloneDX components: one for each package and version, sorted by name."""
    found = {}
    for path, data in files.items():
        if path.endswith("METADATA"):
            about = BytesHeaderParser().parsebytes(data)
            listed = [("pypi", about["Name"].lower().replace("_", "-"), about["Version"])]
        else:
            listed = [("deb/debian", *pair) for pair in _installed(data)]
        for kind, name, version in listed:
            purl = f"pkg:{kind}/{name}@{version.replace('+', '%2B').replace(':', '%3A')}"
            found[purl] = {
                "type": "library",
                "bom-ref": purl,
                "name": name,
                "version": version,
                "purl": purl,
            }
    return [found[purl] for purl in sorted(found)]


def _installed(status: bytes) -> Iterator[tuple[str, str]]:
    for paragraph in status.split(b"\n\n"):
        about = BytesHeaderParser().parsebytes(paragraph.strip(b"\n"))
        state = about.get("Status", "install ok installed")
        if about.get("Package") and state.endswith(" installed"):
            yield about["Package"], about["Version"]


def document(
    name: str, version: str, digest: str, epoch: int, listed: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the document for the image with this digest of its manifest."""
    stamp = datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    about = {"type": "container", "name": name, "version": version}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {"timestamp": stamp, "component": about | {"bom-ref": digest}},
        "components": listed,
    }
