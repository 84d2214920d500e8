"""The kind node image and the images that a node runs, built from the test bed's own binaries in local
mode.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from testbed import config, host, template, tools
from testbed.config import KUBERNETES, NODE_SUITE, PACKAGE, Bed, digest
from testbed.shell import Command, pipe, run
from testbed.steps import Step

ROOTFS_IMAGE = "holdfast/node-rootfs:dev"
NODE_PACKAGES = [
    *("systemd", "conntrack", "iptables", "nftables", "iproute2", "ethtool", "util-linux"),
    *("mount", "kmod", "libseccomp2", "pigz", "e2fsprogs", "bash", "ca-certificates", "curl"),
    *("jq", "procps", "socat", "iputils-ping"),
]
BASE_PACKAGES = ["python3", "ca-certificates"]
TORCH_PACKAGES = [*BASE_PACKAGES, "python3-torch", "python3-numpy"]
STRIPPED = (
    "usr/include/*",
    "usr/lib/gcc",
    "usr/lib/**/*.a",
    "usr/lib/python3.13/test",
    "usr/lib/libtorch-test",
    "usr/lib/python3/dist-packages/torch/bin/*",
)
_PATH = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ROUTES_UNIT = (
    "[Unit]\nDescription=Pod routes to the other nodes, set again after every start of "
    "the node\nBefore=kubelet.service\nConditionPathExists=/etc/holdfast/routes\n"
    "[Service]\nType=oneshot\nExecStart=/bin/sh /etc/holdfast/routes\n[Install]\n"
    "WantedBy=multi-user.target\n"
)
_STORAGE = """\
# Tests that need volumes create them (testbed/driver/local_volumes.py). Nothing provisions volumes here.
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata:
  name: standard
provisioner: kubernetes.io/no-provisioner
volumeBindingMode: WaitForFirstConsumer
"""
"""What kind applies to a new cluster in place of its own provisioner of volumes."""
NODE_BINARIES = {
    "usr/local/bin": ("containerd", "containerd-shim-runc-v2", "ctr"),
    "usr/local/sbin": ("runc",),
    "usr/bin": ("kubeadm", "kubelet", "kubectl"),
    "opt/cni/bin": ("host-local", "loopback", "ptp", "portmap"),
}


def node_tag() -> str:
    """Return the node image's tag, which changes with the Kubernetes version and the image's inputs."""
    return f"holdfast/node:{KUBERNETES}-{_inputs()[:8]}"


def _inputs() -> str:
    sets = [s for s in tools.TOOL_SETS if s.name not in ("helm", "minio")]
    folders = [s.folder for s in sets]
    return digest(PACKAGE / "nodeimage.py", *folders, *map(repr, sets))


def import_rootfs(bed: Bed, folder: Path, tag: str, log: Path, *changes: str) -> None:
    """Import a file system as an image with one layer."""
    skip = [f"--exclude=./{name}/*" for name in ("dev", "proc", "sys")]
    tar: Command = ["tar", "-C", folder, "--numeric-owner", *skip, "-c", "."]
    words = [word for change in (_PATH, *changes) for word in ("-c", change)]
    with log.open("a") as file:
        file.write(f"import {folder} as {tag}\n")
    pipe(tar, ["docker", "import", *words, "-", tag], env=bed.environment())


def build_image(
    bed: Bed, tag: str, base: str, binaries: dict[str, str], log: Path, *lines: str
) -> None:
    """Build an image from `base` and the test bed's binaries, each at the path to which it maps."""
    context = bed.work / "context" / tag.replace("/", "_").replace(":", "_")
    shutil.rmtree(context, ignore_errors=True)
    context.mkdir(parents=True)
    text = [f"FROM {base}"]
    for name, path in binaries.items():
        (context / name).hardlink_to(bed.bin / name)
        text.append(f"COPY --chmod=0755 {name} {path}")
    (context / "Dockerfile").write_text("\n".join([*text, _PATH, *lines]) + "\n")
    run(["docker", "build", "-q", "-t", tag, context], env=bed.environment(), log=log)
    shutil.rmtree(context)


