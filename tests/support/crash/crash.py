"""Crash tests: a program is killed at every system call of a save, or the power is cut after it.

Both give problems as sentences; a crash test passes when there are none. `Check` looks at what is
left in a directory, given what the program had said, as a fresh process would.
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

from tests.support.crash.traced import Recorder, Say, Strike, run
from tests.support.crash.write_orders import Op, Said, build, power_cuts

Check = Callable[[Path, Sequence[str]], list[str]]
"""(directory, words that were said) -> problems."""

_NAMES_CHANGE = frozenset({"renameat", "linkat", "unlinkat", "mkdirat"})


@dataclass(frozen=True, slots=True)
class Report:
    tried: int
    """Kills, or different states after a power cut."""
    calls: tuple[str, ...]
    problems: tuple[str, ...]


def kill_at_every_call(
    prepare: Callable[[Path], None],
    program: Callable[[Path, Say], None],
    check: Check,
    *,
    enough: int = 20,
) -> Report:
    """SIGKILL before each call of `program` that would change something in its directory.

    `prepare` fills the directory once, and is not killed. The last run is not killed either. Stops
    when `enough` problems are known.
    """
    return _strike_every_call(prepare, program, check, Strike(1), enough)


def fail_at_every_call(
    prepare: Callable[[Path], None],
    program: Callable[[Path, Say], None],
    check: Check,
    *,
    error: int,
    for_ever: bool = False,
) -> Report:
    """Each of these calls fails once with `error`, or all from it on. `program` has to take it: a
    traceback is a problem."""
    return _strike_every_call(prepare, program, check, Strike(1, error, for_ever), 20)


def _strike_every_call(
    prepare: Callable[[Path], None],
    program: Callable[[Path, Say], None],
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
                problems += [f"{where}: {p}" for p in in_child(check, directory, outcome.said)]
                if not outcome.struck:
                    return Report(strike.at - 1, outcome.calls, tuple(problems))
            shutil.rmtree(directory)
            if len(problems) >= enough:
                return Report(strike.at, (), tuple(problems))
            strike = replace(strike, at=strike.at + 1)


def record(program: Callable[[Path, Say], None], *, ignored: Sequence[str] = ()) -> list[Op]:
    """The log of a program in a directory that is empty at first; see Recorder.ignored."""
    with scratch() as base:
        directory = base / "recorded"
        directory.mkdir()
        recorder = Recorder(directory, tuple(ignored))
        run(_bound(program, directory), directory, recorder=recorder)
        return recorder.log


def cut_power_after_a_restart(
    prepare: Callable[[Path], None],
    program: Callable[[Path, Say], None],
    check: Check,
    *,
    ignored: Sequence[str] = (),
) -> Report:
    """1. `prepare` runs. 2. `program` is killed right after a name changed, before that is durable.
    3. It is started again and runs to its end. 4. The power fails right after something was said.

    What a killed process left is there for everybody to see, and gone with the power.
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
        at = [n + 1 for n in range(begun, len(log)) if isinstance(log[n], Said)]
        report = cut_power(log, check, at=at, enough=1)
        tried += report.tried
        problems += [f"killed after {first.calls[-2]}: {problem}" for problem in report.problems]


def cut_power(
    log: Sequence[Op], check: Check, *, at: Sequence[int] | None = None, enough: int = 20
) -> Report:
    """Every state that a power cut may leave after each op of the log, or after those of `at`;
    stops when `enough` problems are known."""
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
            where = f"power cut after op {cut.after}, lost [{lost}], said {cut.said[-1:]}"
            problems += [f"{where}: {p}" for p in _checked(check, directory, cut.said)]
    return Report(tried, (), tuple(problems))


def report_of(program: Path, *arguments: str) -> Report:
    """What a file of crash programs prints: it runs in a process of its own, whose only children are
    the traced ones. Raises AssertionError with its errors."""
    done = subprocess.run(
        [sys.executable, str(program), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise AssertionError(f"{program.name} {arguments}: {done.stderr}")
    found = json.loads(done.stdout)
    return Report(found["tried"], tuple(found["calls"]), tuple(found["problems"]))


def in_child(check: Check, directory: Path, said: Sequence[str]) -> list[str]:
    """What `check` says in a process of its own."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with open(writes, "w") as answer:
                json.dump(_checked(check, directory, said), answer)
        finally:
            os._exit(0)
    os.close(writes)
    with open(reads) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    found: list[str] = json.loads(text or '["the check ended without an answer"]')
    return found


def _checked(check: Check, directory: Path, said: Sequence[str]) -> list[str]:
    try:
        return check(directory, said)
    except Exception:  # noqa: BLE001 - whatever a restore raises is a problem of this crash
        return [traceback.format_exc(limit=-3)]


def _bound(program: Callable[[Path, Say], None], directory: Path) -> Callable[[Say], None]:
    return lambda say: program(directory, say)


def _quietly(prepare: Callable[[Path], None], directory: Path) -> Callable[[Say], None]:
    return lambda _: prepare(directory)


@contextmanager
def beside(directory: Path) -> Iterator[Path]:
    """For what a program keeps in memory: not watched, and gone with the test if it is killed."""
    with tempfile.TemporaryDirectory(prefix="memory-", dir=directory.parent) as found:
        yield Path(found)


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory in memory where there is one: nothing here has to survive this machine."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="holdfast-crash-", dir=parent) as directory:
        yield Path(directory)
