"""A peer's rank that saves with torch.save to an S3 store, and loads the file of the newest step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.recovery.peers.s3 import download, upload
from benchmarks.recovery.peers.training import name_latest, rank, train

_FILE = "/tmp/state.pt"


class TorchSave:
    def save(self, step: int, state: dict[str, Any]) -> None:
        torch.save(state, _FILE)
        upload(_FILE, f"{step}-{rank()}.pt")
        dist.barrier()
        if rank() == 0:
            name_latest(step)

    def load(self, step: int, state: dict[str, Any]) -> None:
        if not download(f"{step}-{rank()}.pt", _FILE):
            raise FileNotFoundError(f"the store has no file of rank {rank()} for step {step}")
        state.update(torch.load(_FILE))


if __name__ == "__main__":
    train(TorchSave())
