"""The loop of a peer's rank: it loads the newest checkpoint that the store names, and trains for ever.

Each rank has a tensor of its own of STATE_MIB, and saves every INTERVAL steps. Rank 0 prints a line of JSON a
step, which the benchmark reads from the pod's log.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks.recovery.peers.s3 import download, s3

INTERVAL = 20
LATEST = "latest"
"""Key of the object that holds the number of the newest step that all ranks have saved."""


class Checkpoints(Protocol):
    """How a peer saves and loads."""

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save this rank's part. All ranks call it at the same step."""

    def load(self, step: int, state: dict[str, Any]) -> None:
        """Load this rank's part into `state`."""


def rank() -> int:
    return int(os.environ["JOB_COMPLETION_INDEX"])


def name_latest(step: int) -> None:
    """Name the step that a restart loads. Rank 0 calls it when all ranks have saved the step."""
    s3("PUT", LATEST, str(step).encode())


def _latest() -> int | None:
    file = "/tmp/latest"
    if not download(LATEST, file):
        return None
    with open(file) as found:
        return int(found.read())


def train(checkpoints: Checkpoints) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        rank=rank(),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=120),
    )
    ballast = torch.zeros(int(os.environ["STATE_MIB"]) << 18)
    state: dict[str, Any] = {"step": 0, f"ballast{rank()}": ballast}
    if (step := _latest()) is not None:
        checkpoints.load(step, state)
    began, base = time.time(), state["step"]
    while True:
        dist.all_reduce(torch.ones(1))
        state[f"ballast{rank()}"].add_(1.0)
        time.sleep(0.05)
        state["step"] += 1
        if rank() == 0:
            print(json.dumps({"began": began, "base": base, "step": state["step"]}), flush=True)
        if state["step"] % INTERVAL == 0:
            checkpoints.save(state["step"], state)
