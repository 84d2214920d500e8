"""L3: the processor time of one rank for a state of very many small tensors.

The state is a module with AdamW. Its tensors have 64 elements each, so that their bytes cost nearly nothing.
Prints one JSON line with the seconds of processor time of the training thread:
 * first_read, second_read, read: reading the state at the first save, at the second (which also records the
   structure), and at each later one.
 * plan: the layout of the payload, once for a structure.
 * first_copy, copy: copying the tensors into a slot, at the first save and at each later one.
 * parse, load: what a restore does with the payload.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from holdfast.state.load import load_state
from holdfast.state.snapshot import PayloadTarget, Snapshots, plan_save, read_payload
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
    timed("first_copy", lambda: target.write(first, run))
    timed("second_read", lambda: snapshots.take(state))
    third = timed("read", lambda: snapshots.take(state))
    timed("copy", lambda: target.write(third, run))
    saved = timed("parse", lambda: read_payload(memory))
    timed("load", lambda: load_state(state, saved))
    print(json.dumps({"tensors": tensors, "seconds": seconds}))


if __name__ == "__main__":
    main()
