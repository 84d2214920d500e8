"""Our images: dependencies from uv.lock and our own packages, resolved on the host, copied in.

A build reaches no network and runs nothing but `python3 -m venv` and `compileall`. Dependencies and
our own code are layers of their own, so a code change rebuilds and loads a few hundred kilobytes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from testbed import config, nodeimage, tools
from testbed.config import PYTHON, REPOSITORY, Bed, digest
from testbed.shell import BedError, Command, each, run

LABEL = "dev.holdfast.inputs"
PLATFORM = "x86_64-manylinux_2_28"


@dataclass(frozen=True, slots=True)
class Image:
    """An image of ours. `members` are folders of the uv workspace, the published one last."""

    tag: str
    dockerfile: str
    package: str
    members: tuple[str, ...]
    torch: bool = False
    files: str = ""
    """Folder copied beside the packages, as `files/` in the build context."""
    from_base: tuple[str, ...] = ()
    """Dependencies that the base image brings."""


IMAGES = (
    Image("holdfast/operator:dev", "operator", "holdfast-operator", ("core", "operator")),
    Image("holdfast/sidecar:dev", "sidecar", "holdfast-sidecar", ("core", "sidecar")),
    Image(
        "holdfast/trainer-gpt:dev",
        "examples/gpt",
        "holdfast",
        ("core", "trainer_sdk"),
        torch=True,
        files="examples/gpt",
        from_base=("numpy",),
    ),
)


def base_of(bed: Bed, image: Image) -> str:
    if bed.local or image.torch:
        return config.TORCH_BASE_IMAGE if image.torch else config.BASE_IMAGE
    return config.python_base()


def build_all(bed: Bed, log: Path) -> str:
    """Build the images whose inputs changed; say which."""
    if not bed.local:
        registry_bases(bed, log)
    with tempfile.TemporaryDirectory(dir=bed.work) as folder:
        wheels = own_wheels(Path(folder))
        built = each(lambda image: build(bed, image, wheels, log), IMAGES)
    if any(built):  # those that had the names: a disk fills up with old builds otherwise
        prune = ["docker", "image", "prune", "-f", "--filter", f"label={LABEL}"]
        run(prune, env=bed.environment(), log=log)
    names = [image.tag.split("/")[1] for image, done in zip(IMAGES, built, strict=True) if done]
    return f"built {', '.join(names)}" if names else "nothing changed"


def own_wheels(folder: Path) -> dict[str, Path]:
    """A wheel of each workspace member, by its folder. The same source gives the same bytes."""
    members = sorted({member for image in IMAGES for member in image.members})

    def build_wheel(member: str) -> Path:
        out = folder / member
        uv("build", "--wheel", "-o", out, REPOSITORY / member)
        return next(out.glob("*.whl"))

    return dict(zip(members, each(build_wheel, members), strict=True))


def uv(*text: str | Path) -> str:
    program = os.environ.get("UV") or shutil.which("uv")
    if not program:
        raise BedError("uv is not on this machine", "python3 -m pip install uv")
    return run([program, *text, "--quiet"], cwd=REPOSITORY)


def requirements(image: Image) -> str:
    """What uv.lock pins for the package, with hashes, without our own and the base's packages."""
    skip = [word for name in image.from_base for word in ("--no-emit-package", name)]
    form = ["export", "--frozen", "--no-dev", "--no-emit-workspace", "--no-header", "--no-annotate"]
    return uv(*form, "--package", image.package, *skip)


def build(bed: Bed, image: Image, wheels: dict[str, Path], log: Path) -> bool:
    """Build one image unless one with the same inputs is there."""
    base, dockerfile = base_of(bed, image), REPOSITORY / image.dockerfile / "Dockerfile"
    pins = requirements(image)
    own = [wheels[member] for member in image.members]
    files = [REPOSITORY / image.files] if image.files else []
    env = bed.environment()
    inputs = digest(image_id(bed, base), dockerfile, pins, PYTHON, *own, *files, Path(__file__))
    if image_label(bed, image.tag) == inputs:
        return False
    context = bed.work / "images" / image.package
    context.mkdir(parents=True, exist_ok=True)
    (context / "requirements.txt").write_text(pins)
    install_dependencies(context, digest(pins, PYTHON, PLATFORM, Path(__file__)))
    install(context / "app", [*own], "--no-deps")
    if image.files:
        shutil.rmtree(context / "files", ignore_errors=True)
        ignored = shutil.ignore_patterns("Dockerfile", "__pycache__", "*.pyc")
        shutil.copytree(REPOSITORY / image.files, context / "files", ignore=ignored)
    command: Command = ["docker", "build", "-q", "--network=none", "-f", dockerfile]
    command += ["-t", image.tag, "--build-arg", f"BASE={base}", "--label", f"{LABEL}={inputs}"]
    run([*command, context], env=env, log=log)
    return True


