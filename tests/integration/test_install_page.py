"""docs/install.md: its commands in a fresh environment, and its script, which is killed and run again."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.trainer.launched import until

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/install.md"
UV = os.environ.get("UV", "uv")

pytestmark = pytest.mark.integration


def section(title: str) -> str:
    return PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run_as_written(commands: str, environment: Path, dist: Path) -> None:
    """Run the commands in a virtual environment, without torch, which is large and not under test."""
    for line in commands.strip().splitlines():
        text = shlex.split(line.replace("[torch]", ""))
        text = [str(dist) if word == "dist" else word for word in text]
        text[0] = {"pip": str(environment / "bin/pip"), "uv": UV}[text[0]]
        done = subprocess.run(text, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [0, 1], ids=["from the checkout", "from wheels"])
def test_the_commands_install_the_sdk(tmp_path: Path, number: int) -> None:
    """No package index has our packages, so both must be installed from here."""
    environment = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    run_as_written(
        blocks(section("The SDK, for a training script"), "sh")[number],
        environment,
        tmp_path / "dist",
    )
    where = subprocess.check_output(
        [str(environment / "bin/python"), "-I", "-c", "import holdfast; print(holdfast.__file__)"],
        text=True,
    )
    assert where.startswith(str(environment))
    shown = subprocess.check_output([str(environment / "bin/holdfast"), "run", "--help"], text=True)
    assert "--nproc" in shown


def losses(output: Path) -> dict[int, str]:
    found = re.findall(r"^step (\d+): loss (\S+)$", output.read_text(), re.MULTILINE)
    return {int(step): loss for step, loss in found}


def start(folder: Path, output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "train.py"], cwd=folder, stdout=out, stderr=subprocess.STDOUT
        )


def test_five_minutes_without_kubernetes(tmp_path: Path) -> None:
    (script,) = blocks(section("Five minutes without Kubernetes"), "python")
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(script)
    calm = tmp_path / "calm.log"
    assert start(tmp_path / "calm", calm).wait() == 0, calm.read_text()

    first, second = tmp_path / "first.log", tmp_path / "second.log"
    process = start(tmp_path / "killed", first)
    until(lambda: 300 in losses(first) or process.poll() is not None, "step 300")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert start(tmp_path / "killed", second).wait() == 0, second.read_text()
    assert 0 not in losses(second)
    assert losses(second)
    expected = losses(calm)
    assert losses(second) == {step: expected[step] for step in losses(second)}
