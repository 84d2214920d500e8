"""Run a training script many times without importing its framework each time.

Importing a training framework takes longer than a training of a test. One process for each list of modules
imports them once, and forks each rank of each run. `train_forked` does what `kills.train` does for several
trainings of a script, on the CPU. Ranks of a gang get the variables and the store that torchrun gives them.
A script that prints no digest needs a global variable `model`, whose state_dict is digested at its end.

It is not a zygote of tests.support.zygote, which forks programs for a worker that watches them itself. This
one forks from a process with frameworks of another environment, carries out whole trainings with their
kills next to the children, hosts the store of a gang, and digests the model that a script leaves behind.

This module is also the program that forks: `python -m tests.support.frameworks.forked MODULES`. It reads
one plan from each line of its input, and ends with its input.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tests.support.frameworks.digest import digest_of
from tests.support.frameworks.kills import Trained
from tests.support.frameworks.output import Output, read_steps
from tests.support.trainer.launched import committed_step, until

from holdfast.launcher.forkserver import TORCH_MODULES

_SECONDS = 600.0
"""Bounds a script that hangs. No test asserts on it."""


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


def train_forked(
    script: Path, trainings: Sequence[Training], *, preload: Sequence[str]
) -> list[Trained]:
    """Run the script for each training until its processes end with a digest. Return how each ended.

    The last number in `starts` is missing if the last process trained no step.

    preload: modules to import once. They must not start threads.

    Raises AssertionError with the output if the script fails.
    """
    for one in trainings:
        one.folder.mkdir(parents=True, exist_ok=True)
    lines = _forker(tuple(preload)).run(script, [asdict(one) for one in trainings])
    return [Trained(one["digest"], tuple(one["starts"]), one["kills"]) for one in lines]


@functools.cache
def _forker(preload: tuple[str, ...]) -> _Forker:
    return _Forker(preload)


class _Forker:
    """The process that forks. It ends when this process ends, because its input ends then."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(preload)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # A process that has used a GPU cannot fork others that use it.
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )

    def run(self, script: Path, plan: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what `_carry_out` returns for each training. After an error a new process is needed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([str(script), plan], default=str) + "\n")
            self._process.stdin.flush()
            poller = select.poll()
            poller.register(self._process.stdout, select.POLLIN)
            assert poller.poll(_SECONDS * 1000), (
                f"{script} did not end in {_SECONDS} s:\n{self._last_errors()}"
            )
            line = self._process.stdout.readline()
            assert line, f"{script}: {self._last_errors()}"
        except BaseException:
            _forker.cache_clear()
            self._process.kill()
            raise
        found: list[dict[str, Any]] = json.loads(line)
        return found

    def _last_errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-6000:]


# ---------------------------------------------------------------------- in the process that forks


@dataclass
class _Ended:
    steps: list[int]
    output: list[str]
    status: int = 0

    @property
    def digests(self) -> set[str]:
        return {line.split()[1] for line in self.output if line.startswith("digest ")}


def main(preload: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what modules print must not be taken for an answer
    # Without TORCH_MODULES, each child would import them when it creates its optimizer: two CPU seconds.
    for name in (*TORCH_MODULES, *json.loads(preload)):
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        script, plan = json.loads(line)
        print(json.dumps([_carry_out(script, one) for one in plan]), file=answers, flush=True)


def _carry_out(script: str, one: dict[str, Any]) -> dict[str, Any]:
    """Run the script until it ends by itself. Exit with its output if it does something else."""
    draw = random.Random(one["seed"])
    starts: list[int] = []
    for number in range(one["kills"]):
        kept = one["kept_steps"] if number >= one["kills_without_checkpoint"] else 0
        ended = _run(script, one, draw.randint(one["least_steps"], one["most_steps"]), kept)
        if not ended.steps or (ended.digests and one["signal"] == signal.SIGKILL):
            sys.exit("the script ended before it was killed:\n" + "".join(ended.output))
        starts.append(ended.steps[0])
    ended = _run(script, one, None, 0)
    if len(ended.digests) != 1 or ended.status != 0:
        sys.exit(
            f"expected one digest and exit status 0, found {ended.digests} and {ended.status}:\n"
            + "".join(ended.output)
        )
    starts += ended.steps[:1]
    return {"digest": ended.digests.pop(), "starts": starts, "kills": one["kills"]}


def _run(script: str, training: dict[str, Any], kill_after: int | None, kept: int) -> _Ended:
    """Run the script in forked children, and send the signal after a number of steps."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _be_child(script, training, kill_after, writing)
    os.close(writing)
    kill_after = kill_after if training["signal"] == signal.SIGKILL else None
    with os.fdopen(reading) as output:
        ended = _Ended(*read_steps(output, kill_after))
        if kill_after is not None and len(ended.steps) == kill_after:
            failure = None
            try:
                if kept > 0:
                    last = ended.steps[0] - 1 + kept
                    folder = Path(training["folder"])
                    until(lambda: committed_step(folder) >= last, f"a checkpoint of {kept} steps")
            except AssertionError as error:
                failure = error
            finally:
                os.killpg(pid, signal.SIGKILL)
            if failure is not None:
                sys.exit(f"{failure}\n" + "".join((*ended.output, *output)))
    ended.status = os.waitpid(pid, 0)[1]
    return ended


def _be_child(script: str, training: dict[str, Any], kill_after: int | None, writing: int) -> None:
    """Replace this child by the script, or by a gang of it. Does not return."""
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.close(writing)
        sys.stderr = os.fdopen(1, "w", buffering=1)
        sys.stdout = output = Output(sys.stderr, kill_after, training["signal"])
        os.chdir(training["folder"])
        sys.argv = [script, *training["arguments"]]
        if training["ranks"] is not None:
            _become_rank(training["ranks"])
        found = runpy.run_path(script, run_name="__main__")
        if not output.has_digest and isinstance(found.get("model"), torch.nn.Module):
            print("digest", _digest_of_gang(found["model"]))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except BaseException:  # noqa: BLE001 - the child must not return into the loop of its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _digest_of_gang(model: torch.nn.Module) -> str:
    """Return the same digest on all ranks, also where each has another part of the model."""
    own = digest_of(model.state_dict().values())
    distributed: Any = torch.distributed
    if not distributed.is_initialized():
        return own
    digests: list[str] = [own] * distributed.get_world_size()
    distributed.all_gather_object(digests, own)
    return "-".join(sorted(set(digests)))


def _become_rank(ranks: int) -> None:
    """Return in one child for each rank. This process hosts their store until all of them have ended.

    It listens before it forks. Otherwise another process could take the port before the store has it.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    gang = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "USE_LIBUV": "0",
    }
    for rank in range(ranks):
        if os.fork() == 0:
            listener.close()
            os.environ.update(gang, RANK=str(rank), LOCAL_RANK=str(rank))
            return
    distributed: Any = torch.distributed  # torch's stubs do not export its stores
    store = distributed.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        use_libuv=False,
        master_listen_fd=listener.detach(),
    )
    for _ in range(ranks):
        if os.wait()[1] != 0:
            os.killpg(0, signal.SIGKILL)  # the others would wait for the rank that failed
    del store
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
