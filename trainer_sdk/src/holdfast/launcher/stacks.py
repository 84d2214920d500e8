"""Find out where ranks are that finish no step: their Python stacks, without extra rights (ADR 0014).

 1. The fork server registers faulthandler for STACK_SIGNAL in each rank, with a file in memory that launcher
    and rank share. Its handler is C code: it runs although the main thread waits in a collective.
 2. The launcher sends the signal a few times and reads what the handler wrote.
 3. A rank is at work if its main thread was in different places, or if its process was at work by /proc. A
    loop of one line, a long call into C, a program that the rank has started and a download do not move the
    innermost Python frame. They use a processor, read or write, or are woken again and again. A rank that
    waits in torch for others is not at work.

A rank that does not catch the signal, such as a program that is no Python script, does not get it: the signal
would end it. One whose process is stopped could not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.ids import Rank
from holdfast_core.messages.schema import RankStack

BUSY_SECONDS = 0.03
"""Processor time between two samples from which on a process is at work. Threads that only renew a connection
use less in two seconds."""
BUSY_BYTES = 16 * 1024
"""Bytes read or written between two samples from which on a process is at work."""
BUSY_WAKES = 20
"""Wakes of the main thread between two samples from which on it is at work. Each request for a stack costs
a few."""
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_MOST_PROCESSES = 256
"""Number of children, with theirs, that are measured at most."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What a process and its children have used since they began. Of children that have ended, too."""

    cpu_seconds: float
    read_and_written_bytes: int
    wakes: int
    """How often the main thread of the process has left a processor."""
    runs: bool
    """Whether the main thread, or that of a child, runs or is ready to run now."""


def measure(pid: int) -> Activity:
    """Return the sums of the process and its children. What cannot be read counts as nothing."""
    cpu, bytes_, runs = 0.0, 0, False
    for number in _with_children(pid):
        folder = Path(f"/proc/{number}")
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The second field is a name in parentheses, which may contain spaces.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            runs = runs or fields[0] == "R"
            cpu += sum(map(int, fields[11:15])) / _TICKS_PER_SECOND
        with contextlib.suppress(OSError, ValueError):
            known = dict(_lines(folder / "io"))
            bytes_ += int(known.get("rchar", 0)) + int(known.get("wchar", 0))
    wakes = 0
    with contextlib.suppress(OSError, ValueError):
        known = dict(_lines(Path(f"/proc/{pid}/status")))
        for kind in ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"):
            wakes += int(known.get(kind, 0))
    return Activity(cpu, bytes_, wakes, runs)


def is_at_work(before: Activity, after: Activity, own_bytes: int) -> bool:
    """Return whether a process was at work between two measurements some seconds apart.

    Args:
        own_bytes: Bytes that the process has written because the launcher asked for its stack.
    """
    moved = after.read_and_written_bytes - before.read_and_written_bytes - own_bytes
    return (
        after.cpu_seconds - before.cpu_seconds >= BUSY_SECONDS
        or moved >= BUSY_BYTES
        or after.wakes - before.wakes >= BUSY_WAKES
        or (before.runs and after.runs)
    )


def _with_children(pid: int) -> Iterator[int]:
    waiting, seen = [pid], 0
    while waiting and seen < _MOST_PROCESSES:
        number = waiting.pop()
        seen += 1
        yield number
        with contextlib.suppress(OSError, ValueError):
            for task in Path(f"/proc/{number}/task").iterdir():
                waiting.extend(map(int, (task / "children").read_text().split()))


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    for line in path.read_text().splitlines():
        name, found, value = line.partition(":")
        if found:
            yield name, value.strip()


STACK_SIGNAL = signal.SIGRTMIN + 12
"""Real-time signals are free where scripts use SIGUSR1 and SIGUSR2, for example under slurm."""
SAMPLES = 3
"""Number of stacks whose places are compared, to tell a rank that is at work."""
PAUSE_SECONDS = 1.0
"""Time between two stacks."""
ANSWER_SECONDS = 2.0
"""Longest wait for a rank's stack."""
_QUIET_SECONDS = 0.1
"""Time without further bytes after which a stack is complete."""
MAX_STACK_BYTES = 256 * 1024
_FRAMES = 6
_STOPPED = frozenset("Tt")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_WAITING_FILES = ("/torch/distributed/", "/torch/autograd/graph.py", "/torch/cuda/__init__.py")
"""Code in which a rank waits for others: a collective, the backward pass of DDP, or the device."""
_WAITING_FRAMES = 3
"""Number of innermost frames of which one must be in such code."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A rank process whose stack may be requested."""

    rank: Rank
    pid: int
    file: int
    """Descriptor of the file that its handler writes to."""


