"""A training of one or two ranks that saves every second step and waits until it is in the store.

usage: train.py STORE TOTAL
"""

from __future__ import annotations

import sys

import torch
from tests.support.frameworks.digest import digest_of
from tests.support.hang import HANG_SECONDS
from torch import distributed

import holdfast


def main() -> None:
    store, total = sys.argv[1], int(sys.argv[2])
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(rank)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 1)
    )
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optim": optimizer, "rng": holdfast.RNG()}
    with holdfast.Checkpointer(holdfast.Folder("ckpt", store=store), when_busy="wait") as ckpt:
        done = ckpt.restore(state) or 0
        for step in range(done + 1, total + 1):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            if step % 2 == 0:
                ckpt.save(step, state).wait("persisted", timeout=HANG_SECONDS)
            if rank == 0:
                print("step", step, flush=True)
    digests = [""] * distributed.get_world_size()
    distributed.all_gather_object(digests, digest_of(model.state_dict().values()))
    if rank == 0:
        print("digest", "-".join(digests), flush=True)
    distributed.destroy_process_group()


main()
