"""`make bench-scale`: one operator and the jobs of a whole cluster.

The results are written to results/scale.json, with a page and a chart beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Figure, merged, read, write
from benchmarks.scale import cases, chart
from benchmarks.scale.bed import Bed
from benchmarks.scale.page import page
from holdfast_core.net import use_small_read_buffers

NAME = "scale"
CASES = ("idle", "start", "failures", "nodes", "outage", "all", "two")
FULL_PODS = 10_000
TWO_JOBS = 200
"""Jobs of the case *two*, which has a bed of its own. With two operators and 10,000 sidecars, two cores are
too busy for the nodes to renew their leases, and nodes that are not lost count as lost."""


async def measure(folder: Path, options: argparse.Namespace) -> None:
    chosen = options.only.split(",") if options.only else list(CASES)
    together = [name for name in chosen if name != "two"]
    if together:
        await _measure(folder, options, options.jobs, together)
    if "two" in chosen:
        await _measure(folder, options, min(options.jobs, TWO_JOBS), ["two"])


async def _measure(folder: Path, options: argparse.Namespace, jobs: int, chosen: list[str]) -> None:
    """Run these cases one after the other on one bed."""
    workers, seconds = options.workers, options.seconds
    async with Bed(folder, jobs, workers, -(-jobs * workers // options.pods_per_node)) as bed:
        operator = bed.operator()
        operator.start()
        _note(options, jobs, await cases.create(bed, operator))
        run: dict[str, Callable[[], Awaitable[list[Figure]]]] = {
            "idle": lambda: cases.steady(bed, operator, seconds),
            "start": lambda: cases.cold_start(bed, operator, seconds),
            "failures": lambda: cases.failures(bed, operator),
            "all": lambda: cases.catastrophe(bed, operator),
            "two": lambda: cases.two_operators(bed, operator),
            "nodes": lambda: cases.returning_nodes(bed, operator, min(jobs, 1000)),
            "outage": lambda: cases.outage(bed, operator, options.outage_seconds),
        }
        for name in chosen:
            _note(options, jobs, await run[name]())
            if not operator.is_running():
                raise RuntimeError(
                    f"the operator has ended in case {name!r}, see its log in {folder}"
                )


def _note(options: argparse.Namespace, jobs: int, found: list[Figure]) -> None:
    """Show the figures of a bed of so many jobs, and write them if the run is of the full size.

    The ids of figures of a smaller bed name its size.
    """
    if jobs * options.workers < FULL_PODS:
        size = f"{jobs} x {options.workers}"
        found = [replace(figure, id=f"{figure.id} ({size})") for figure in found]
    for figure in found:
        print(f"  {figure.id}: {figure.value} {figure.unit} {figure.details}", flush=True)
    if options.jobs * options.workers >= FULL_PODS or options.write:
        figures = merged(read(NAME), found)
        path = write(NAME, figures)
        path.with_suffix(".md").write_text(page(figures))
        chart.draw(path.with_suffix(".png"), figures)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=10, help="workers of each job")
    parser.add_argument("--pods-per-node", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of an idle time")
    parser.add_argument("--outage-seconds", type=float, default=600.0)
    parser.add_argument("--only", default="", help=f"cases of {','.join(CASES)}; all by default")
    parser.add_argument("--keep", type=Path, help="keep the logs in this folder")
    parser.add_argument(
        "--write", action="store_true", help="write the results of a smaller bed, too"
    )
    options = parser.parse_args(arguments)
    use_small_read_buffers()  # for the connections of the sidecars, all of which are in this process
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        asyncio.run(measure(folder, options))
    found = read(NAME)
    return 1 if any(f.ok is False for f in found) else 0


if __name__ == "__main__":
    sys.exit(main())
