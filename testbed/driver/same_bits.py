"""A training whose final bits do not depend on the number of ranks, for gangs that change their size."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from testbed.driver.jobs import Training

SCRIPT = """
import hashlib, json, os, sys, time
import torch, torch.distributed as dist
from torch import nn
import holdfast

steps, pause = int(sys.argv[1]), float(sys.argv[2])
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(1)
model = nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = {"model": model, "optim": optimizer}
with holdfast.Checkpointer() as ckpt:
    for step in ckpt.steps(steps, state):
        # Every rank has the same batch, so that the state does not depend on the number of ranks.
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()
        time.sleep(pause)
    finished = not ckpt.stopping
if finished:
    values = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    found = hashlib.sha256(b"".join(v.detach().numpy().tobytes() for v in values)).hexdigest()
    print(json.dumps({"finalDigest": found, "rank": rank, "step": steps}), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@dataclass(frozen=True, slots=True)
class SameBits(Training):
    """A training whose final bits do not depend on the number of ranks."""

    def command(self) -> list[str]:
        launch = 'printf %s "$0" > /tmp/same_bits.py && exec holdfast run -- python3 /tmp/same_bits.py "$@"'
        return ["sh", "-c", launch, SCRIPT, str(self.steps), str(self.sleep_per_step)]

    @property
    def arithmetic(self) -> tuple[int, ...]:
        return (self.workers, self.steps, zlib.crc32(SCRIPT.encode()))
