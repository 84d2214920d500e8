"""docs/install.md: its commands in a fresh environment, and its script, which is killed and run again."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/install.md"

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def section(title: str) -> str:
    return PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run_as_written(commands: str, environment: Path) -> None:
    """Run the commands in a virtual environment, without torch, which is large and not under test."""
    for line in commands.strip().splitlines():
        text = shlex.split(line.replace("[torch]", ""))
        text[0] = {"pip": str(environment / "bin/pip")}[text[0]]
        done = subprocess.run(text, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.fault("A user follows the documented commands where no index knows the packages")
def test_the_commands_install_the_sdk_from_the_checkout(tmp_path: Path) -> None:
    """No package index has our packages, so both must be installed from here."""
    environment = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    run_as_written(blocks(section("The SDK, for a training script"), "sh")[0], environment)
    where = subprocess.check_output(
        [str(environment / "bin/python"), "-I", "-c", "import holdfast; print(holdfast.__file__)"],
        text=True,
    )
    assert where.startswith(str(environment))
    shown = subprocess.check_output([str(environment / "bin/holdfast"), "run", "--help"], text=True)
    assert "--nproc-per-node" in shown


DIES_AT_STEP_350 = """
import os, pathlib, signal
from tests.support.trainer.launched import committed_step, until
from torch.optim.optimizer import register_optimizer_step_post_hook

def count(*_, steps=[]):
    steps.append(1)
    if len(steps) == 350:
        # The script does these steps in less time than a commit may take.
        until(lambda: committed_step(pathlib.Path("ckpt")) > 0, "a commit")
        os.kill(os.getpid(), signal.SIGKILL)

register_optimizer_step_post_hook(count)
"""


def losses(output: Path) -> dict[int, str]:
    found = re.findall(r"^step (\d+): loss (\S+)$", output.read_text(), re.MULTILINE)
    return {int(step): loss for step, loss in found}


def train(folder: Path, output: Path) -> int:
    """Run train.py and return its exit code."""
    with output.open("wb") as out:
        return subprocess.run(
            [sys.executable, "train.py"], cwd=folder, stdout=out, stderr=subprocess.STDOUT
        ).returncode


@pytest.mark.fault("A user kills the first training of the README and runs it again")
def test_five_minutes_without_kubernetes(tmp_path: Path) -> None:
    (script,) = blocks(section("Five minutes without Kubernetes"), "python")
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(script)
    calm = tmp_path / "calm.log"
    assert train(tmp_path / "calm", calm) == 0, calm.read_text()

    first, second = tmp_path / "first.log", tmp_path / "second.log"
    killed = tmp_path / "killed"
    (killed / "train.py").write_text(DIES_AT_STEP_350 + script)
    assert train(killed, first) == -signal.SIGKILL, first.read_text()
    (killed / "train.py").write_text(script)
    assert train(killed, second) == 0, second.read_text()
    assert 0 not in losses(second)
    assert losses(second)
    expected = losses(calm)
    assert losses(second) == {step: expected[step] for step in losses(second)}


def test_its_second_form_trains_one_model_in_two_ranks(tmp_path: Path) -> None:
    """The ranks have the same parameters, from batches that differ."""
    (script,) = blocks(section("Five minutes without Kubernetes"), "python")
    command = blocks(section("Five minutes without Kubernetes"), "sh")[-1].splitlines()[-1]
    shown = "print(f'parameters {float(sum(p.sum() for p in model.parameters()))!r}')\n"
    (tmp_path / "train.py").write_text(script + shown)
    program, *arguments = shlex.split(command)
    assert program == "holdfast"
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert done.stdout.count(f"[rank {rank}] step ") == 20, done.stdout
    assert len(set(re.findall(r"parameters (\S+)", done.stdout))) == 1
    assert len(set(re.findall(r"step 1900: loss (\S+)", done.stdout))) == 2
