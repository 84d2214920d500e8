"""With DDP and FSDP2, the time of the collectives of a step belongs to the step timing of no rank.

The test's clock moves by a thousand seconds at each collective. A measurement that contains one is wrong by
at least as much.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import zygote

PROGRAM = """
import json, sys
import torch, torch._dynamo  # DDP imports it at its first use
from torch import distributed as dist, nn
from torch.utils._python_dispatch import TorchDispatchMode
from tests.support.clock import ManualClock
from holdfast.training.step_timing import FEWEST_STEPS, WARM_UP_STEPS, StepTiming

kind, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
clock = ManualClock()
seconds = 3.0 if rank == 1 else 1.0
collectives = 0

class Collectives(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        global collectives
        if function.namespace == "c10d":
            collectives += 1
            clock.advance(1000.0)
        return function(*args, **(kwargs or {}))

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(1))  # DDP broadcasts it before each forward pass

    def forward(self, x):
        clock.advance(seconds)
        return torch.relu(self.linear(x))

model = nn.Sequential(Layer(), Layer(), Layer())
if kind == "ddp":
    net = nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    net = fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
work = StepTiming(clock.monotonic)
work.watch({"model": net})
with Collectives():
    for _ in range(1 + WARM_UP_STEPS + FEWEST_STEPS):
        clock.advance(10.0 * seconds)
        net(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        work.finished()
found = work.found
print(json.dumps([found.input_seconds, found.forward_seconds, found.parameters, collectives]))
dist.destroy_process_group()
"""


@pytest.mark.fault("A rank is slower than the others (its forward passes, its batches)")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_the_waits_for_other_ranks_do_not_count(tmp_path: Path, kind: str) -> None:
    ranks = [
        zygote.Popen(
            [sys.executable, "-c", PROGRAM, kind, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    fast, slow = (json.loads(output) for output in outputs)
    assert fast[3] > 0 and slow[3] > 0, "the program has seen the collectives"
    assert fast[:3] == [10.0, 3.0, 3 * 72]
    assert slow[:3] == [30.0, 9.0, 3 * 72]
