"""`make bench` writes section A to results/datapath.{json,md,png}; `make bench-quick` measures less.

`bench-quick` compares only Holdfast and torch DCP. Each part is written when it is finished. `--only A1,A2`
measures these parts again and keeps the other results, so a long run can be split. The exit code is 1 where
a target was missed. A figure that was not measured is reported as such and does not count as passed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.datapath import figures as of
from benchmarks.datapath import page
from benchmarks.datapath.chart import draw
from benchmarks.datapath.noise import Noise
from benchmarks.datapath.ours import STORES, NoStoreError
from benchmarks.datapath.parts import FULL, QUICK, Part, chosen
from benchmarks.datapath.visits import ROOT, Record, Run, visit_part
from benchmarks.report import Figure
from holdfast_core.clock import SystemClock

_QUICK_PART_SECONDS = 55.0
"""Limits three parts to less than three minutes. A busy machine completes fewer rounds."""


def main() -> int:
    arguments = _parsed()
    only = [id_.strip().upper() for id_ in arguments.only.split(",") if id_.strip()]
    name = "datapath-quick" if arguments.quick else "datapath"
    with _alone(arguments.directory):
        run = Run(
            arguments.directory,
            arguments.mib,
            arguments.rounds,
            arguments.loop_seconds,
            arguments.timeout,
            _log,
            _QUICK_PART_SECONDS if arguments.quick else None,
        )
        fresh: list[Figure] = []
        parts = chosen(QUICK if arguments.quick else FULL, only)
        for number, part in enumerate(parts, 1):
            _log(f"{part.name} ({number}/{len(parts)}): {', '.join(part.ids)}")
            fresh += _measure(run, part)
            _write(name, fresh, keep=bool(only) or number < len(parts))
        if not arguments.quick:
            fresh += of.unmeasured(only)
        shown = _write(name, fresh, keep=bool(only))
    print(page.verdicts(shown))
    print(f"written: {report.RESULTS / name}.json, .md and .png")
    return 1 if any(figure.ok is False for figure in fresh) else 0


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.datapath")
    parser.add_argument(
        "--quick", action="store_true", help="Holdfast and torch DCP: A1, A2, A3, A8"
    )
    parser.add_argument("--only", default="", help="ids, for example A1,A2")
    parser.add_argument("--mib", type=int, help="of the state; 1024, with --quick 256")
    parser.add_argument("--rounds", type=int, help="visits of each participant; 5, --quick 3")
    parser.add_argument("--loop-seconds", type=float, help="of one loop of A3; 3, --quick 1.5")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of one visit")
    parser.add_argument(
        "--directory",
        type=Path,
        default=ROOT / "build" / "bench",
        help="on the disk to measure; needs a few times --mib",
    )
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.mib = arguments.mib or (256 if quick else 1024)
    arguments.rounds = arguments.rounds or (3 if quick else 5)
    arguments.loop_seconds = arguments.loop_seconds or (1.5 if quick else 3.0)
    return arguments


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold a lock on the directory, because two concurrent runs would distort each other's results."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(
                f"another benchmark runs in {directory}: wait for it, or end it"
            ) from None
        yield


def _measure(run: Run, part: Part) -> list[Figure]:
    noise = Noise()
    at = SystemClock().utc_now().strftime("%Y-%m-%d %H:%M UTC")
    try:
        with contextlib.ExitStack() as stack:
            make = STORES.get(part.name)
            store = None if make is None else stack.enter_context(make())
            records = visit_part(run, part, store)
    except NoStoreError as error:
        records = [Record(part.name, 0, p.name, None, str(error)) for p in part.participants]
    about: dict[str, Any] = {
        "part": part.name,
        "at": at,
        "mib": run.mib,
        "rounds": run.rounds,
        "torch": version("torch"),
        **noise.summary(),
    }
    found = of.of_part(part.name, records, run.mib)
    return [replace(figure, details={**figure.details, "run": about}) for figure in found]


def _write(name: str, fresh: Sequence[Figure], *, keep: bool) -> list[Figure]:
    figures = report.merged(report.read(name) if keep else [], fresh)
    path = report.write(name, figures)
    title = "Data path" if name == "datapath" else "Data path, quick run"
    path.with_suffix(".md").write_text(page.page(title, figures))
    draw(path.with_suffix(".png"), title, figures)
    return figures


def _log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
