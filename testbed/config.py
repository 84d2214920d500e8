"""Paths and pinned versions of the test bed. No other module contains a path or a version."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

CLUSTER = "holdfast"
POOL_LABEL = "testbed.holdfast.dev/pool"
"""Label of worker nodes. A namespace with this label has all its pods on the nodes of that pool
(manifests/pools.yaml)."""
FAULTS = "faults"
"""Pool of nodes that a scenario may kill, pause or cut off."""
SHARED = "shared"
"""Pool of nodes for scenarios that break no node and run beside one that does."""
CONTROL_PLANE = f"{CLUSTER}-control-plane"
POOLS = {
    FAULTS: (f"{CLUSTER}-worker", *(f"{CLUSTER}-worker{n}" for n in range(2, 5))),
    SHARED: (f"{CLUSTER}-worker5", f"{CLUSTER}-worker6"),
}
"""Worker nodes of each pool. A job of four workers on FAULTS still has three nodes after it loses one."""
NODES = (CONTROL_PLANE, *(node for nodes in POOLS.values() for node in nodes))

KUBERNETES = "v1.36.3"
KINDEST_NODE = (
    "kindest/node:v1.37.0@sha256:a1ed56cfb0e7b93589bdf97c8cd566405a265939e3620fc4f5de89adff580ae5"
)
"""Node image in registry mode: the default of the pinned kind. It is pinned by digest, because kind's
authors push the same tag again for later releases of kind. HOLDFAST_TESTBED_NODE_IMAGE replaces it."""
REGISTRY_BASE = "python:3.13.9-slim-trixie"
"""Base of the operator's and the sidecar's images in registry mode. HOLDFAST_TESTBED_BASE_IMAGE replaces
it, for example with the same image by digest."""
REGISTRY_TORCH_BASE = "debian:trixie-slim"
"""Base of the trainer's image in registry mode. Both modes use Debian's torch, because Debian stable keeps
one version and tests compare the bits of runs."""
PYTHON = "3.13"
BASE_IMAGE = "holdfast/base:trixie"
TORCH_BASE_IMAGE = "holdfast/torch-base:trixie"
MINIO_IMAGE = "holdfast/minio:dev"
OFFLINE_SUITE = "trixie"
NODE_SUITE = "bookworm"
"""Debian suite of the node image. systemd 252 in bookworm is the last that runs on a host with cgroup
v1."""
DOCKER_SUITE = "sid"
"""Debian suite of Docker. Docker 28 or later requires only the capabilities that a machine has; older
suites have older versions."""

HANG_SECONDS = 600
"""Limit of each wait for the test bed and for a job on it. Only a hang reaches it: four scenarios share two
cores, where one gang has taken 80 seconds to start, and another 258 to recover. A scenario has 1,800 seconds,
so that a wait that hangs still tells what it waited for."""

PACKAGE = Path(__file__).resolve().parent
REPOSITORY = PACKAGE.parent


@dataclass(frozen=True, slots=True)
class Bed:
    """One test bed: its folder, and whether it runs its own Docker engine (`local`) or uses the machine's."""

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
        """Folder with the unpacked Docker packages of Debian."""
        return self.root / "engine"

    @property
    def debs(self) -> Path:
        return self.root / "debs"

    @property
    def data(self) -> Path:
        """Data of the test bed's Docker engine."""
        return self.root / "data"

    @property
    def rootfs(self) -> Path:
        return self.root / "rootfs"

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def nodes(self) -> Path:
        """Folder with each node's /var/lib/containerd, which has hard links to `template`."""
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
        """Return the environment variables of the test bed, for a shell or a child process."""
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
    """Return the test bed in its current mode.

    The mode is detected once and kept in a file; HOLDFAST_TESTBED_MODE overrides it.
    """
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
    """Return a hash of texts and files. A folder counts with all names and contents below it."""
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
