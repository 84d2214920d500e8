"""Install Go into a folder, with nothing but a Python: `python3 tools/install_go.py FOLDER`.

The test bed builds its tools with Go. If a `go` on the PATH is new enough, nothing is installed. Otherwise
the toolchain is downloaded as the Go command downloads one: as module golang.org/toolchain, from the first
proxy in GOPROXY. It is compared with a digest in this file. https://go.dev/doc/toolchain describes the
archive.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

VERSION = "1.26.8"
MINIMUM = (1, 26, 6)
"""The newest `go` line of the modules in testbed/tools."""
PROXY = "https://proxy.golang.org"
DIGESTS = {
    "linux-amd64": "30c2b1bf7dcc88d3eb0a1364e47ddd9128edb3110a30e8a0ef61cd5856b31de7",
    "linux-arm64": "02b36b6787b3ac767668f630e2998df45a3b1f9ffee08d1bf3ef6487cd658d99",
}
"""SHA-256 of the archives of VERSION."""
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}

UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
"""Part of the error of OpenSSL for a server whose certificate no known authority has signed."""
NO_AUTHORITIES = (
    "This machine may lack the certificates of public authorities. On Debian, install them with:  "
    "apt-get install ca-certificates   (SSL_CERT_FILE names another file)"
)


class NotInstalledError(Exception):
    """The installation failed. The text says why."""


def present_version() -> tuple[int, ...] | None:
    """Return the version of the `go` on the PATH, such as (1, 26, 8), or None if no `go` answers."""
    try:
        done = subprocess.run(["go", "version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    found = re.search(r"\bgo(\d+(?:\.\d+)*)", done.stdout)
    return None if found is None else tuple(int(n) for n in found[1].split("."))


def target() -> str:
    """Return the name of this platform in the toolchain's archives."""
    return f"{platform.system().lower()}-{MACHINES.get(platform.machine(), platform.machine())}"


def proxy() -> str:
    """Return the first URL in GOPROXY, or PROXY."""
    entries = re.split(r"[,|]", os.environ.get("GOPROXY", ""))
    return next((e.rstrip("/") for e in entries if e.startswith(("http://", "https://"))), PROXY)


def install(folder: Path, digests: dict[str, str]) -> None:
    """Download the toolchain into `folder`. A failure leaves the folder unchanged.

    Args:
        folder: The folder that gets bin/go.
        digests: SHA-256 of the archive of each platform.

    Raises:
        NotInstalledError: There is no archive for this machine, or it has another digest.
        OSError: The proxy cannot be reached.
        zipfile.BadZipFile: The archive is damaged.
    """
    wanted = digests.get(target())
    if wanted is None:
        raise NotInstalledError(f"this script knows no archive for {target()}")
    name = f"v0.0.1-go{VERSION}.{target()}"
    url = f"{proxy()}/golang.org/toolchain/@v/{name}.zip"
    with urllib.request.urlopen(url, timeout=300) as reply:
        data = reply.read()
    if hashlib.sha256(data).hexdigest() != wanted:
        raise NotInstalledError(f"{url} does not have the SHA-256 {wanted}")
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            archive.extractall(scratch)
        place = Path(scratch) / f"golang.org/toolchain@{name}"
        # An archive of a module can contain neither other modules nor modes of files.
        for renamed in place.rglob("_go.mod"):
            renamed.rename(renamed.with_name("go.mod"))
        for programs in (place / "bin", place / "pkg/tool"):
            for program in programs.rglob("*"):
                program.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        place.rename(folder)


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    present = present_version()
    if present is not None and present >= MINIMUM:
        return 0
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"downloading Go {VERSION} (70 MB) into {folder}", file=sys.stderr, flush=True)
    try:
        install(folder, DIGESTS)
    except (NotInstalledError, OSError, zipfile.BadZipFile) as error:
        minimum = ".".join(map(str, MINIMUM))
        print(
            f"Go {VERSION} could not be installed into {folder}: {error}\n"
            f"Install Go >= {minimum} as https://go.dev/dl/ describes, and run make again.",
            file=sys.stderr,
        )
        if UNTRUSTED in str(error):
            print(NO_AUTHORITIES, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
