"""Binaries of the test bed, built from the pinned Go modules in testbed/tools/<set>/.

Each set has its own go.mod and go.sum, so that versions are pinned and verified, and one tool's
dependencies do not affect another's. Builds are read-only: a wrong go.sum fails and is not corrected.
All programs of a set are one `go build`, which compiles shared packages once and links side by side.
Helm is not built where its authors' program can be had from the package index, and Azurite is installed from
npm (testbed/published.py).
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from testbed import host, published
from testbed.config import KUBERNETES, PACKAGE, Bed
from testbed.shell import run
from testbed.steps import Step

_VERSION = "k8s.io/component-base/version"
_CONTAINERD = "github.com/containerd/containerd/v2/cmd"
_CNI = "github.com/containernetworking/plugins/plugins"
PAUSE_VERSION = "3.10.2"


@dataclass(frozen=True, slots=True)
class ToolSet:
    """A folder below tools/, with its binaries by name and the package from which each is built."""

    name: str
    packages: dict[str, str]
    ldflags: str = ""
    tags: str = ""
    registry: bool = False
    """Whether registry mode, which uses the machine's own Docker engine, needs the set too."""
    wheel: published.Wheel | None = None
    """A package of Python's index that has the set's only program ready-made."""

    @property
    def folder(self) -> Path:
        return PACKAGE / "tools" / self.name


TOOL_SETS = (
    ToolSet(
        "kubernetes",
        {
            name: f"k8s.io/kubernetes/cmd/{name}"
            for name in (
                "kube-apiserver",
                "kube-controller-manager",
                "kube-scheduler",
                "kubelet",
                "kube-proxy",
                "kubectl",
                "kubeadm",
            )
        },
        ldflags=f"-X {_VERSION}.gitVersion={KUBERNETES} -X {_VERSION}.gitMajor=1"
        f" -X {_VERSION}.gitMinor={KUBERNETES.split('.')[1]}",
        registry=True,
    ),
    ToolSet("etcd", {"etcd": "go.etcd.io/etcd/server/v3"}, registry=True),
    ToolSet("helm", {"helm": "helm.sh/helm/v4/cmd/helm"}, registry=True, wheel=published.HELM),
    ToolSet("minio", {"minio": "github.com/minio/minio"}, registry=True),
    ToolSet(
        "versitygw", {"versitygw": "github.com/versity/versitygw/cmd/versitygw"}, registry=True
    ),
    ToolSet("kind", {"kind": "sigs.k8s.io/kind"}, registry=True),
    ToolSet(
        "containerd",
        {n: f"{_CONTAINERD}/{n}" for n in ("containerd", "containerd-shim-runc-v2", "ctr")},
        tags="no_aufs no_zfs no_btrfs no_devmapper",
    ),
    ToolSet(
        "runc",
        {"runc": "github.com/opencontainers/runc"},
        tags="seccomp netgo osusergo",
        ldflags="-extldflags -static -X main.version=1.5.2",
    ),
    ToolSet(
        "cni",
        {
            "loopback": f"{_CNI}/main/loopback",
            "ptp": f"{_CNI}/main/ptp",
            "host-local": f"{_CNI}/ipam/host-local",
            "portmap": f"{_CNI}/meta/portmap",
        },
    ),
    ToolSet("coredns", {"coredns": "holdfast.dev/testbed/tools/coredns"}),
)

JOBSET_VERSION = "v0.8.2"
JOBSET = ToolSet("jobset", {"jobset": "sigs.k8s.io/jobset"})
"""The controller of JobSet, which only the tests of adopted pods need. Its build takes 5 to 11 minutes on two
cores, so no other target builds it."""

TRAINER_VERSION = "v2.0.0"
TRAINER = ToolSet(
    "trainer", {"trainer": "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager"}
)
"""The controller of Kubeflow Trainer, which makes a JobSet of a TrainJob. Only the tests of adopted pods need
it."""


def go_environment(*, cgo: bool) -> dict[str, str]:
    """Return the environment for Go: the caller's settings (proxy, caches) without flags that affect
    builds.
    """
    return {**os.environ, "GOFLAGS": "-mod=readonly", "CGO_ENABLED": "1" if cgo else "0"}


