"""L3: the processor time of one rank for a state of very many small tensors.

The state is a module with AdamW. Its tensors have 64 elements each, so that their bytes cost nearly nothing.
Prints one JSON line with the seconds of processor time of the training thread:
 * first_read, second_read, read: reading the state at the first save, at the second (which also records the
   structure), and at each later one.
 * plan: the layout of the payload, once for a structure.
 * first_copy, copy: copying the tensors into a slot, at the first save into it and at each later one.
 * save: read and copy of a later save, until the garbage collector runs again.
 * parse, load: what a restore from a slot does with the payload.
 * in_place: a whole restore into the tensors of the state, without the reads from a disk.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from holdfast.state.loading.destinations import Destinations
from holdfast.state.loading.load import load_state
from holdfast.state.loading.restore_target import RestoreTarget
from holdfast.state.snapshot import (
    PayloadTarget,
    Snapshots,
    paused_collector,
    plan_save,
    read_payload,
)
from holdfast_core.format.payload import parse_payload
from holdfast_core.ids import Rank

T = TypeVar("T")

ELEMENTS = 64
_MEMBERS = 4
"""A parameter has two moments and a step count in AdamW."""


def make_state(tensors: int) -> dict[str, Any]:
    import torch

    model = torch.nn.Module()
    for number in range(tensors // _MEMBERS):
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(torch.full((ELEMENTS,), float(number)))
        model.add_module(f"layer{number}", layer)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optim.step()
    return {"model": model, "optim": optim}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=100_000)
    tensors = parser.parse_args().tensors
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], T]) -> T:
        began = time.thread_time()
        result = work()
        seconds[name] = round(time.thread_time() - began, 3)
        return result

    def run(jobs: list[tuple[int, Callable[[], object]]]) -> None:
        for _, job in jobs:
            job()

    state = make_state(tensors)
    snapshots = Snapshots(Rank(0))
    first = timed("first_read", lambda: snapshots.take(state))
    plan = timed("plan", lambda: plan_save(first, Rank(0)))
    memory = np.zeros(plan.payload_bytes, np.uint8)
    target = PayloadTarget(plan, memory)
    timed("first_copy", paused_collector()(lambda: target.write(first, run)))
    timed("second_read", lambda: snapshots.take(state))

    # As in a save: the collector pauses until nothing of the state is referenced any more.
    @paused_collector()
    def save() -> None:
        third = timed("read", lambda: snapshots.take(state))
        timed("copy", lambda: target.write(third, run))

    timed("save", save)
    saved = timed("parse", lambda: read_payload(memory))
    timed("load", lambda: load_state(state, saved))

    @paused_collector()
    def in_place() -> None:
        wanted = RestoreTarget(state, snapshots, strict=True)
        head = memory[: len(plan.payload.header)].tobytes()
        parsed = parse_payload(head, plan.payload_bytes)
        objects = memory[parsed.objects.start : parsed.objects.stop].tobytes()
        destinations = Destinations(parsed, objects, wanted.leaves, wanted.classes)
        if not wanted.is_read_in_place() or not wanted.fits(destinations.saved):
            raise AssertionError("the state does not fit its own payload")
        destinations.put(0, memory.data)
        load_state(state, destinations.saved, is_ours=True)

    timed("in_place", in_place)
    print(json.dumps({"tensors": tensors, "seconds": seconds}))


if __name__ == "__main__":
    main()