def kind_source() -> Path:
    return tools.module_folder("kind", "sigs.k8s.io/kind")


def component_images(bed: Bed, log: Path) -> list[str]:
    """Build the images that kubeadm and kind expect on a node, and return their names."""
    command: Command = [
        bed.bin / "kubeadm",
        "config",
        "images",
        "list",
        "--kubernetes-version",
        KUBERNETES,
    ]
    listed = run(command, log=log).split()

    def name_of(part: str) -> str:
        return next(name for name in listed if f"/{part}:" in name)

    built: list[str] = []
    for part in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "etcd"):
        build_image(bed, name_of(part), "scratch", {part: f"/usr/local/bin/{part}"}, log)
        built.append(name_of(part))
    proxy = {"kube-proxy": "/usr/local/bin/kube-proxy"}
    build_image(bed, name_of("kube-proxy"), ROOTFS_IMAGE, proxy, log)
    for part, path in (("coredns", "/coredns"), ("pause", "/pause")):
        build_image(bed, name_of(part), "scratch", {part: path}, log, f'ENTRYPOINT ["{path}"]')
        built.append(name_of(part))
    return [*built, name_of("kube-proxy")]


def minio_image(bed: Bed, base: str, log: Path, *more: str) -> None:
    binaries = {"minio": "/usr/local/bin/minio"}
    lines = ["USER 65532:65532", 'ENTRYPOINT ["minio"]', *more]
    build_image(bed, config.MINIO_IMAGE, base, binaries, log, *lines)


def fill_template(bed: Bed, log: Path) -> str:
    """Fill the template with the images with which every node starts: Kubernetes, MinIO and the bases."""
    images = component_images(bed, log)
    minio_image(bed, config.BASE_IMAGE, log)
    images += [config.MINIO_IMAGE, config.BASE_IMAGE, config.TORCH_BASE_IMAGE]
    shutil.rmtree(bed.template, ignore_errors=True)
    template.add(bed, images, log)
    return f"{len(images)} images"


def build_node_image(bed: Bed, log: Path) -> None:
    import_node(bed, node_files(bed, log), node_tag(), log)


def node_files(bed: Bed, log: Path) -> Path:
    """Assemble the node's files: Debian, the node files of kind's Go module, our binaries and the routes
    unit.
    """
    rootfs, source = bed.work / "node", kind_source()
    shutil.rmtree(rootfs, ignore_errors=True)
    run(["cp", "-a", bed.rootfs / "node", rootfs], log=log)
    files = source / "images/base/files"
    for file in files.rglob("*"):
        relative = file.relative_to(files)
        if file.is_file() and relative.parts[0] != "LICENSES":
            _install(file, rootfs / relative, executable="bin" in relative.parts)
    _systemd(rootfs, log)
    for folder, names in NODE_BINARIES.items():
        for name in names:
            _install(bed.bin / name, rootfs / folder / name, executable=True)
    _containerd(bed, rootfs)
    (rootfs / "etc/kubernetes/manifests").mkdir(parents=True, exist_ok=True)
    (rootfs / "kind/version").write_text(KUBERNETES)
    manifests = rootfs / "kind/manifests"
    manifests.mkdir(parents=True, exist_ok=True)
    (manifests / "default-storage.yaml").write_text(_STORAGE)
    return rootfs


def import_node(bed: Bed, rootfs: Path, tag: str, log: Path) -> None:
    """Import the node image from its files, and delete them."""
    # fmt: off
    import_rootfs(bed, rootfs, tag, log, "ENV container=docker", "STOPSIGNAL SIGRTMIN+3",
                  'ENTRYPOINT ["/usr/local/bin/entrypoint","/sbin/init"]')
    # fmt: on
    shutil.rmtree(rootfs)


def _install(source: Path, target: Path, *, executable: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o755 if executable else 0o644)


