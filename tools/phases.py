"""Run commands one after another, and print a table of their times.

`python3 tools/phases.py COMMAND...` runs each command, shows its output, and keeps it in
build/phases/NAME.log. The first command that fails ends the run. The table comes last, and after a failure
three lines: which phase failed, its first failure, and where the whole output is.

A phase may run this program itself, as `make test` does. Its phases are then rows below its own, and only
the outermost program prints the table.

It needs nothing but Python's standard library, because it runs before anything is installed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LOGS = Path("build/phases")
RECORD = "HOLDFAST_PHASES"
"""Name of the environment variable with the file of rows, which the outermost program sets."""
_FAILURES = (
    re.compile(r"^(FAILED|ERROR) .*"),  # the summary of pytest
    re.compile(r"^missing: .*"),  # tools/prerequisites.sh
    re.compile(r".*\berror: .*"),  # mypy, uv, the test bed, compilers
    re.compile(r"^\S+:\d+:\d+: .*"),  # ruff
    re.compile(r"^E  .*"),
)
"""Lines that name a failure, the most telling first."""


@dataclass(frozen=True, slots=True)
class Row:
    """One phase that has ended.

    Attributes:
        name: The command without `make`.
        depth: 0 for a phase of the outermost program, 1 for a phase of a phase.
        seconds: How long it ran.
        status: Its exit status. A signal counts as in a shell: 128 and its number.
        command: What a person runs to repeat it.
        log: The file with its output.
    """

    name: str
    depth: int
    seconds: float
    status: int
    command: str
    log: str


def name_of(command: str) -> str:
    return re.sub(r"\W+", "-", command.removeprefix("make ")).strip("-")


def first_failure(output: str) -> str:
    """Return the line of the output that best says what failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for pattern in _FAILURES:
        for line in lines:
            if pattern.match(line):
                return line[:300]
    rest = [line for line in lines if not line.startswith(("make:", "make["))]
    return rest[-1][:300] if rest else "it printed nothing"


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table. A row's phases stand below it, although they ended before."""
    width = max([len("phase"), *(len(row.name) + 2 * row.depth for row in rows)])
    lines = [f"{'phase':{width}}  {'time':>8}  result"]
    for row in nested(rows):
        label = "  " * row.depth + row.name
        result = "passed" if row.status == 0 else f"FAILED ({row.status})"
        lines.append(f"{label:{width}}  {clock(row.seconds):>8}  {result}")
    total = sum(row.seconds for row in rows if row.depth == 0)
    return [*lines, f"{'total':{width}}  {clock(total):>8}"]


def nested(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with each phase before its own phases. They are given in the order of their ends."""
    if not rows:
        return []
    top = min(row.depth for row in rows)
    ordered: list[Row] = []
    inner: list[Row] = []
    for row in rows:
        if row.depth > top:
            inner.append(row)
            continue
        ordered += [row, *nested(inner)]
        inner = []
    return ordered + nested(inner)


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def ending(rows: Sequence[Row]) -> list[str]:
    """Return the three lines for the innermost phase that failed, or none."""
    failed = [row for row in rows if row.status != 0]
    if not failed:
        return []
    row = max(failed, key=lambda one: one.depth)
    log = Path(row.log)
    output = log.read_text(errors="replace") if log.is_file() else ""
    return [
        f"failed:  {row.name}, exit status {row.status}, after {clock(row.seconds)}",
        f"because: {first_failure(output)}",
        f"next:    read {row.log}, then run `{row.command}` again",
    ]


def run(command: str, depth: int) -> Row:
    """Run the command, and copy its output to stdout and to its log."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{name_of(command)}.log"
    print(f"==> {command}", flush=True)
    began = time.monotonic()
    with log.open("wb") as file:
        child = subprocess.Popen(
            shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        # Ctrl-C reaches the child too, which ends by itself. Its last output is still shown. A handler,
        # other than SIG_IGN, is not inherited by the command of the next phase.
        signal.signal(signal.SIGINT, lambda _number, _frame: None)
        signal.signal(signal.SIGTERM, lambda _number, _frame: child.terminate())
        assert child.stdout is not None
        while piece := os.read(child.stdout.fileno(), 1 << 16):
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            file.write(piece)
        status = child.wait()
    if status < 0:
        status = 128 - status
    name = command.removeprefix("make ")
    return Row(name, depth, time.monotonic() - began, status, command, str(log))


def main(commands: Sequence[str]) -> int:
    outermost = RECORD not in os.environ
    record = Path(os.environ.get(RECORD, LOGS / "rows.jsonl")).resolve()
    depth = int(os.environ.get("HOLDFAST_PHASES_DEPTH", "0"))
    if outermost:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text("")
    os.environ |= {RECORD: str(record), "HOLDFAST_PHASES_DEPTH": str(depth + 1)}
    status = 0
    for command in commands:
        row = run(command, depth)
        with record.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        if status := row.status:
            break
    if outermost:
        rows = [Row(**json.loads(line)) for line in record.read_text().splitlines()]
        print("\n".join(["", *table(rows), *ending(rows)]), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