def install_dependencies(context: Path, key: str) -> None:
    stamp = context / "deps.stamp"
    if stamp.is_file() and stamp.read_text() == key:
        return
    stamp.unlink(missing_ok=True)
    flags = ("--no-deps", "--require-hashes", "-r", context / "requirements.txt")
    install(context / "deps", [], *flags)
    stamp.write_text(key)


def install(target: Path, wheels: list[Path], *flags: str | Path) -> None:
    """A tree to copy over a venv: lib/pythonX.Y/site-packages, and bin with the venv's Python."""
    shutil.rmtree(target, ignore_errors=True)
    packages = target / f"lib/python{PYTHON}/site-packages"
    packages.mkdir(parents=True)
    # fmt: off
    uv("pip", "install", "--python", sys.executable, "--python-version", PYTHON,
       "--python-platform", PLATFORM, "--only-binary", ":all:", "--link-mode", "copy",
       "--target", packages, *flags, *wheels)
    # fmt: on
    (packages / ".lock").unlink(missing_ok=True)
    scripts = packages / "bin"
    if not scripts.is_dir():
        return
    scripts.rename(target / "bin")
    for script in (target / "bin").iterdir():
        script.write_text(relocate(script.read_text()))
        script.chmod(0o755)


def relocate(script: str) -> str:
    """The script with the image's Python instead of the host's, which installed it."""
    first, rest = script.split("\n", 1)
    return f"#!/opt/holdfast/bin/python3\n{rest}" if first.startswith("#!") else script


def image_id(bed: Bed, tag: str) -> str:
    form = ["docker", "image", "inspect", "-f", "{{.Id}}", tag]
    return run(form, env=bed.environment(), check=False)


def image_label(bed: Bed, tag: str) -> str | None:
    form = "{{json .Config.Labels}}"
    out = run(["docker", "image", "inspect", "-f", form, tag], env=bed.environment(), check=False)
    labels = json.loads(out) if out.strip() else None
    value = (labels or {}).get(LABEL)
    return str(value) if value is not None else None


def registry_bases(bed: Bed, log: Path) -> None:
    """Where a registry is reached, a base with torch, and MinIO's image from our binaries.

    What is there is not pulled again: registries count pulls. And what has the same inputs is not
    built again: a build that does nothing gives an image another id, which would be loaded again.
    """
    env = bed.environment()
    for base in (config.python_base(), config.REGISTRY_TORCH_BASE):
        if not nodeimage.image_exists(bed, base):
            run(["docker", "pull", "-q", base], env=env, log=log)
    text = torch_dockerfile()
    inputs = digest(text, image_id(bed, config.REGISTRY_TORCH_BASE))
    if image_label(bed, config.TORCH_BASE_IMAGE) != inputs:
        # The host's network: behind a proxy, a VPN or a local resolver bridges reach no mirror.
        command = ["docker", "build", "-q", "--network=host", "-t", config.TORCH_BASE_IMAGE]
        command += ["--label", f"{LABEL}={inputs}", "-"]
        run(command, env=env, log=log, stdin=text.encode())
    sets = [tool_set for tool_set in tools.TOOL_SETS if tool_set.name in ("minio", "mc")]
    pinned = [tool_set.folder for tool_set in sets]
    inputs = digest(image_id(bed, config.python_base()), *pinned, *map(repr, sets))
    if image_label(bed, config.MINIO_IMAGE) != inputs:
        nodeimage.minio_image(bed, config.python_base(), log, f"LABEL {LABEL}={inputs}")


def torch_dockerfile() -> str:
    """Debian with the packages of local mode's torch base, stripped of the same files."""
    packages = " ".join(nodeimage.TORCH_PACKAGES)
    install = f"apt-get install -y --no-install-recommends {packages}"
    keep = "usr/lib/python3/dist-packages/torch/bin/torch_shm_manager"
    doomed = " ".join(nodeimage.STRIPPED)
    return (
        f"FROM {config.REGISTRY_TORCH_BASE}\n"
        f"RUN apt-get update && {install} && rm -rf /var/lib/apt/lists/*"
        f" && cd / && bash -O globstar -O nullglob -c 'for f in {doomed};"
        f' do [ "$f" = {keep} ] || rm -rf "$f"; done\'\n'
    )
