"""Where the test bed lives and what it is pinned to. No other module spells a path or a version."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

CLUSTER = "holdfast"
WORKERS = 4
"""A four-worker job that loses a node needs the control plane plus three others, or a spare."""
CONTROL_PLANE = f"{CLUSTER}-control-plane"
NODES = (
    CONTROL_PLANE,
    f"{CLUSTER}-worker",
    *(f"{CLUSTER}-worker{n}" for n in range(2, 1 + WORKERS)),
)

KUBERNETES = "v1.36.3"
KINDEST_NODE = (
    "kindest/node:v1.37.0@sha256:a1ed56cfb0e7b93589bdf97c8cd566405a265939e3620fc4f5de89adff580ae5"
)
"""Node image where a registry is reached: the default of the pinned kind, whose authors push a tag
again for a later kind. HOLDFAST_TESTBED_NODE_IMAGE takes another."""
REGISTRY_BASE = "python:3.13.9-slim-trixie"
"""Base of the operator's and the sidecar's images where a registry is reached. HOLDFAST_TESTBED_BASE_IMAGE
takes another, such as this one by digest."""
REGISTRY_TORCH_BASE = "debian:trixie-slim"
"""torch is Debian's in both modes: stable keeps one version, and the bits of a run are compared."""
PYTHON = "3.13"
BASE_IMAGE = "holdfast/base:trixie"
TORCH_BASE_IMAGE = "holdfast/torch-base:trixie"
MINIO_IMAGE = "holdfast/minio:dev"
OFFLINE_SUITE = "trixie"
NODE_SUITE = "bookworm"
"""systemd 252 of bookworm is the last that still runs on a host with cgroup v1."""
DOCKER_SUITE = "sid"
"""Docker >= 28 asks only for the capabilities that a machine has; older suites have older ones."""

PACKAGE = Path(__file__).resolve().parent
REPOSITORY = PACKAGE.parent


@dataclass(frozen=True, slots=True)
class Bed:
    """One test bed: a folder, and whether its engine is ours (`local`) or the machine's."""

    root: Path
    local: bool

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def stamps(self) -> Path:
        return self.root / "stamps"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def engine(self) -> Path:
        """Debian's Docker packages, unpacked."""
        return self.root / "engine"

    @property
    def debs(self) -> Path:
        return self.root / "debs"

    @property
    def data(self) -> Path:
        """Data of our Docker engine."""
        return self.root / "data"

    @property
    def rootfs(self) -> Path:
        return self.root / "rootfs"

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def nodes(self) -> Path:
        """Each node's /var/lib/containerd: hard links to `template`."""
        return self.root / "nodes"

    @property
    def template(self) -> Path:
        return self.root / "template"

    @property
    def kubeconfig(self) -> Path:
        return self.root / "kubeconfig"

    @property
    def docker_socket(self) -> Path:
        return self.run / "docker.sock"

    def exports(self) -> dict[str, str]:
        """Variables for a shell or a child process, on top of the caller's own."""
        path = [str(self.bin)]
        found = {"KUBECONFIG": str(self.kubeconfig)}
        if self.local:
            path = [str(self.engine / "usr/bin"), str(self.engine / "usr/sbin"), *path]
            found["DOCKER_HOST"] = f"unix://{self.docker_socket}"
            found["DOCKER_CONFIG"] = str(self.root / "docker-config")
        found["PATH"] = ":".join([*path, os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")])
        return found

    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.exports()}

    def prepare(self) -> None:
        for folder in (self.bin, self.logs, self.stamps, self.run, self.debs, self.work):
            folder.mkdir(parents=True, exist_ok=True)


def bed_root() -> Path:
    default = Path.home() / ".cache/holdfast/testbed"
    return Path(os.environ.get("HOLDFAST_TESTBED_DIR", default)).resolve()


def current_bed() -> Bed:
    """The test bed as `up` left it: the mode is decided once and kept in a file."""
    root = bed_root()
    mode = os.environ.get("HOLDFAST_TESTBED_MODE", "")
    if not mode and (root / "mode").is_file():
        mode = (root / "mode").read_text().strip()
    return Bed(root, local=mode != "registry")


def kindest_node() -> str:
    return os.environ.get("HOLDFAST_TESTBED_NODE_IMAGE", KINDEST_NODE)


def python_base() -> str:
    return os.environ.get("HOLDFAST_TESTBED_BASE_IMAGE", REGISTRY_BASE)


def digest(*parts: str | bytes | Path) -> str:
    """Hash of texts and of files' contents; a folder counts with all names and contents below it."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            files = [part] if part.is_file() else sorted(p for p in part.rglob("*") if p.is_file())
            for file in files:
                if "__pycache__" in file.parts:
                    continue
                name = file.name if file == part else str(file.relative_to(part))
                total.update(f"{len(name)}:{name}:{file.stat().st_size}:".encode())
                total.update(file.read_bytes())
        else:
            data = part.encode() if isinstance(part, str) else part
            total.update(f"{len(data)}:".encode() + data)
    return total.hexdigest()[:20]
