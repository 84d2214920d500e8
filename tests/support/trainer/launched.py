"""`holdfast run` as users run it: a process with ranks that tests watch and kill.

The program must write "<steps done> <pid>" to `<progress>/rank<r>`, as examples/gpt/train.py does. A program
that writes it again must replace the file, because tests read it at any time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support import zygote
from tests.support.hang import HANG_SECONDS
from tests.support.zygote.launcher import connection_of_launcher

from holdfast.base.settings import current_environment


def until(condition: Callable[[], bool], what: str, seconds: float = HANG_SECONDS) -> None:
    """Poll until `condition` is true. Raises AssertionError that names `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.01)


def run_two_ranks(
    program: str, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> str:
    """Run a program in two ranks until it ends, and return its output.

    Its arguments are the checkpoint directory `<folder>/ckpt` and `arguments`. Raises AssertionError with the
    error output if it fails.
    """
    path = folder / "program.py"
    path.write_text(program)
    launch = [sys.executable, "-m", "holdfast.run", "--nproc-per-node", "2", "--", "python"]
    variables = {**current_environment(), **(environment or {})}
    with connection_of_launcher(variables) as connection:
        done = zygote.run(
            [*launch, str(path), str(folder / "ckpt"), *arguments],
            env=variables,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
            launcher=connection,
        )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def committed_step(directory: Path) -> int:
    """Return the newest step of a directory that has a manifest, or 0 if there is none.

    It may be called while ranks save: folders that they delete in the meantime are skipped.
    """
    steps = [0]
    for folder, _, files in os.walk(directory):
        path = Path(folder)
        if path.parent.name == "manifests" and any(name.endswith(".json") for name in files):
            steps.append(int(path.name[1:]))
    return max(steps)


def children_of(pid: int) -> list[int]:
    """Return the process ids of all descendants of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                found += [int(child), *children_of(int(child))]
    return found


def persisters_of(pid: int, folder: Path) -> list[int]:
    """Return the process ids of the persisters of a process that write to this folder.

    A test process may have other children: persisters of earlier tests that still end, and the resource
    tracker that multiprocessing keeps until the process ends.
    """
    found = []
    for child in children_of(pid):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"holdfast.directory.persister" in command and str(folder).encode() in command:
                found.append(child)
    return found


def is_alive(pid: int) -> bool:
    """Return whether the process runs. Zombies count as dead."""
    return state_of(pid) not in ("", "Z", "X")


def state_of(pid: int) -> str:
    """Return the letter of the process's state, such as Z for a zombie, or "" if there is none."""
    return _state(Path(f"/proc/{pid}/stat"))


def stop(pid: int) -> None:
    """Stop a process with SIGSTOP, and wait until none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    until(lambda: all(_state(file) == "T" for file in threads.glob("*/stat")), "the stop")


def _state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@dataclass(slots=True)
class Launched:
    """Context manager that runs `holdfast run` and kills all its remaining processes at exit."""

    directory: Path
    """Directory for output and progress files."""
    options: Sequence[str]
    """Options of `holdfast run`."""
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    executed: bool = False
    """Whether the launcher and its fork server are executed, as for users. The server is its child then."""
    _process: subprocess.Popen[bytes] | None = None

    @property
    def progress(self) -> Path:
        return self.directory / "progress"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise AssertionError("not started: use it as a context manager")
        return self._process

    def __enter__(self) -> Self:
        self.progress.mkdir(parents=True, exist_ok=True)
        variables = {**current_environment(), **self.environment}
        with (
            open(self._out, "wb") as out,
            open(self._err, "wb") as err,
            connection_of_launcher(variables, executed=self.executed) as connection,
        ):
            self._process = zygote.Popen(
                [sys.executable, "-m", "holdfast.run", *self.options, "--", *self.command],
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                env=variables,
                start_new_session=True,
                launcher=connection,
                executed=self.executed,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pid in [*children_of(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def wait(self, seconds: float = HANG_SECONDS) -> int:
        """Wait for the launcher and return its exit code."""
        return self.process.wait(seconds)

    def step_of(self, rank: int) -> int:
        """Return the steps done by the newest process of `rank`, or 0 before its first."""
        return self._progress_of(rank)[0]

    def pid_of(self, rank: int) -> int | None:
        return self._progress_of(rank)[1]

    def kill_rank(self, rank: int) -> int:
        """Send SIGKILL to the rank's process and return the steps it had done."""
        step, pid = self._progress_of(rank)
        if pid is None:
            raise AssertionError(f"rank {rank} has not done a step yet")
        os.kill(pid, signal.SIGKILL)
        return step

    def out(self) -> str:
        return self._out.read_text()

    def err(self) -> str:
        return self._err.read_text()

    @property
    def _out(self) -> Path:
        return self.directory / "out.log"

    @property
    def _err(self) -> Path:
        return self.directory / "err.log"

    def _progress_of(self, rank: int) -> tuple[int, int | None]:
        with contextlib.suppress(OSError, ValueError):
            step, pid = (self.progress / f"rank{rank}").read_text().split()
            return int(step), int(pid)
        return 0, None