def module_folder(tool_set: str, module: str) -> Path:
    """Download a pinned module and return the folder of its source."""
    folder, env = PACKAGE / "tools" / tool_set, go_environment(cgo=False)
    run(["go", "mod", "download", module], cwd=folder, env=env)
    return Path(run(["go", "list", "-m", "-f", "{{.Dir}}", module], cwd=folder, env=env).strip())


def build(bed: Bed, tools: ToolSet, log: Path) -> str | None:
    """Put the programs of the set into the test bed's bin/. Returns a note, or None.

    A program appears under its name only when it is complete.
    """
    if tools.wheel is not None and tools.wheel.fits_this_machine():
        (binary,) = tools.packages
        published.extract(tools.wheel, bed.bin / binary, bed.work / "wheels", log)
        return f"from {tools.wheel.name} {tools.wheel.version}"
    env = go_environment(cgo=tools.name == "runc")
    if tools.name == "runc":
        env["PKG_CONFIG_PATH"] = str(_libseccomp(bed, log))
    built = bed.work / "built" / tools.name
    shutil.rmtree(built, ignore_errors=True)
    built.mkdir(parents=True)
    flags = ["-trimpath", "-buildvcs=false", "-tags", tools.tags]
    flags += ["-ldflags", f"-s -w {tools.ldflags}".strip()]
    # With a folder as its output, go names each program after the last part of its package.
    command = ["go", "build", *flags, "-o", f"{built}/", *tools.packages.values()]
    run(command, cwd=tools.folder, env=env, log=log)
    for binary, package in tools.packages.items():
        (built / _name_of(package)).rename(bed.bin / binary)
    shutil.rmtree(built)
    return None


def _name_of(package: str) -> str:
    """Return the name that go gives to the program of a package: the last part that is no version."""
    *_, before, last = package.split("/")
    return before if re.fullmatch(r"v[0-9]+", last) else last


def _libseccomp(bed: Bed, log: Path) -> Path:
    """Unpack Debian's static libseccomp and return its pkg-config folder.

    runc must be linked with it, because sandboxes without seccomp are refused.
    """
    prefix = host.unpack_debs(bed, ["libseccomp-dev"], bed.work / "seccomp", log=log) / "usr"
    found = next(prefix.rglob("libseccomp.pc"))
    library = found.parent.parent
    settings = {"prefix": prefix, "libdir": library, "includedir": prefix / "include"}
    lines = [
        f"{key}={settings[key]}" if (key := line.split("=")[0]) in settings else line
        for line in found.read_text().splitlines()
    ]
    found.write_text("\n".join(lines) + "\n")
    return found.parent


def build_pause(bed: Bed, log: Path) -> None:
    source = module_folder("kubernetes", "k8s.io/kubernetes") / "build/pause/linux/pause.c"
    flags = ["-Os", "-Wall", "-static", f"-DVERSION={PAUSE_VERSION}"]
    run(["gcc", *flags, "-o", bed.bin / "pause", source], log=log)


def build_step(bed: Bed, tools: ToolSet) -> Step:
    """Return the step that builds a tool set. It is done until go.mod, go.sum or the flags change."""
    return Step(
        f"build {tools.name}",
        lambda log: build(bed, tools, log),
        inputs=(tools.folder, repr(tools)),
        outputs=[bed.bin / name for name in tools.packages],
        advice="requires a module proxy for Go (runc also gcc), and free disk space",
    )


def needed(bed: Bed) -> list[ToolSet]:
    """Return the tool sets that the mode needs, the longest build first."""
    return [tools for tools in TOOL_SETS if bed.local or tools.registry]


def tool_steps(bed: Bed) -> list[Step]:
    steps = [build_step(bed, tools) for tools in needed(bed)]
    steps.append(
        Step(
            "install azurite",
            lambda log: published.install_azurite(bed, log),
            inputs=(published.AZURITE, published.NODE),
            outputs=[bed.bin / "azurite"],
            advice="requires npm's registry and Python's package index",
        )
    )
    if bed.local:
        pinned = (PACKAGE / "tools/kubernetes", PAUSE_VERSION)
        steps.append(
            Step("build pause", lambda log: build_pause(bed, log), pinned, [bed.bin / "pause"])
        )
    return steps
