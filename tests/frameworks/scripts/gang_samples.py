"""A gang that trains with a GangSampler for some steps: `gang_samples.py STEPS`.

Each rank writes the samples of a step to the file `<first step of the run>-<step>`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from tests.support.frameworks.digest import digest_of
from torch.utils.data import DataLoader

import holdfast
from holdfast.data import GangSampler

SAMPLES, BATCH = 240, 4


def main() -> None:
    torch.distributed.init_process_group("gloo")
    data: Any = torch.arange(SAMPLES)
    sampler = GangSampler(data, seed=5)
    loader = DataLoader(
        data, BATCH, sampler=sampler, num_workers=1, generator=torch.Generator().manual_seed(1)
    )
    model = torch.nn.Linear(1, 1)
    with holdfast.Checkpointer("ckpt", interval_steps=2, when_busy="wait") as ckpt:
        state = {"model": model, "sampler": sampler}
        first = (ckpt.restore(state) or 0) + 1
        for step, batch in enumerate(sampler.follow(loader), first):
            torch.distributed.barrier()
            with Path(f"{first}-{step}").open("a") as file:
                file.write("".join(f"{int(sample)}\n" for sample in batch))
            if ckpt.should_save(step):
                ckpt.save(step, state)
            if os.environ["RANK"] == "0":
                print("step", step, flush=True)
            if step - first + 1 == int(sys.argv[1]):
                break
    if os.environ["RANK"] == "0":
        print("digest", digest_of(model.parameters()))


if __name__ == "__main__":
    main()