@dataclass(frozen=True, slots=True)
class LocatedRank:
    """Where a rank is, and what the launcher writes to its log."""

    stack: RankStack
    log: str


async def find(ranks: Sequence[Watched]) -> tuple[LocatedRank, ...]:
    """Return where each rank is. It takes some seconds."""
    return tuple(await asyncio.gather(*(_find_rank(rank) for rank in ranks)))


async def _find_rank(watched: Watched) -> LocatedRank:
    texts: list[str] = []
    before = measure(watched.pid)
    process = _look_at(watched.pid)
    for sample in range(SAMPLES):
        if sample:
            await asyncio.sleep(PAUSE_SECONDS)
        process = _look_at(watched.pid)
        if process.stopped or process.ended:
            break
        if not process.problem:
            texts.append(await _stack_of(watched))
    written = sum(len(text.encode()) for text in texts)
    busy = is_at_work(before, measure(watched.pid), written)
    if process.stopped or process.ended:
        stack = RankStack(watched.rank, process.problem, False, stopped=process.stopped)
        return LocatedRank(stack, process.problem)
    known = [text for text in texts if text]
    if not known:
        problem = process.problem or (
            f"it has written no stack within {ANSWER_SECONDS:g} s, in state {process.state}"
        )
        return LocatedRank(RankStack(watched.rank, problem, False, moves=busy), problem)
    places = [main_thread(text) for text in known]
    last = places[-1]
    waits = any(part in frame for frame in last[:_WAITING_FRAMES] for part in _WAITING_FILES)
    # A rank that waits for others may use a processor all the same: a wait for a device spins.
    moves = any(place != last for place in places) or (busy and not waits)
    return LocatedRank(RankStack(watched.rank, shortened(last), True, waits, moves), known[-1])


@dataclass(frozen=True, slots=True)
class _Process:
    """State of a process by /proc, and why it cannot write its stack ("": it can)."""

    state: str
    problem: str = ""
    stopped: bool = False
    ended: bool = False


def _look_at(pid: int) -> _Process:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return _Process("", "its process has ended", ended=True)
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    state = fields.get("State", "?").strip()
    if state[0] in _STOPPED:
        return _Process(state, f"its process is stopped, in state {state}", stopped=True)
    caught = int(fields.get("SigCgt", "0").strip(), 16)
    if not caught & 1 << (STACK_SIGNAL - 1):
        text = f"it is no Python script of this launcher; its process is in state {state}"
        return _Process(state, text)
    return _Process(state)


async def _stack_of(watched: Watched) -> str:
    """Return what the rank writes after the signal, or "" if it writes nothing in time."""
    os.ftruncate(watched.file, 0)
    os.lseek(watched.file, 0, os.SEEK_SET)  # the rank's handler writes at the same position
    seen = 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(watched.pid, STACK_SIGNAL)
    waited = 0.0
    while waited < ANSWER_SECONDS:
        await asyncio.sleep(_QUIET_SECONDS)
        waited += _QUIET_SECONDS
        size = os.fstat(watched.file).st_size
        if size == seen > 0:
            break
        seen = size
    return os.pread(watched.file, MAX_STACK_BYTES, 0).decode(errors="replace")


def main_thread(text: str) -> tuple[str, ...]:
    """Return the frames of the main thread, innermost first. faulthandler writes that thread last."""
    frames: list[str] = []
    for line in text.splitlines():
        found = _FRAME.fullmatch(line)
        if found is not None:
            frames.append(f"{found['function']} ({found['file']}:{found['line']})")
        elif "most recent call first" in line:
            frames = []
    return tuple(frames)


def shortened(frames: Sequence[str]) -> str:
    """Return the innermost frames as one line, without the folders of files."""
    return " < ".join(re.sub(r"\(.*/", "(", frame) for frame in frames[:_FRAMES])
