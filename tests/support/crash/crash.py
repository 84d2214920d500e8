"""Crash tests that kill a program at each system call of a save, or cut the power after each change.

Each function returns the problems that it found, as sentences; a crash test passes if there are none. A
`Check` inspects the directory that remains, as a new process would find it, and compares it with what the
program had acknowledged.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.crash.traced import Announce, Recorder, Strike, run
from tests.support.crash.write_orders import Acknowledged, Op, build, power_cuts

Check = Callable[[Path, Sequence[str]], list[str]]
"""Receives the directory and the acknowledgements that the program had made; returns the problems found."""

_NAMES_CHANGE = frozenset({"renameat", "linkat", "unlinkat", "mkdirat"})


@dataclass(frozen=True, slots=True)
class Report:
    tried: int
    """Number of kills, or of different states after a power cut."""
    calls: tuple[str, ...]
    problems: tuple[str, ...]


def kill_at_every_call(
    prepare: Callable[[Path], None],
    program: Callable[[Path, Announce], None],
    check: Check,
    *,
    enough: int = 20,
) -> Report:
    """Send SIGKILL to `program` before each call that would change something in its directory.

    `prepare` fills the directory once and is not killed. Each run is killed one call later than the run
    before it; the last run completes. The function stops early when `enough` problems are found.
    """
    return _strike_every_call(prepare, program, check, Strike(1), enough)


def fail_at_every_call(
    prepare: Callable[[Path], None],
    program: Callable[[Path, Announce], None],
    check: Check,
    *,
    error: int,
    for_ever: bool = False,
) -> Report:
    """Fail each of these calls once with `error`, or with `for_ever` that call and all later ones.

    `program` must handle the error: an exception that leaves it counts as a problem.
    """
    return _strike_every_call(prepare, program, check, Strike(1, error, for_ever), 20)


def _strike_every_call(
    prepare: Callable[[Path], None],
    program: Callable[[Path, Announce], None],
    check: Check,
    strike: Strike,
    enough: int,
) -> Report:
    problems: list[str] = []
    with scratch() as base:
        before = base / "before"
        before.mkdir()
        prepare(before)
        while True:
            directory = base / f"struck{strike.at}"
            shutil.copytree(before, directory)
            try:
                outcome = run(_bound(program, directory), directory, strike=strike)
            except AssertionError as error:
                problems.append(f"call {strike.at}: {error}")
            else:
                where = f"call {strike.at} ({outcome.calls[strike.at - 1 :][:1]})"
                problems += [
                    f"{where}: {p}" for p in in_child(check, directory, outcome.acknowledged)
                ]
                if not outcome.struck:
                    return Report(strike.at - 1, outcome.calls, tuple(problems))
            shutil.rmtree(directory)
            if len(problems) >= enough:
                return Report(strike.at, (), tuple(problems))
            strike = replace(strike, at=strike.at + 1)


def record(program: Callable[[Path, Announce], None], *, ignored: Sequence[str] = ()) -> list[Op]:
    """Return the log of a program that starts in an empty directory.

    `ignored` is described at `Recorder.ignored`.
    """
    with scratch() as base:
        directory = base / "recorded"
        directory.mkdir()
        recorder = Recorder(directory, tuple(ignored))
        run(_bound(program, directory), directory, recorder=recorder)
        return recorder.log


def cut_power_after_a_restart(
    prepare: Callable[[Path], None],
    program: Callable[[Path, Announce], None],
    check: Check,
    *,
    ignored: Sequence[str] = (),
) -> Report:
    """Kill a program after it changed a name, restart it, and cut the power after each acknowledgement.

    1. `prepare` runs.
    2. `program` is killed right after a change of a name, before that change is durable.
    3. `program` runs again, to its end.
    4. The power fails right after each acknowledgement of the second run.

    The second run sees the killed run's changes in the page cache, but the power cut may lose them.
    """
    problems: list[str] = []
    tried = 0
    kill_at = 1
    while True:
        with scratch() as base:
            directory = base / "recorded"
            directory.mkdir()
            recorder = Recorder(directory, tuple(ignored))
            run(_quietly(prepare, directory), directory, recorder=recorder)
            strike = Strike(kill_at)
            first = run(_bound(program, directory), directory, strike=strike, recorder=recorder)
            if not first.struck:
                return Report(tried, first.calls, tuple(problems))
            kill_at += 1
            if not first.calls[-2:-1] or first.calls[-2].split()[0] not in _NAMES_CHANGE:
                continue
            begun = len(recorder.log)
            run(_bound(program, directory), directory, recorder=recorder)
        log = recorder.log
        at = [n + 1 for n in range(begun, len(log)) if isinstance(log[n], Acknowledged)]
        report = cut_power(log, check, at=at, enough=1)
        tried += report.tried
        problems += [f"killed after {first.calls[-2]}: {problem}" for problem in report.problems]


def cut_power(
    log: Sequence[Op], check: Check, *, at: Sequence[int] | None = None, enough: int = 20
) -> Report:
    """Check every state that a power cut may leave after each op of the log, or only after the ops of `at`.

    The function stops when `enough` problems are found.
    """
    problems: list[str] = []
    tried = 0
    for cut in power_cuts(log, at=at):
        if len(problems) >= enough:
            break
        tried += 1
        with scratch() as base:
            directory = base / "found"
            directory.mkdir()
            build(cut.tree, directory)
            lost = ", ".join(str(change)[:80] for change in cut.lost)
            where = f"power cut after op {cut.after}, lost [{lost}], said {cut.acknowledged[-1:]}"
            problems += [f"{where}: {p}" for p in _checked(check, directory, cut.acknowledged)]
    return Report(tried, (), tuple(problems))


def report_of(program: Path, *arguments: str) -> Report:
    """Run a file of crash programs in its own process and return the report that it prints.

    The tracer waits for every child of its process, so that process must have no other children. Raises
    AssertionError with the file's stderr if it fails.
    """
    done = subprocess.run(
        [sys.executable, str(program), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise AssertionError(f"{program.name} {arguments}: {done.stderr}")
    found = json.loads(done.stdout)
    return Report(found["tried"], tuple(found["calls"]), tuple(found["problems"]))


def in_child(check: Check, directory: Path, acknowledged: Sequence[str]) -> list[str]:
    """Return the problems that `check` finds in a child process."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with open(writes, "w") as answer:
                json.dump(_checked(check, directory, acknowledged), answer)
        finally:
            os._exit(0)
    os.close(writes)
    with open(reads) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    found: list[str] = json.loads(text or '["the check ended without an answer"]')
    return found


def _checked(check: Check, directory: Path, acknowledged: Sequence[str]) -> list[str]:
    try:
        return check(directory, acknowledged)
    except Exception:  # noqa: BLE001 - any exception of a restore is a problem of this crash
        return [traceback.format_exc(limit=-3)]


def _bound(
    program: Callable[[Path, Announce], None], directory: Path
) -> Callable[[Announce], None]:
    return lambda announce: program(directory, announce)


def _quietly(prepare: Callable[[Path], None], directory: Path) -> Callable[[Announce], None]:
    return lambda _: prepare(directory)


@contextmanager
def beside(directory: Path) -> Iterator[Path]:
    """Yield a directory that stands for a program's memory.

    It lies outside the watched directory and is removed with the test if the program is killed.
    """
    with tempfile.TemporaryDirectory(prefix="memory-", dir=directory.parent) as found:
        yield Path(found)


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a temporary directory, in memory where /dev/shm exists.

    The tests simulate power cuts, so the files need no real disk.
    """
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="holdfast-crash-", dir=parent) as directory:
        yield Path(directory)
