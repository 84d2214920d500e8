"""Repeat test files while other processes keep the cores busy, and name the tests that fail.

`python -m tools.flakes FILE... --times 10 --load 4` runs pytest on the files ten times beside four busy
processes of normal priority. It prints a row for each run and the ids of the tests that failed. The logs stay
in build/flakes/. The exit status is 1 if any run failed.

A test that passes alone and fails here waits on wall clock: let it wait on an event or on a manual clock.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "flakes"

_BUSY = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
while os.getppid() == int(sys.argv[1]):
    pass
"""
"""A busy process. It ends with this tool, also when the tool is killed."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_COUNT = re.compile(r"(\d+) (passed|failed|error)")


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one run of pytest."""

    passed: int
    failed: tuple[str, ...]
    """Ids of the tests that failed. A run that failed without such a test has its exit status instead."""
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tools.flakes")
    parser.add_argument("files", nargs="+", help="test files, folders or ids of tests")
    parser.add_argument("--times", type=int, default=10, help="number of runs (default: 10)")
    parser.add_argument("--load", type=int, default=4, help="number of busy processes (default: 4)")
    parser.add_argument(
        "--logs", type=Path, help="folder of the logs (default: one in build/flakes/)"
    )
    options = parser.parse_args(arguments)
    logs = options.logs or LOGS / time.strftime("%Y%m%d-%H%M%S")
    logs.mkdir(parents=True, exist_ok=True)
    print(f"{options.times} runs beside {options.load} busy processes; logs in {logs}")
    print("  run  passed  failed  seconds", flush=True)
    failed: Counter[str] = Counter()
    with busy(options.load):
        for number in range(1, options.times + 1):
            run = run_once(options.files, logs / f"run-{number}.log")
            print(
                f"{number:5}  {run.passed:6}  {len(run.failed):6}  {run.seconds:7.1f}", flush=True
            )
            failed.update(run.failed)
    for test, times in failed.most_common():
        print(f"failed in {times} of {options.times} runs: {test}")
    return 1 if failed else 0


@contextmanager
def busy(processes: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep this number of processes busy. They end with the block, or with this process."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(processes):
            command = [sys.executable, "-c", _BUSY, str(os.getpid())]
            running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        yield running
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


def run_once(files: Sequence[str], log: Path) -> Run:
    """Run pytest on the files, and write its output to `log`."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "pytest", *files, "-q", "-rfE", "-p", "no:cacheprovider"]
    with open(log, "wb") as out:
        code = subprocess.run(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=False
        ).returncode
    return result_of(log.read_text(errors="replace"), code, time.monotonic() - begun)


def result_of(output: str, code: int, seconds: float) -> Run:
    """Return the result that pytest printed.

    Args:
        output: What pytest printed with -rfE.
        code: Its exit status.
        seconds: How long it took.
    """
    counts = {name: int(number) for number, name in _COUNT.findall(output[-500:])}
    failed = tuple(dict.fromkeys(_FAILED.findall(output)))
    if code != 0 and not failed:
        failed = (f"pytest itself, exit status {code}",)
    return Run(counts.get("passed", 0), failed, seconds)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main())
