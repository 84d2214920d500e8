"""Child processes. A failure reports the command, its exit status and the end of its output."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

from testbed.config import REPOSITORY

T = TypeVar("T")
R = TypeVar("R")
Command = list[str | Path]


class BedError(Exception):
    """The test bed cannot continue. `advice` is what the user can try."""

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.advice = advice


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    log: Path | None = None,
    stdin: bytes | IO[bytes] | None = None,
    timeout_seconds: float | None = None,
    check: bool = True,
) -> str:
    """Run a command and return its stdout.

    With `log`, the command and its output are appended to that file. Raises BedError if the program is
    missing, exceeds `timeout_seconds`, or, with `check`, fails.
    """
    words = [str(word) for word in command]
    started = time.monotonic()
    try:
        done: subprocess.CompletedProcess[bytes] = subprocess.run(
            words,
            env=env,
            cwd=cwd,
            **_input(stdin),
            capture_output=True,
            timeout=timeout_seconds,
        )
    except FileNotFoundError as error:
        raise BedError(
            f"{words[0]} is not installed on this machine", "run: python3 -m testbed up"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise BedError(
            f"{' '.join(words)[:300]}: did not end within {timeout_seconds} s"
        ) from error
    out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    if log is not None:
        with log.open("a") as file:
            seconds = time.monotonic() - started
            file.write(f"$ {' '.join(words)[:2000]}  # {seconds:.1f} s\n{out}{err}")
    if check and done.returncode:
        tail = "\n".join((out + err).strip().splitlines()[-15:])
        raise BedError(f"{' '.join(words)[:300]}: exit {done.returncode}\n{tail}")
    return out


def _input(stdin: bytes | IO[bytes] | None) -> dict[str, Any]:
    if isinstance(stdin, bytes):
        return {"input": stdin}
    return {"stdin": subprocess.DEVNULL if stdin is None else stdin}


def uv(*words: str | Path, log: Path | None = None) -> str:
    """Run uv in the folder of the repository and return its stdout. Raises BedError."""
    program = os.environ.get("UV") or shutil.which("uv")
    if not program:
        raise BedError("uv is not installed on this machine", "python3 -m pip install uv")
    return run([program, *words, "--quiet"], cwd=REPOSITORY, log=log)


def answers(command: Sequence[str | Path], *, env: Mapping[str, str], seconds: float = 60) -> bool:
    """Return whether the command exits with 0 within `seconds`."""
    try:
        run(command, env=env, timeout_seconds=seconds)
    except BedError:
        return False
    return True


def pipe(producer: Command, consumer: Command, *, env: Mapping[str, str]) -> str:
    """Run `producer | consumer`, require that both succeed, and return the consumer's stdout."""
    with subprocess.Popen(list(map(str, producer)), stdout=subprocess.PIPE, env=env) as first:
        last = list(map(str, consumer))
        done = subprocess.run(last, stdin=first.stdout, capture_output=True, env=env)
        if first.stdout is not None:
            first.stdout.close()
    if first.returncode or done.returncode:
        end = done.stderr.decode(errors="replace")[-1500:]
        raise BedError(
            f"{producer[0]} | {consumer[0]}: {first.returncode}, {done.returncode}\n{end}"
        )
    return done.stdout.decode()


def each(call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Apply `call` to all items in parallel and return the results in order. Raises the first error."""
    work = list(items)
    with ThreadPoolExecutor(max_workers=max(1, len(work))) as pool:
        return list(pool.map(call, work))
