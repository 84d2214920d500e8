"""Recording of the functions that run in a walk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools.trace.recording import Recording

PROGRAM = """
import os, sys
from holdfast_core import clock
clock.SystemClock().utc_now()
print("ready", flush=True)
sys.stdin.readline()
if os.fork() == 0:
    clock.SystemClock().utc_now()
    os._exit(0)
os.wait()
clock.SystemClock().monotonic()
clock.SystemClock().monotonic()
print("done", flush=True)
sys.stdin.readline()
clock.SystemClock().utc_now()
"""


def test_each_process_records_the_first_call_of_each_function_within_the_walk(
    tmp_path: Path,
) -> None:
    recording = Recording(tmp_path / "calls")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **recording.environment()},
    )
    assert process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    with recording.walk():
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
    process.communicate("\n")
    assert process.returncode == 0
    calls = [(call.process, call.file, call.function) for call in recording.calls()]
    file = "core/src/holdfast_core/clock.py"
    assert calls == [
        ("program", file, "SystemClock.utc_now"),
        ("program", file, "SystemClock.monotonic"),
    ]
