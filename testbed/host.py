"""The host: prerequisites, Debian packages without changes to apt's state, and kernel settings."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from testbed.config import Bed
from testbed.shell import BedError, run

PACKAGES = {
    "debootstrap": "debootstrap",
    "iptables": "iptables",
    "ip": "iproute2",
    "conntrack": "conntrack",
    "gcc": "gcc libc6-dev",
    "pkg-config": "pkg-config",
    "dpkg-deb": "dpkg",
}
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def check_prerequisites(bed: Bed) -> None:
    """Install missing Debian packages, which needs root.

    Raises BedError, with the command that fixes it, for anything else that is missing.
    """
    if shutil.which("go") is None:
        raise BedError(
            "Go is missing: it builds the test bed's tools",
            "run `make prerequisites-cluster`, which installs it, or install Go from go.dev/dl",
        )
    if not bed.local:
        return
    if os.geteuid() != 0:
        raise BedError(
            "no Docker engine that can pull images responds, and starting the test bed's own "
            "engine requires root",
            "start a Docker engine that can pull images, or run as root: sudo -E python3 -m testbed up",
        )
    missing = [package for tool, package in PACKAGES.items() if shutil.which(tool) is None]
    if not KEYRING.exists():
        missing.append("debian-archive-keyring")
    if not missing:
        return
    command = f"apt-get update && apt-get install -y {' '.join(missing)}"
    if shutil.which("apt-get") is None:
        raise BedError(f"missing: {', '.join(missing)}", "the test bed's own engine needs Debian")
    print(f"installing from Debian: {' '.join(missing)}", flush=True)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        run(["sh", "-c", command], env=env)
    except BedError as error:
        raise BedError(f"cannot install {', '.join(missing)}: {error}", command) from error


def mirror(text: str) -> str | None:
    """Return the first archive URL in the text of an apt source file, in either format, or None."""
    for line in text.splitlines():
        if found := re.match(r"URIs:\s*(\S+)|deb\s+(?:\[[^]]*\]\s*)?(https?://\S+)", line):
            return found.group(1) or found.group(2)
    return None


def debian_mirror() -> str:
    """Return the mirror that this machine's apt uses. Raises BedError if there is none."""
    etc = Path("/etc/apt")
    for file in [*sorted(etc.glob("sources.list.d/*")), etc / "sources.list"]:
        if file.is_file() and (found := mirror(file.read_text(errors="replace"))):
            return found
    raise BedError("no Debian mirror in /etc/apt", "the test bed's own engine needs Debian's apt")


def apt(bed: Bed, suite: str, command: Sequence[str], *, cwd: Path, log: Path) -> None:
    """Run apt-get for another suite, with separate lists and cache, so that the machine's own do not
    change.
    """
    folder = bed.root / "apt" / suite
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    sources = folder / "sources.list"
    sources.write_text(f"deb [signed-by={KEYRING}] {debian_mirror()} {suite} main\n")
    options = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "Dir::State::status": "/var/lib/dpkg/status",
        "APT::Sandbox::User": "root",
    }
    flags = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    run(["apt-get", "-qq", *flags, *command], cwd=cwd, log=log)


def host_suite() -> str:
    found = re.search(r"VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text())
    return found.group(1) if found else "bookworm"


def unpack_debs(
    bed: Bed, packages: Sequence[str], target: Path, *, log: Path, suite: str | None = None
) -> Path:
    """Download packages, unless debs/ has them, and unpack them into an emptied `target`."""
    suite = suite or host_suite()
    folder = bed.debs / suite
    folder.mkdir(parents=True, exist_ok=True)
    if not all(list(folder.glob(f"{name}_*.deb")) for name in packages):
        apt(bed, suite, ["update"], cwd=folder, log=log)
        apt(bed, suite, ["download", *packages], cwd=folder, log=log)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in packages:
        for deb in folder.glob(f"{name}_*.deb"):
            run(["dpkg-deb", "-x", deb, target], log=log)
    return target


def debootstrap(bed: Bed, name: str, suite: str, include: Sequence[str], log: Path) -> Path:
    """Create a small Debian file system in rootfs/NAME, without docs, translations and apt lists."""
    target = bed.rootfs / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    words = ["debootstrap", "--variant=minbase"]
    if include:
        words.append(f"--include={','.join(include)}")
    run([*words, suite, target, debian_mirror()], log=log)
    for pattern in ("var/cache/apt/archives/*.deb", "var/cache/apt/*.bin", "var/log/*.log"):
        for file in target.glob(pattern):
            file.unlink()
    for folder in ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info"):
        shutil.rmtree(target / folder, ignore_errors=True)
    shutil.rmtree(target / "var/lib/apt/lists", ignore_errors=True)
    return target


def raise_inotify_limits() -> None:
    """Raise the inotify limits, because five kubelets and their containers exceed a desktop's defaults."""
    for name, least in (("max_user_instances", 1024), ("max_user_watches", 524288)):
        knob = Path("/proc/sys/fs/inotify") / name
        if int(knob.read_text()) < least:
            knob.write_text(str(least))
