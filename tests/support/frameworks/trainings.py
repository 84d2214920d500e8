"""Run a training script until it ends, kill it on the way, and compare where it ends.

A script prints `step <n>` after each optimizer step and `digest <hex>` at its end (`digest_of` computes it).
One that prints no digest needs a global variable `model`, whose state_dict is digested. The tests kill it
when it has printed a number of steps and a checkpoint contains some of them, never after a time, so that
they do the same on a slow machine.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import zygote
from tests.support.frameworks.output import KILL_AFTER, PROGRAM, RANKS, read_steps
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.launched import committed_step, until

from holdfast.launcher.forkserver import TORCH_MODULES


@dataclass(frozen=True)
class Training:
    """One training of a script, in a folder of its own."""

    folder: Path
    arguments: tuple[str, ...] = ()
    kills: int = 0
    seed: int = 0
    least_steps: int = 1
    most_steps: int = 3
    """All processes are killed after a number of steps between these two, drawn from `seed`, and before
    the end of the next step."""
    signal: int = signal.SIGKILL
    """With SIGTERM a process, the only rank, gets it right after the step, and its end is awaited."""
    ranks: int | None = None
    """Size of the gang. None: one process without the variables of a gang."""
    kept_steps: int = 1
    """A kill waits until a checkpoint contains this many steps of the killed process.

    The script must save this many steps before it ends the step after `least_steps`. Without the wait, the
    speed of the disk decides how many steps the next process repeats."""
    kills_without_checkpoint: int = 0
    """Kills, the first ones, that do not wait for a checkpoint."""


@dataclass(frozen=True)
class Trained:
    """How a training ended, and what it went through."""

    digest: str
    """Of all that the script's last line covers. Equal digests mean equal bits."""
    starts: tuple[int, ...]
    """The first step that each process trained: 1 for the first one. The last number is missing if the last
    process trained no step."""
    kills: int
    """Processes that were killed."""


def train_forked(
    script: Path, trainings: Sequence[Training], *, preload: Sequence[str]
) -> list[Trained]:
    """Run the script for each training, on the CPU. Return how each ended.

    Importing a framework takes longer than a training of a test, so processes are forked from a zygote that
    has imported it. Ranks of a gang get the variables and the store that torchrun gives them.

    Args:
        script: The script. Each training passes its arguments to it.
        trainings: Their folders are created.
        preload: Modules to import once. They must not start threads.
    """
    found = []
    for training in trainings:
        training.folder.mkdir(parents=True, exist_ok=True)
        command = python(script, *training.arguments)
        # A process that has used a GPU cannot fork others that use it.
        environment = {"CUDA_VISIBLE_DEVICES": ""}
        if training.ranks is not None:
            environment[RANKS] = str(training.ranks)
        modules = (*TORCH_MODULES, *preload)
        found.append(train(command, training, environment=environment, preload=modules))
    return found


def train(
    command: Sequence[str],
    training: Training,
    *,
    environment: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
) -> Trained:
    """Run `command` in the training's folder until one of its processes ends by itself.

    Args:
        command: What `python` or `launched` returns, for example.
        training: Its `arguments` and `ranks` are those of the command, and have no effect here.
        environment: Variables to set beside those of this process.
        preload: Modules of the zygote that forks the processes. Without any they are executed.

    Raises AssertionError with the output if the script fails, or ends before all kills.
    """
    draw = random.Random(training.seed)
    given = environment or {}
    starts: list[int] = []
    for number in range(training.kills):
        kept = training.kept_steps if number >= training.kills_without_checkpoint else 0
        steps = draw.randint(training.least_steps, training.most_steps)
        variables = {**given, KILL_AFTER: f"{steps} {training.signal:d}"}
        with _started(command, training, variables, preload) as process:
            starts.append(_killed(process, training, steps, kept))
    with _started(command, training, given, preload) as process:
        start, digest = _finished(process)
    return Trained(digest, (*starts, *start), training.kills)


def python(script: Path, *arguments: str) -> list[str]:
    """Return the command that runs `script` in this environment."""
    return [sys.executable, "-m", PROGRAM, str(script), *arguments]


def launched(script: Path, *arguments: str, ranks: int) -> list[str]:
    """Return the command that runs `script` as a gang of `ranks` on this machine."""
    options = ["-m", "holdfast", "run", "--nproc-per-node", str(ranks), "--"]
    return [sys.executable, *options, *python(script, *arguments)]


def _killed(process: subprocess.Popen[str], training: Training, steps: int, kept: int) -> int:
    """Kill the processes after `steps` steps. Return the first step that they trained."""
    assert process.stdout is not None
    is_awaited = training.signal != signal.SIGKILL
    try:
        seen, output = read_steps(process.stdout, None if is_awaited else steps)
        text = "".join(output)
        assert seen and (is_awaited or len(seen) == steps), f"it ended before its kill:\n{text}"
        if kept > 0 and not is_awaited:
            last = seen[0] - 1 + kept
            until(lambda: committed_step(training.folder) >= last, f"a checkpoint of {kept} steps")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(HANG_SECONDS)
    return seen[0]


def _finished(process: subprocess.Popen[str]) -> tuple[list[int], str]:
    """Let the script end. Return the first step that it trained, if there is one, and its digest."""
    assert process.stdout is not None
    seen, output = read_steps(process.stdout, None)
    code = process.wait(HANG_SECONDS)
    text = "".join(output)
    assert code == 0, f"exit code {code}:\n{text}"
    digests = {line.split()[-1] for line in output if "digest " in line}
    assert len(digests) == 1, f"expected one digest, found {sorted(digests)}:\n{text}"
    return seen[:1], digests.pop()


def _started(
    command: Sequence[str],
    training: Training,
    environment: Mapping[str, str],
    preload: Sequence[str],
) -> subprocess.Popen[str]:
    return zygote.Popen(
        command,
        cwd=training.folder,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preload=preload,
        executed=not preload,
    )
