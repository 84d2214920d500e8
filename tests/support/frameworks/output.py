"""The output of a training script, which stops the script after a number of steps.

A process that reads the output may run late on a busy machine. Without the stop, the script could have ended
before it is killed.

This module is also a program that runs a script: `python -m tests.support.frameworks.output SCRIPT ...`.
The variable STEPS_BEFORE_KILL gives the number of steps. Without it, nothing stops the script.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

PROGRAM = __name__
STEPS_BEFORE_KILL = "STEPS_BEFORE_KILL"
_STEP = re.compile(r"(?:\[rank \d+\] )?step (\d+)$")
"""A line `step <n>`, also with the prefix of `holdfast run`."""


class Output:
    """The output of a script, which notices the steps that it prints.

    Args:
        file: Where the output goes.
        kill_after: Number of steps after which the process gets the signal. None: it gets none.
        number: The signal. With SIGKILL the process waits before the end of the next step until another
            process kills it. It sends itself any other signal.
    """

    def __init__(self, file: IO[str], kill_after: int | None, number: int = signal.SIGKILL) -> None:
        self._file = file
        self._kill_after = kill_after
        self._signal = number
        self._line = ""
        self._steps: set[str] = set()
        self.has_digest = False

    def write(self, text: str) -> int:
        self._file.write(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self.has_digest |= line.startswith("digest ")
            if _STEP.match(line):
                self._steps.add(line)
                self._end_step(len(self._steps))
        return len(text)

    def _end_step(self, done: int) -> None:
        if self._kill_after is None:
            return
        if self._signal != signal.SIGKILL and done == self._kill_after:
            self._kill_after = None
            os.kill(os.getpid(), self._signal)
        elif self._signal == signal.SIGKILL and done > self._kill_after:
            self._file.flush()
            while True:  # until the process that reads the output has killed this one
                signal.pause()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def read_steps(lines: Iterable[str], wanted: int | None) -> tuple[list[int], list[str]]:
    """Read lines until they contain `wanted` different steps, or to their end.

    Returns the steps and the lines that were read.
    """
    steps: list[int] = []
    read: list[str] = []
    for line in lines:
        read.append(line)
        match = _STEP.match(line.strip())
        if match is not None and int(match[1]) not in steps:
            steps.append(int(match[1]))
            if len(steps) == wanted:
                break
    return steps, read


def main(script: str, *arguments: str) -> None:
    steps = os.environ.get(STEPS_BEFORE_KILL)
    if steps is not None:
        sys.stdout = Output(sys.stdout, int(steps))
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
