"""Install uv into a folder, with nothing but a Python: `python3 tools/install_uv.py FOLDER`.

Two ways are tried, in this order:

1. pip with `--target`, which the marker of an externally managed Python (PEP 668) does not forbid, and
   which uses the machine's index, proxy and certificates;
2. a download of the wheel from the package index with the standard library alone, because the python3 of a
   fresh Debian has neither pip nor venv. The wheel is compared with the digest in the index.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

VERSION = "0.13.9"
INDEX = "https://pypi.org/simple"
TAGS = {
    ("Linux", "x86_64"): "manylinux_2_17_x86_64",
    ("Linux", "aarch64"): "manylinux_2_17_aarch64",
    ("Darwin", "x86_64"): "macosx_10_12_x86_64",
    ("Darwin", "arm64"): "macosx_11_0_arm64",
}

UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
"""Part of the error of OpenSSL for a server whose certificate no known authority has signed."""
NO_AUTHORITIES = (
    "This machine may lack the certificates of public authorities. On Debian, install them with:  "
    "apt-get install ca-certificates   (SSL_CERT_FILE names another file)"
)


class NotInstalledError(Exception):
    """This way of installation failed; the text says why."""


def by_pip(folder: Path) -> None:
    """Install with pip. Raises NotInstalledError."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    done = subprocess.run([*command, f"uv=={VERSION}"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotInstalledError(f"pip: {done.stderr.strip().splitlines()[-1:]}")


def by_download(folder: Path, index: str) -> None:
    """Download the wheel. Raises NotInstalledError, or OSError if the index cannot be reached."""
    tag = TAGS.get((platform.system(), platform.machine()))
    if tag is None:
        raise NotInstalledError(f"there is no wheel for {platform.system()} {platform.machine()}")
    page = f"{index.rstrip('/')}/uv/"
    request = urllib.request.Request(
        page, headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        files: list[dict[str, Any]] = json.load(reply)["files"]
    prefix = f"uv-{VERSION}-"
    found = [f for f in files if f["filename"].startswith(prefix) and tag in f["filename"]]
    if not found:
        raise NotInstalledError(f"{page} has no uv {VERSION} for {tag}")
    with urllib.request.urlopen(urljoin(page, found[0]["url"]), timeout=180) as reply:
        data = reply.read()
    wanted = found[0]["hashes"]["sha256"]
    if hashlib.sha256(data).hexdigest() != wanted:
        raise NotInstalledError(f"{found[0]['filename']} does not have the SHA-256 {wanted}")
    with zipfile.ZipFile(io.BytesIO(data)) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".data/scripts/uv"))
        binary = folder / "bin" / "uv"
        binary.parent.mkdir(parents=True, exist_ok=True)
        binary.write_bytes(wheel.read(name))
        binary.chmod(0o755)


def install(folder: Path, index: str) -> None:
    """Install uv into `folder`/bin. A failure leaves the folder unchanged. Raises NotInstalledError."""
    reasons = []
    for way in (by_pip, lambda place: by_download(place, index)):
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            place = Path(scratch) / "uv"
            try:
                way(place)
            except (NotInstalledError, OSError, ValueError) as error:
                reasons.append(str(error))
                continue
            shutil.rmtree(folder, ignore_errors=True)
            place.rename(folder)
            return
    raise NotInstalledError("; ".join(reasons))


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        install(folder, os.environ.get("PIP_INDEX_URL", INDEX))
    except NotInstalledError as error:
        print(
            f"uv {VERSION} could not be installed into {folder}: {error}\n"
            "Install uv as https://docs.astral.sh/uv/ describes, and run make again.",
            file=sys.stderr,
        )
        if UNTRUSTED in str(error):
            print(NO_AUTHORITIES, file=sys.stderr)
        return 1
    print(f"installed uv {VERSION} into {folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
