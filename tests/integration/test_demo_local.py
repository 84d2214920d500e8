"""`make demo`, and a second run after it was interrupted in the middle."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo.leftovers import marked
from demo.local import memory_of
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.launched import until

ROOT = Path(__file__).resolve().parents[2]
STEPS = 80

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "demo"
    assert marked(tmp_path / "demo") == []
    assert not memory_of(tmp_path / "demo").exists()


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the demo without a terminal. Its output goes to a file beside the folder."""
    command = [sys.executable, "-m", "demo", "local", "--folder", str(folder)]
    command += ["--steps", str(STEPS), "--picture", str(folder.parent / "demo.png")]
    with output_of(folder).open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "COLUMNS": "80"},
        )


def output_of(folder: Path) -> Path:
    return folder.parent / "out.log"


def text_of(folder: Path) -> str:
    return output_of(folder).read_text()


@pytest.mark.fault("The demo is killed while a job recovers, and run again")
def test_it_completes_after_it_was_killed(folder: Path) -> None:
    killed = start(folder)
    try:
        until(
            lambda: "✗ pod deleted" in text_of(folder) or killed.poll() is not None,
            "the first failure of the story",
            seconds=900,
        )
        assert killed.poll() is None, text_of(folder)
        assert marked(folder) != []
    finally:
        killed.kill()
        killed.wait()
    until(lambda: not marked(folder), "the guardian to end what the demo had started")

    process = start(folder)
    assert process.wait(1500) == 0, text_of(folder)
    output = text_of(folder)
    assert "bit-identical to an uninterrupted run" in output
    lines = output.splitlines()
    assert max(len(line) for line in lines) <= 80
    repeated = [a for a, b in itertools.pairwise(lines) if a == b]
    assert repeated == []
    assert_phases_add_up(output)
    assert (folder.parent / "demo.png").stat().st_size > 0


def assert_phases_add_up(output: str) -> None:
    """Assert that the phases in the printed table at the end add up to their totals."""
    table = output.partition("What was lost, and what it cost")[2].partition("  rank 0:")[0]
    totals: list[float] = []
    sums: list[float] = []
    for line in table.splitlines():
        if found := re.search(r"step .* from .* ([0-9.]+) s$", line):
            totals.append(float(found[1]))
            sums.append(0.0)
        elif line.startswith("    "):
            sums[-1] += sum(float(number) for number in re.findall(r" ([0-9]+\.[0-9])\b", line))
    assert len(totals) == 4
    assert [round(total, 1) for total in sums] == totals


@pytest.mark.fault("A second demo starts in the same folder")
@pytest.mark.fault("The demo is interrupted while its job trains")
def test_a_second_demo_is_refused_and_the_first_ends_what_it_started(folder: Path) -> None:
    """A second demo would delete the files of the first one while it runs."""
    first = start(folder)
    try:
        until(
            lambda: (
                re.search(r"committed \d", text_of(folder)) is not None or first.poll() is not None
            ),
            "the first demo to commit a step",
            seconds=900,
        )
        second = subprocess.run(
            [sys.executable, "-m", "demo", "local", "--folder", str(folder)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert second.returncode == 1
        happened, seen, logs = second.stderr.splitlines()
        assert "Another demo runs" in happened
        assert str(first.pid) in seen
        assert logs.startswith("Logs: ")
        assert first.poll() is None, text_of(folder)
        assert marked(folder) != []
        first.send_signal(signal.SIGINT)
        assert first.wait(HANG_SECONDS) == 130, text_of(folder)
    finally:
        first.kill()
        first.wait()
    assert text_of(folder).rstrip().endswith("All of its processes have ended.")
    assert marked(folder) == []


@pytest.mark.fault("The demo's folder belongs to a user")
def test_a_folder_that_no_demo_made_is_not_deleted(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    process = start(folder)
    assert process.wait(HANG_SECONDS) == 1
    assert "was not created by a demo" in text_of(folder)
    assert (folder / "thesis.tex").read_text() == "mine"
