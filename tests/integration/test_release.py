"""What a release contains is installed in fresh environments, where it trains and survives a lost rank."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tools.release import krew, sdk_image, trees, version, wheels
from tools.release.source import Source

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/install.md"
UV = os.environ.get("UV", "uv")
SOURCE = Source(version.of(ROOT), "5" * 40, 1_700_000_000)
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
PLATFORM = f"{platform.machine()}-manylinux_2_28"
SCRIPT = """
import hashlib, os, signal, sys
from pathlib import Path
import blake3, holdfast, holdfast_core, torch

for module in (holdfast, holdfast_core, blake3):
    assert Path(module.__file__).is_relative_to(sys.argv[1]), module.__file__
torch.manual_seed(0)
model, dies_at = torch.nn.Linear(16, 4), int(sys.argv[2])
with holdfast.Checkpointer(dir="ckpt", interval_steps=10) as ckpt:
    for step in ckpt.steps(total=60, state={"model": model, "rng": holdfast.RNG()}):
        if step == dies_at and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(32, 16)).square().mean().backward()
        with torch.no_grad():
            for one in model.parameters():
                one -= 0.1 * one.grad
                one.grad = None
weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
Path("digest").write_text(hashlib.sha256(weights).hexdigest())
"""

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def run(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in words]
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=clean | environment
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done


def trained(folder: Path, launcher: Path, python: Path, packages: Path, dies_at: int) -> str:
    """Train in a new folder with one rank, which is killed at a step. Returns the digest of the weights."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    words = (launcher, "run", "--max-restarts", "2", "--", "python3", "train.py", packages, dies_at)
    command = [str(word) for word in words]
    path = f"{python.parent}:{os.environ['PATH']}"
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=clean | {"PATH": path}
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert (folder / "died").exists()
    return (folder / "digest").read_text()


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    wheels.build(ROOT, SOURCE, folder)
    return folder


@pytest.fixture(scope="module")
def fresh(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with what the page's commands install from the released wheels."""
    folder = tmp_path_factory.mktemp("fresh")
    environment, pins = folder / "env", folder / "pins.txt"
    run(UV, "venv", "--quiet", "--python", sys.executable, environment)
    locked = ("--frozen", "--no-emit-workspace", "--no-hashes", "--no-header", "--no-annotate")
    pins.write_text(run(UV, "export", "--quiet", *locked).stdout)
    (command,) = re.findall(r"^pip install (--find-links dist .*)$", PAGE.read_text(), re.MULTILINE)
    wanted = [str(dist) if word == "dist" else word for word in shlex.split(command)]
    run(UV, "pip", "install", "-q", "--python", environment / "bin/python", "-c", pins, *wanted)
    return environment


@pytest.fixture(scope="module")
def digest(fresh: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a training in the fresh environment that loses its rank at step 45."""
    folder = tmp_path_factory.mktemp("training") / "x"
    return trained(folder, fresh / "bin/holdfast", fresh / "bin/python", fresh, 45)


def test_released_wheels_train_in_a_fresh_environment(fresh: Path, digest: str) -> None:
    assert len(digest) == 64
    assert run(fresh / "bin/holdfast", "version").stdout.split() == ["holdfast", SOURCE.version]
    assert "kubectl holdfast" in run(fresh / "bin/kubectl-holdfast", "--help").stdout


def test_released_wheels_are_pinned_to_each_other_and_have_a_license(dist: Path) -> None:
    names = sorted(path.name for path in dist.iterdir())
    assert names == [
        f"holdfast_{name}-{SOURCE.version}-py3-none-any.whl" for name in ("cli", "core", "sdk")
    ]
    for name in names:
        text = run("unzip", "-p", dist / name, "*/METADATA").stdout
        assert "License-File: LICENSE" in text, name
        ours = [line for line in text.splitlines() if "Requires-Dist: holdfast" in line]
        assert all(f"=={SOURCE.version}" in line for line in ours), ours
        assert ours or "core" in name


def test_the_same_sources_give_the_same_wheels_in_another_folder(
    dist: Path, tmp_path: Path
) -> None:
    for member in wheels.DISTRIBUTIONS:
        ignored = shutil.ignore_patterns("__pycache__")
        copy = tmp_path / "copy" / member
        shutil.copytree(ROOT / member, copy, ignore=ignored, copy_function=shutil.copyfile)
    (tmp_path / "out").mkdir()
    wheels.build(tmp_path / "copy", SOURCE, tmp_path / "out")
    for path in dist.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_trainer_trains_with_the_packages_that_the_init_container_copies(
    digest: str, tmp_path: Path
) -> None:
    image, volume = tmp_path / "image", tmp_path / "volume"
    sdk_image.fill(ROOT, SOURCE, image, platform=PLATFORM, pythons=(PYTHON,))
    volume.mkdir()
    for _ in range(
        2
    ):  # a kubelet runs an init container again, for example after a restart of the node
        run(sys.executable, image / "copy_to.py", volume)
    launcher = volume / "bin/holdfast"
    assert trained(tmp_path / "x", launcher, Path(sys.executable), volume, 25) == digest


def test_the_plugin_of_the_archive_starts_without_an_installation(tmp_path: Path) -> None:
    own = wheels.built(ROOT, SOURCE.epoch, wheels.DISTRIBUTIONS, tmp_path / "wheels")
    tree = tmp_path / "tree"
    trees.build(ROOT, krew.PLUGIN, [*own.values()], tree, platform=PLATFORM, pythons=(PYTHON,))
    link = tmp_path / "kubectl-holdfast"  # krew links to the program from a folder on the PATH
    link.symlink_to(tree / "bin/kubectl-holdfast")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    assert "Usage: kubectl holdfast" in run(link, "--help", PATH=path).stdout
