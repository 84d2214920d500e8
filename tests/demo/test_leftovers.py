"""A demo ends what it has started, and the next one removes what is left of a killed one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from demo.leftovers import MARK, Claim, clear, marked
from demo.waits import DemoFailed
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.launched import until

ROOT = Path(__file__).resolve().parents[2]
DEMO = """
import subprocess, sys
from pathlib import Path
from demo.leftovers import Claim
folder, memory = Path(sys.argv[1]), Path(sys.argv[2])
with Claim(folder, memory):
    # A pod: a session of its own, whose process starts another one and ends.
    subprocess.run(["setsid", "sh", "-c", "sleep 600 & sleep 600 &"], check=True)
    (memory / "slot").write_bytes(bytes(4096))
    print("ready", flush=True)
    sys.stdin.read()
"""


def start(folder: Path, memory: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", DEMO, str(folder), str(memory)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"ready\n"
    until(lambda: len(marked(folder)) == 2, "both processes to carry the mark")
    return process


@pytest.mark.fault("A demo ends by SIGKILL, SIGTERM or SIGINT while what it started runs")
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, None])
def test_its_processes_end_with_a_demo_for_every_cause(
    tmp_path: Path, ending: signal.Signals | None
) -> None:
    folder, memory = tmp_path / "demo", tmp_path / "memory"
    process = start(folder, memory)
    if ending is None:
        process.stdin.close()
    else:
        process.send_signal(ending)
    process.wait()
    until(lambda: not marked(folder), "the demo's processes to end")
    until(lambda: not memory.exists(), "the demo's memory to be freed")


@pytest.mark.fault("A demo and its guardian are killed, and the next one starts")
def test_what_a_killed_demo_and_guardian_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    folder, memory = tmp_path / "demo", tmp_path / "memory"
    left = subprocess.Popen(
        ["sleep", "600"], env={**os.environ, MARK: str(folder)}, start_new_session=True
    )
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: f"{folder}-2"})
    memory.mkdir()
    (memory / "slot").write_bytes(bytes(4096))
    try:
        until(lambda: marked(folder) == [left.pid], "the process to carry its mark")
        with Claim(folder, memory):
            assert left.wait(HANG_SECONDS) == -signal.SIGKILL
            assert list(memory.iterdir()) == []
            assert other.poll() is None
    finally:
        for process in (left, other):
            process.kill()
            process.wait()


def test_one_demo_at_a_time_has_a_folder(tmp_path: Path) -> None:
    folder, memory = tmp_path / "demo", tmp_path / "memory"
    with Claim(folder, memory):
        with pytest.raises(DemoFailed, match="Another demo runs"):
            Claim(folder, memory).__enter__()
        assert memory.exists()
    with Claim(folder, memory):
        clear(folder, tmp_path / "no memory")
