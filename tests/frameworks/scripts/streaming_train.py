"""Trains on a StreamingDataset of mosaicml-streaming, and writes the samples of each step to a file.

`streaming_train.py FOLDER STEPS KILLED_AFTER`: rank 0 kills itself after the step KILLED_AFTER, once.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from streaming import StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from tests.support.hang import HANG_SECONDS

import holdfast

folder, steps, killed_after = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rank = int(os.environ["RANK"])
killed = folder / "killed"
holdfast.pin_threads(1)
dist.init_process_group("gloo")
clean_stale_shared_memory()  # of processes that were killed with their resource tracker
data = StreamingDataset(local=str(folder / "data"), batch_size=4, shuffle=True, shuffle_seed=7)
loader = StreamingDataLoader(data, batch_size=4, num_workers=1)
state = {"model": torch.nn.Linear(1, 1), "data": holdfast.Shared(loader)}
batches = None
last = None
with (
    holdfast.Checkpointer(folder / "ckpt", interval_steps=0) as ckpt,
    (folder / f"seen-{rank}").open("a") as seen,
):
    for step in ckpt.steps(steps, state):
        batch = None if batches is None else next(batches, None)
        if batch is None:  # at the start, after a restore, and after each epoch
            batches = iter(loader)
            batch = next(batches)
        print(json.dumps([step, batch["i"].tolist()]), file=seen, flush=True)
        dist.barrier()
        if step == killed_after - 2:
            last = ckpt.save(step + 1, state)
        if step == killed_after and not killed.exists():
            assert last is not None
            last.wait("local", timeout=HANG_SECONDS)
            dist.barrier()
            if rank == 0:
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    finished = not ckpt.stopping
if finished:
    dist.barrier()
dist.destroy_process_group()
