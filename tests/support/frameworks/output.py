"""The output of a training script, which stops the script after a number of steps.

A process that reads the output may run late on a busy machine. Without the stop, the script could have ended
before it is killed.

This module is also a program that runs a script: `python -m tests.support.frameworks.output SCRIPT ...`.
The variable KILL_AFTER gives the number of steps and the signal. Without it, nothing stops the script. With
RANKS the program runs the script as a gang of so many ranks.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch
from tests.support.frameworks.digest import digest_of

PROGRAM = __name__
KILL_AFTER, RANKS = "KILL_AFTER", "RANKS_OF_THE_GANG"
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

    def __init__(
        self, file: IO[str], kill_after: int | None = None, number: int = signal.SIGKILL
    ) -> None:
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
    if RANKS in os.environ:
        become_rank(int(os.environ[RANKS]))
    steps, _, number = os.environ.get(KILL_AFTER, "").partition(" ")
    kill = (int(steps), int(number)) if steps else ()
    # A rank writes whole lines, because all ranks of a gang have one pipe.
    sys.stdout = output = Output(os.fdopen(1, "w", 1, closefd=False), *kill)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    found = runpy.run_path(script, run_name="__main__")
    if not output.has_digest and isinstance(found.get("model"), torch.nn.Module):
        print("digest", _digest_of_gang(found["model"]))


def _digest_of_gang(model: torch.nn.Module) -> str:
    """Return the same digest on all ranks, also where each has another part of the model."""
    own = digest_of(model.state_dict().values())
    distributed: Any = torch.distributed
    if not distributed.is_initialized():
        return own
    digests: list[str] = [own] * distributed.get_world_size()
    distributed.all_gather_object(digests, own)
    return "-".join(sorted(set(digests)))


def become_rank(ranks: int) -> None:
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
