"""Run a training script until it ends, kill it on the way, and compare where it ends.

A script prints `step <n>` after each optimizer step and `digest <hex>` at its end (`digest_of` computes it).
The tests kill it when it has printed a number of steps and a checkpoint contains one of them, never after a
time, so that they do the same on a slow machine.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.support.frameworks.output import PROGRAM, STEPS_BEFORE_KILL, read_steps
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.launched import committed_step, until

_SECONDS = HANG_SECONDS
"""Bounds a script that hangs. No test asserts on it."""


@dataclass(frozen=True)
class Trained:
    """How a training ended, and what it went through."""

    digest: str
    """Of all that the script's last line covers. Equal digests mean equal bits."""
    starts: tuple[int, ...]
    """The first step that each process trained: 1 for the first one."""
    kills: int
    """Processes that were killed."""


def train(
    command: Sequence[str],
    folder: Path,
    *,
    kills: int = 0,
    seed: int = 0,
    least_steps: int = 1,
    most_steps: int = 3,
    environment: Mapping[str, str] | None = None,
) -> Trained:
    """Run `command` in `folder` until one of its processes ends by itself.

    command: what `python` or `launched` returns, for example.
    kills: number of processes to kill. Each is killed with its children when it has printed
      `least_steps` to `most_steps` steps, a number drawn from `seed`, and when a checkpoint in `folder`
      contains a step of this process. Choose them so that the training is longer.
    least_steps: must not be below the steps between saves, or there may be no such checkpoint.
    environment: variables to set beside those of this process.

    Raises AssertionError with the output if the script fails, or ends before all kills.
    """
    draw = random.Random(seed)
    starts: list[int] = []
    for _ in range(kills):
        starts.append(_killed(command, folder, draw.randint(least_steps, most_steps), environment))
    start, digest = _finished(command, folder, environment)
    return Trained(digest, (*starts, start), kills)


def python(script: Path, *arguments: str) -> list[str]:
    """Return the command that runs `script` in this environment."""
    return [sys.executable, "-m", PROGRAM, str(script), *arguments]


def launched(script: Path, *arguments: str, ranks: int) -> list[str]:
    """Return the command that runs `script` as a gang of `ranks` on this machine."""
    options = ["-m", "holdfast", "run", "--nproc-per-node", str(ranks), "--"]
    return [sys.executable, *options, *python(script, *arguments)]


def _killed(
    command: Sequence[str], folder: Path, steps: int, environment: Mapping[str, str] | None
) -> int:
    """Kill the script after `steps` steps. Return the first step that it trained."""
    variables = {**(environment or {}), STEPS_BEFORE_KILL: str(steps)}
    with _started(command, folder, variables) as process:
        try:
            seen, output = read_steps(_lines(process), steps)
            text = "".join(output)
            assert len(seen) == steps, f"the script ended before it was killed:\n{text}"
            until(lambda: committed_step(folder) >= seen[0], "a checkpoint of this process")
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(_SECONDS)
    return seen[0]


def _finished(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None
) -> tuple[int, str]:
    """Let the script end. Return the first step that it trained, and its digest."""
    with _started(command, folder, environment) as process:
        seen, output = read_steps(_lines(process), None)
        code = process.wait(_SECONDS)
    text = "".join(output)
    assert code == 0, f"exit code {code}:\n{text}"
    digests = {line.split()[-1] for line in output if "digest " in line}
    assert len(digests) == 1, f"expected one digest, found {sorted(digests)}:\n{text}"
    assert seen, f"the script printed no step:\n{text}"
    return seen[0], digests.pop()


def _started(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _lines(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout
