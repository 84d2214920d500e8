"""`make bench-ranks`: a coordinator's CPU, memory, bytes and time at growing numbers of workers.

The results are written to results/ranks.json, with a page and a chart beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.ranks import chart, page, sweep
from benchmarks.ranks.figures import Phase, rows, verdicts
from benchmarks.ranks.gang import SMALL
from benchmarks.ranks.world import World
from benchmarks.report import merged, read, table, write

NAME = "ranks"
_STORED_RANKS = 128
"""Ranks of each checkpoint in the store that is swept."""


async def measure(folder: Path, workers: int, state: str, commits: int) -> list[Phase]:
    """Run one gang through its phases. Return what each of them cost its coordinator."""
    phases: list[Phase] = []

    async def ended(name: str, wall: float, **details: Any) -> None:
        coordinator = await world.real[0].take()
        member = await world.real[1].take()
        name = name if state == SMALL else f"{state}: {name}"
        phases.append(Phase(workers, name, wall, coordinator, member, details))
        print(
            f"  {workers} workers, {name}: {coordinator['cpu_seconds']:.2f} s of CPU, "
            f"{wall:.2f} s, {coordinator['peak_mib']:.0f} MiB",
            flush=True,
        )

    async with World(folder, workers, state, _free_port()) as world:
        loop = asyncio.get_running_loop()
        for real in world.real:
            await real.take()
        began = loop.time()
        await world.begin(0)
        await ended("round", loop.time() - began)
        played = await world.commit(1)
        await ended("first commit", played["wall_seconds"], local=played["local_seconds"])
        for step in range(2, 2 + commits):
            played = await world.commit(step)
            await ended("steady commit", played["wall_seconds"], local=played["local_seconds"])
        last = 1 + commits
        played = await world.play(do="report", step=last)
        await ended("reports", played["wall_seconds"])
        began = loop.time()
        seen = await world.state()
        await ended("state", loop.time() - began)
        point = seen.last_replicated
        assert point is not None
        seconds = await world.seal(1)
        await ended("inventory after SEAL", max(seconds))
        began = loop.time()
        replaced = workers - 1
        await world.begin(1, point, replaced=(replaced,))
        for real in world.real:
            assert real.rank is not None
            real.rank.progress(last + 1)
        await world.play(do="report", step=last + 1)
        await world.running()
        await ended("one worker replaced", loop.time() - began)
        played = await world.play(do="manifest", worker=replaced, step=last, round=0)
        await ended("manifest and layout", played["wall_seconds"], reply_bytes=played["bytes"])
    return phases


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks")
    parser.add_argument("--workers", default="64,256,1024,4096")
    parser.add_argument("--states", default="llama-70b:256", help="gangs with layouts of models")
    parser.add_argument("--commits", type=int, default=5, help="steady commits of each gang")
    parser.add_argument(
        "--checkpoints",
        type=int,
        default=10_000,
        help="checkpoints of the store that is swept; 0: none",
    )
    parser.add_argument("--keep", type=Path, help="keep the logs of the sidecars in this folder")
    options = parser.parse_args(arguments)
    phases: list[Phase] = []
    stored = [f for f in read(NAME) if sweep.is_figure(f)]
    if options.checkpoints:
        stored = sweep.measure(options.checkpoints, _STORED_RANKS)
        print(table(stored), flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-ranks-") as temporary:
        root = options.keep or Path(temporary)
        sizes = [w for w in options.workers.split(",") if w]
        gangs = [f"{SMALL}:{workers}" for workers in sizes]
        gangs += [gang for gang in options.states.split(",") if gang]
        for gang in gangs:
            state, _, workers = gang.partition(":")
            folder = root / gang.replace(":", "-")
            phases += asyncio.run(measure(folder, int(workers), state, options.commits))
    measured = merged((f for f in read(NAME) if "phase" in f.details), rows(phases))
    found = [*verdicts(measured), *stored, *measured]
    path = write(NAME, found)
    path.with_suffix(".md").write_text(page.page(found))
    chart.draw(path.with_suffix(".png"), found)
    print(page.page(found))
    return 1 if any(f.ok is False for f in found) else 0


if __name__ == "__main__":
    sys.exit(main())
