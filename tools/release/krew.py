"""The kubectl plug-in as an archive for each platform, and krew's manifest that names them."""

from __future__ import annotations

import hashlib
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import yaml
from tools.release import archive, trees, wheels
from tools.release.source import Source

PLATFORMS = {
    ("linux", "amd64"): "x86_64-manylinux_2_28",
    ("linux", "arm64"): "aarch64-manylinux_2_28",
    ("darwin", "amd64"): "x86_64-apple-darwin",
    ("darwin", "arm64"): "aarch64-apple-darwin",
}
"""uv's name of each platform, by the labels by which krew selects it."""
PLUGIN = trees.Program("kubectl-holdfast", "holdfast-cli", "holdfast_cli.program")
MANIFEST = "krew-holdfast.yaml"


def build(
    root: Path,
    source: Source,
    out: Path,
    platforms: dict[tuple[str, str], str] = PLATFORMS,
    pythons: tuple[str, ...] = trees.PYTHONS,
) -> None:
    """Write an archive for each platform, then the manifest with their digests."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        own = wheels.built(root, source.epoch, wheels.DISTRIBUTIONS, Path(folder) / "wheels")
        for (system, machine), platform in platforms.items():
            tree = Path(folder) / f"{system}-{machine}"
            trees.build(root, PLUGIN, list(own.values()), tree, platform=platform, pythons=pythons)
            files = archive.folder_files(tree, "")
            files["LICENSE"] = archive.File((root / "LICENSE").read_bytes())
            packed = archive.tar_gz(files, source.epoch)
            name = f"{PLUGIN.name}-{source.version}-{system}-{machine}.tar.gz"
            archive.write(out / name, packed)
            found[system, machine] = (name, hashlib.sha256(packed).hexdigest())
    project = tomllib.loads((root / "pyproject.toml").read_text())
    text = yaml.safe_dump(
        manifest(source.version, found, project["tool"]["holdfast"]["release"]),
        sort_keys=False,
        width=100,
    )
    archive.write(out / MANIFEST, text.encode())


def manifest(
    version: str, archives: dict[tuple[str, str], tuple[str, str]], where: dict[str, str]
) -> dict[str, Any]:
    """Return the manifest for krew: `archives` has name and SHA-256 by operating system and machine."""
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "holdfast"},
        "spec": {
            "version": f"v{version}",
            "homepage": where["homepage"],
            "shortDescription": "Show, verify, restore and delete checkpoints",
            "description": (
                "Shows, saves, verifies, restores and deletes the checkpoints of Holdfast's "
                "TrainingJobs, and those in folders and stores. It needs Python 3.11 or newer as "
                "python3 on the PATH.\n"
            ),
            "platforms": [
                {
                    "selector": {"matchLabels": {"os": system, "arch": machine}},
                    "uri": f"{where['downloads']}/v{version}/{name}",
                    "sha256": sha256,
                    "bin": f"bin/{PLUGIN.name}",
                }
                for (system, machine), (name, sha256) in archives.items()
            ],
        },
    }
