"""A training with accelerate, tiny and on the CPU: `accelerate_loop.py [OPTION ...]`.

It draws noise before each forward pass, accumulates gradients, and trains more than three passes.

 - `first-steps`, `one-pass`: end after some steps, or after the first pass.
 - `generator`: the loader draws its order from a generator of its own.
 - `looks`: every second step looks at two batches of another loader.
 - `pairs`: a step trains a batch of each of two loaders.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from tests.support.frameworks.digest import digest_of
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.integrations.accelerate import AcceleratorRun

STEPS_OF_A_PASS = 7


class Count:
    """An object of the script's own."""

    def __init__(self) -> None:
        self.seen = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def inputs(run: AcceleratorRun, loader: Any, other: Any, *, pairs: bool) -> Iterator[Any]:
    """Yield the inputs of one pass."""
    if pairs:
        for (x,), (y,) in zip(run.batches(loader), run.batches(other), strict=True):
            yield x + y
    else:
        for (x,) in run.batches(loader):
            yield x


def main(*options: str) -> None:
    total = 3 if "first-steps" in options else STEPS_OF_A_PASS if "one-pass" in options else 24
    holdfast.pin_threads(1)
    set_seed(5)
    config = DataLoaderConfiguration(
        use_stateful_dataloader="stateful" in options,
        use_seedable_sampler="seedable" in options,
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config)
    ranks = accelerator.num_processes
    data = TensorDataset(torch.sin(torch.arange(56 * ranks * 8).float()).view(56 * ranks, 8))
    own = torch.Generator().manual_seed(3) if "generator" in options else None
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=own)
    other = DataLoader(data, batch_size=4, shuffle=True)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=30)
    net, optimizer, loader, other, schedule = accelerator.prepare(
        net, optimizer, loader, other, schedule
    )
    count = Count()
    accelerator.register_for_checkpointing(count)
    with holdfast.Checkpointer("ckpt", interval_steps=1, when_busy="wait") as ckpt:
        run = AcceleratorRun(accelerator, ckpt)
        step = run.restore()
        while step < total and not ckpt.stopping:
            for x in inputs(run, loader, other, pairs="pairs" in options):
                with accelerator.accumulate(net):
                    noise = torch.randn_like(x)
                    accelerator.backward((net(x + noise) - x).square().mean())
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                count.seen += float(x.sum())
                if accelerator.sync_gradients:
                    step += 1
                    print(f"step {step}\n", end="", flush=True)
                    if "looks" in options and step % 2 == 0:
                        for number, (y,) in enumerate(run.batches(other)):
                            count.seen += float((y * torch.rand(())).sum())
                            if number == 1:
                                break
                    if run.after_step(step, total):
                        break
            else:
                count.seen += float(torch.rand(()))  # as an evaluation at the end of a pass draws
    seen = torch.tensor([count.seen, schedule.get_last_lr()[0]], dtype=torch.float64)
    gathered = accelerator.gather(seen)
    digest = digest_of([*accelerator.unwrap_model(net).parameters(), gathered])
    print(f"digest {digest}\n", end="", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