def _systemd(rootfs: Path, log: Path) -> None:
    """Apply the systemd changes of kind's images/base/Dockerfile, and enable the routes unit."""
    units = rootfs / "lib/systemd/system"
    doomed = [
        *units.glob("sysinit.target.wants/systemd-tmpfiles-setup.service"),
        *(
            f
            for t in ("multi-user", "local-fs", "basic")
            for f in units.glob(f"{t}.target.wants/*")
        ),
        *(rootfs / "etc/systemd/system").glob("*.wants/*"),
        *(f for name in ("udev", "initctl") for f in units.glob(f"sockets.target.wants/*{name}*")),
    ]
    for file in doomed:
        file.unlink()
    with (rootfs / "etc/systemd/journald.conf").open("a") as conf:
        conf.write("ReadKMsg=no\n")
    init = rootfs / "sbin/init"
    init.unlink(missing_ok=True)
    init.symlink_to("/lib/systemd/systemd")
    unit = "holdfast-routes.service"
    (rootfs / "etc/systemd/system" / unit).write_text(_ROUTES_UNIT)
    services = ["kubelet.service", "containerd.service", "undo-mount-hacks.service", unit]
    run(["chroot", rootfs, "systemctl", "enable", *services], log=log)
    run(["chroot", rootfs, "systemctl", "mask", "systemd-binfmt.service"], log=log)


def _containerd(bed: Bed, rootfs: Path) -> None:
    spec = run([bed.bin / "ctr", "oci", "spec"])
    program = (
        ".hooks.createContainer[.hooks.createContainer|length] |= "
        '. + {"path": "/kind/bin/mount-product-files.sh"} | del(.process.rlimits)'
    )
    base = run(["chroot", rootfs, "jq", program], stdin=spec.encode())
    (rootfs / "etc/containerd/cri-base.json").write_text(base)
    file = rootfs / "etc/containerd/config.toml"
    text = file.read_text()
    # The host may not permit a lower oom_score_adj; with `true` containerd does not try.
    text = text.replace("restrict_oom_score_adj = false", "restrict_oom_score_adj = true")
    pause = f"registry.k8s.io/pause:{tools.PAUSE_VERSION}"
    file.write_text(re.sub(r'sandbox_image = ".*"', f'sandbox_image = "{pause}"', text))


def image_exists(bed: Bed, tag: str) -> bool:
    return bool(run(["docker", "images", "-q", tag], env=bed.environment()).strip())


def rootfs_step(bed: Bed, name: str, suite: str, packages: Sequence[str], tag: str) -> Step:
    def action(log: Path) -> None:
        folder = host.debootstrap(bed, name, suite, packages, log)
        strip(folder)
        import_rootfs(bed, folder, tag, log)
        if name != "node":
            shutil.rmtree(folder)

    return Step(
        f"{name} image",
        action,
        inputs=(name, suite, *packages, tag, *STRIPPED),
        outputs=[bed.rootfs / name] if name == "node" else [],
        present=lambda: image_exists(bed, tag),
        advice="debootstrap needs Debian's mirror",
    )


def strip(rootfs: Path) -> None:
    """Delete files that only compiling or testing needs: 150 MB of torch."""
    for pattern in STRIPPED:
        for path in rootfs.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != "torch_shm_manager":
                path.unlink()


def image_steps(bed: Bed) -> list[Step]:
    sets = [s for s in tools.TOOL_SETS if s.name not in ("helm",)]
    binaries = digest(*(s.folder for s in sets), *map(repr, sets))
    code = digest(PACKAGE / "nodeimage.py")
    bases = (*BASE_PACKAGES, *TORCH_PACKAGES)
    return [
        rootfs_step(bed, "node", NODE_SUITE, NODE_PACKAGES, ROOTFS_IMAGE),
        rootfs_step(bed, "base", config.OFFLINE_SUITE, BASE_PACKAGES, config.BASE_IMAGE),
        rootfs_step(bed, "torch", config.OFFLINE_SUITE, TORCH_PACKAGES, config.TORCH_BASE_IMAGE),
        Step(
            "node's images",
            lambda log: fill_template(bed, log),
            (binaries, code, *bases, *STRIPPED),
            [bed.template / "io.containerd.metadata.v1.bolt/meta.db"],
        ),
        Step(
            "kind node image",
            lambda log: build_node_image(bed, log),
            (_inputs(), code),
            present=lambda: image_exists(bed, node_tag()),
        ),
    ]
