"""Programs for crash tests: a prune of a folder and of a store in a directory.

usage: prune_crash_programs.py folder|store

The program prints a report as JSON. It must be a process of its own, because a tracer waits for all of its
children.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tests.support.crash.crash import Report, beside, kill_at_every_call
from tests.support.crash.traced import Announce
from tests.support.shards.folders import write_checkpoint
from tests.support.shards.placements import Tensor
from tests.support.tiers.stored_checkpoints import store_step, values

import holdfast
from holdfast.reading.opening import verify
from holdfast_core.errors import HoldfastError
from holdfast_core.retention import RetentionPolicy
from holdfast_core.store.directory import DirectoryObjectStore
from holdfast_core.store.tier import ObjectTier

STEPS = (1, 2, 3, 4)
KEPT = (3, 4)
PINNED = 1


def fill_folder(directory: Path) -> None:
    for step in STEPS:
        data = np.full(2000, step, np.float32)
        write_checkpoint(
            directory / "place", {"w": (Tensor("F32", data.shape, [0]), data)}, [2], step=step
        )


def fill_store(directory: Path) -> None:
    """Fill a store in which each step refers to objects of the one before."""
    place = directory / "place"
    place.mkdir()
    same = {"whole": values(1)["whole"]}
    with closing(ObjectTier(DirectoryObjectStore(place))) as tier, beside(directory) as memory:
        made = [store_step(tier, memory, 1, values(1))]
        for step in STEPS[1:]:
            made.append(store_step(tier, memory, step, {**values(step), **same}, base=made[-1]))
        for one in made:
            one.close()


def prune_folder(directory: Path, announce: Announce) -> None:
    with holdfast.open(directory / "place") as found:
        found.pin(PINNED)
        announce("pinned")
    prune(directory, announce)


def prune(directory: Path, announce: Announce) -> None:
    with holdfast.open(directory / "place") as found:
        plan = found.plan_prune(RetentionPolicy(len(KEPT)))
        found.prune(plan, lambda one: announce(f"gone {one.checkpoint.step}"))


def check(directory: Path, said: Sequence[str]) -> list[str]:
    """Return what is wrong after a kill.

    Each checkpoint that exists is whole, those that the policy keeps exist, no acknowledged deletion comes
    back, and a second prune completes the first.
    """
    problems = whole(directory)
    with holdfast.open(directory / "place") as found:
        steps = set(found.steps())
        gone = {int(text.split()[1]) for text in said if text.startswith("gone")}
        if not steps >= set(KEPT) or steps & gone:
            problems.append(f"steps {sorted(steps)} are left; {sorted(gone)} were gone")
        if "pinned" in said and PINNED not in steps:
            problems.append("the pinned step was deleted")
        found.prune(found.plan_prune(RetentionPolicy(len(KEPT))))
        expected = {*KEPT, PINNED} if "pinned" in said else set(KEPT)
        if not set(KEPT) <= set(found.steps()) <= expected | {PINNED}:
            problems.append(f"the second prune left {found.steps()}")
    return problems + whole(directory)


def whole(directory: Path) -> list[str]:
    problems: list[str] = []
    with holdfast.open(directory / "place") as found:
        for step in found.steps():
            try:
                report = verify(directory / "place", step)
            except HoldfastError as error:
                problems.append(f"step {step}: {error}")
            else:
                problems += [f"step {step}: {bad.part}: {bad.message}" for bad in report.bad]
    return problems


def main(what: str) -> Report:
    if what == "folder":
        return kill_at_every_call(fill_folder, prune_folder, check)
    return kill_at_every_call(fill_store, prune, check)


if __name__ == "__main__":
    print(json.dumps(asdict(main(*sys.argv[1:]))))
