"""Runs of tests in processes of their own, which end with this process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tools.mutants import imported

_ROOT = Path(__file__).resolve().parents[2]
_FAILED = re.compile(r"^(?:FAILED|ERROR) [^:\n]*::(.+?)(?: - .*)?$", re.MULTILINE)
_CRASHES = frozenset({-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE})
_SHOWN_LINES = 25


class Verdict(StrEnum):
    """Result of the tests of one mutant."""

    KILLED = "killed"
    TIME_LIMIT = "killed (time limit)"
    SURVIVED = "SURVIVED"
    NOT_RUN = "NOT RUN"
    """The tests could not run, which shows nothing about the mutant."""


@dataclass(frozen=True, slots=True)
class Result:
    """What the tests showed."""

    verdict: Verdict
    seconds: float
    killer: str
    """The first test that failed, or an empty text."""
    output: str
    """End of the output."""


class Runs:
    """Starts pytest, and can end all runs at once. Thread-safe."""

    def __init__(self, root: Path) -> None:
        """`root` is the folder in which pytest runs."""
        self._root = root
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def run(
        self, tests: tuple[str, ...], copy: Path, module: str, folder: Path, limit_seconds: float
    ) -> Result:
        """Run tests with the source folder `copy` before all installed packages.

        Args:
            tests: Files or node ids.
            copy: Source folder, which `module` must come from.
            module: A module of the folder.
            folder: Folder for the temporary files of the tests.
            limit_seconds: Time after which the run is ended.
        """
        began = time.monotonic()
        process = self._start(tests, copy, module, folder)
        try:
            output, _ = process.communicate(timeout=limit_seconds)
            late = False
        except subprocess.TimeoutExpired:
            late = True
            _end(process)
            output, _ = process.communicate()
        finally:
            _end(process)  # also what a failed test has left
            with self._lock:
                self._running.discard(process)
        verdict = Verdict.TIME_LIMIT if late else _verdict(process.returncode)
        failed = _FAILED.search(output)
        killer = failed.group(1) if failed and verdict is Verdict.KILLED else ""
        tail = "\n".join(output.splitlines()[-_SHOWN_LINES:])
        return Result(verdict, time.monotonic() - began, killer, tail)

    def _start(
        self, tests: tuple[str, ...], copy: Path, module: str, folder: Path
    ) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "pytest", *tests, "-x", "-q", "-p", "no:cacheprovider"]
        # A comparison of long bytes would take minutes to describe.
        command += ["--assert=plain", "--tb=short"]
        command += ["-p", imported.__name__, f"--basetemp={folder / 't'}"]
        environment = {
            **os.environ,
            **imported.settings(module, copy),
            "PYTHONPATH": os.pathsep.join((str(copy), str(_ROOT))),
            # Property tests then try the same examples each time, so that a verdict does not change.
            "CI": "1",
        }
        with self._lock:
            if self._stopped:
                raise InterruptedError("the runs were ended")
            process = subprocess.Popen(
                command,
                cwd=self._root,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._running.add(process)
            return process

    def stop(self) -> None:
        """End all runs with what they have started, and start no more."""
        with self._lock:
            self._stopped = True
            running = tuple(self._running)
        for process in running:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _verdict(status: int) -> Verdict:
    if status == 0:
        return Verdict.SURVIVED
    if status == 1 or status in _CRASHES:
        return Verdict.KILLED
    return Verdict.NOT_RUN  # pytest found no such test, could not import one, or was killed
