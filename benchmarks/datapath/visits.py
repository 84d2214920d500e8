"""Runs visits one at a time and converts every outcome, including failures, to a record."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.datapath.parts import Part, Participant, another_round, turns
from benchmarks.datapath.visit import RESULT, Options

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "benchmarks" / "peers"
PEERS_PYTHON = PEERS / ".venv" / "bin" / "python"


@dataclass(frozen=True, slots=True)
class Record:
    """The result of one visit, or the reason why there is none."""

    part: str
    round: int
    name: str
    result: dict[str, Any] | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    directory: Path
    """A directory on the disk that is measured. Only folders that the run has made below it are removed."""
    mib: int
    rounds: int
    loop_seconds: float
    timeout_seconds: float
    log: Callable[[str], None]
    budget_seconds: float | None = None
    """Time limit of one part. No round begins that would exceed it."""


def visit_part(run: Run, part: Part, store: dict[str, str] | None = None) -> list[Record]:
    """Run all rounds of a part.

    A participant that failed in the first round is not tried again, to save time: it is not installed or
    does not support this operation here.
    """
    records: list[Record] = []
    given_up: set[str] = set()
    part_began = time.monotonic()
    for round_ in range(run.rounds):
        if not another_round(round_, time.monotonic() - part_began, run.budget_seconds):
            run.log(f"  {part.name}: {round_} of {run.rounds} rounds, the time is up")
            break
        for participant in turns(part.participants, round_):
            if participant.name in given_up:
                continue
            began = time.monotonic()
            record = _visit(run, part, participant, round_, store)
            records.append(record)
            words = f"FAILED: {record.error}" if record.error else ""
            run.log(
                f"  {part.name} {round_ + 1}/{run.rounds} {participant.name}: "
                f"{time.monotonic() - began:.0f} s {words}".rstrip()
            )
            if record.error and round_ == 0:
                given_up.add(participant.name)
    return records


def _visit(
    run: Run, part: Part, participant: Participant, round_: int, store: dict[str, str] | None
) -> Record:
    directory = run.directory / "visit"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    options = Options(
        participant.kind,
        participant.name,
        participant.module,
        str(directory),
        run.mib,
        part.repetitions,
        run.loop_seconds,
        check=round_ == 0,
        store=store,
    )
    python = str(PEERS_PYTHON) if participant.own_environment else sys.executable
    log = run.directory / f"{part.name}-{participant.name}.log"
    try:
        result = _call(python, options, log, run.timeout_seconds)
        return Record(part.name, round_, participant.name, result)
    except VisitError as error:
        return Record(part.name, round_, participant.name, None, str(error))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class VisitError(Exception):
    """A participant failed. The results contain the message."""


def _call(python: str, options: Options, log: Path, timeout_seconds: float) -> dict[str, Any]:
    if not Path(python).exists():
        raise VisitError(
            f"{python} does not exist: `make bench-peers` creates the environment of the peers "
            "from its lock"
        )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": options.directory}
    # The output is a file, because a process that a participant leaves behind would keep a pipe open.
    with log.open("wb") as errors, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [python, "-m", "benchmarks.datapath.visit", json.dumps(asdict(options))],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired as error:
            raise VisitError(f"not done after {timeout_seconds:g} s; its log is {log}") from error
        finally:
            # Processes that a participant left behind would disturb the next one.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        said = output.read().decode(errors="replace")
    return parse_result(said, log.read_text(errors="replace"))


def parse_result(output: str, errors: str) -> dict[str, Any]:
    """Parse the RESULT line. Raises VisitError with the last lines of stderr where it is missing."""
    for line in reversed(output.splitlines()):
        if line.startswith(RESULT):
            result: dict[str, Any] = json.loads(line.removeprefix(RESULT))
            return result
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    raise VisitError(lines[-1][:400] if lines else "it ended without a result and without output")
