"""The project's images: locked dependencies and own packages, resolved on the host and copied in.

A build uses no network and runs only `python3 -m venv` and `compileall`. Dependencies and the project's own
code are separate layers, so that a code change rebuilds and loads a few hundred kilobytes.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from testbed import config, nodeimage, tools
from testbed.config import PYTHON, REPOSITORY, Bed, digest
from testbed.shell import Command, each, run, uv

LABEL = "dev.holdfast.inputs"
PLATFORM = "x86_64-manylinux_2_28"


@dataclass(frozen=True, slots=True)
class Image:
    """One image of the project. `members` are folders of the uv workspace, the published one last."""

    tag: str
    dockerfile: str
    package: str
    members: tuple[str, ...]
    torch: bool = False
    files: str = ""
    """Folder that is copied to `files/` in the build context; empty for none."""
    from_base: tuple[str, ...] = ()
    """Dependencies that the base image contains."""


IMAGES = (
    Image("holdfast/operator:dev", "operator", "holdfast-operator", ("core", "operator")),
    Image("holdfast/sidecar:dev", "sidecar", "holdfast-sidecar", ("core", "sidecar")),
    Image(
        "holdfast/trainer-gpt:dev",
        "examples/gpt",
        "holdfast-sdk",
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
    """Build the images whose inputs changed. Returns a note that names them."""
    if not bed.local:
        registry_bases(bed, log)
    with tempfile.TemporaryDirectory(dir=bed.work) as folder:
        wheels = own_wheels(Path(folder))
        built = each(lambda image: build(bed, image, wheels, log), IMAGES)
    if any(built):  # old builds would fill the disk
        prune = ["docker", "image", "prune", "-f", "--filter", f"label={LABEL}"]
        run(prune, env=bed.environment(), log=log)
    names = [image.tag.split("/")[1] for image, done in zip(IMAGES, built, strict=True) if done]
    return f"built {', '.join(names)}" if names else "nothing changed"


def own_wheels(folder: Path) -> dict[str, Path]:
    """Build a wheel of each workspace member, and return them by member. Equal sources give equal bytes."""
    members = sorted({member for image in IMAGES for member in image.members})

    def build_wheel(member: str) -> Path:
        out = folder / member
        uv("build", "--wheel", "-o", out, REPOSITORY / member)
        return next(out.glob("*.whl"))

    return dict(zip(members, each(build_wheel, members), strict=True))


def requirements(image: Image) -> str:
    """Return the requirements that uv.lock pins for the package, with hashes.

    The project's own packages and those of the base image are left out.
    """
    skip = [word for name in image.from_base for word in ("--no-emit-package", name)]
    form = ["export", "--frozen", "--no-dev", "--no-emit-workspace", "--no-header", "--no-annotate"]
    return uv(*form, "--package", image.package, *skip)


def build(bed: Bed, image: Image, wheels: dict[str, Path], log: Path) -> bool:
    """Build one image unless its inputs are unchanged. Returns whether it was built."""
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
    """Create a tree to copy over a venv: lib/pythonX.Y/site-packages, and bin with the venv's Python."""
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
    """Return the script with the image's Python in its first line instead of the host's."""
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
    """Prepare the bases of registry mode: the public ones, one with torch, and MinIO's image.

    Existing images are not pulled again, because registries count pulls. Images with unchanged inputs are
    not built again, because even an unchanged build gives an image a new id, and it would be loaded again.
    """
    env = bed.environment()
    for base in (config.python_base(), config.REGISTRY_TORCH_BASE):
        if not nodeimage.image_exists(bed, base):
            run(["docker", "pull", "-q", base], env=env, log=log)
    text = torch_dockerfile()
    inputs = digest(text, image_id(bed, config.REGISTRY_TORCH_BASE))
    if image_label(bed, config.TORCH_BASE_IMAGE) != inputs:
        # Use the host's network, because behind a proxy, a VPN or a local resolver the bridges reach no
        # mirror.
        command = ["docker", "build", "-q", "--network=host", "-t", config.TORCH_BASE_IMAGE]
        command += ["--label", f"{LABEL}={inputs}", "-"]
        run(command, env=env, log=log, stdin=text.encode())
    sets = [tool_set for tool_set in tools.TOOL_SETS if tool_set.name == "minio"]
    pinned = [tool_set.folder for tool_set in sets]
    inputs = digest(image_id(bed, config.python_base()), *pinned, *map(repr, sets))
    if image_label(bed, config.MINIO_IMAGE) != inputs:
        nodeimage.minio_image(bed, config.python_base(), log, f"LABEL {LABEL}={inputs}")


def torch_dockerfile() -> str:
    """Return the Dockerfile of registry mode's torch base.

    It has the packages of local mode's torch base and lacks the same files.
    """
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
