"""accelerate, beside `Accelerator.save_state`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.integrations.case import SCRIPTS, Blocked, Case

SAVES = 8


def _blocked(folder: Path) -> Blocked:
    import torch
    from accelerate import Accelerator

    from benchmarks.integrations.timed import TimedCheckpointer, timed
    from holdfast.integrations.accelerate import AcceleratorRun

    torch.manual_seed(1)
    accelerator, alone = Accelerator(cpu=True), Accelerator(cpu=True)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(10)))
    optimizer = torch.optim.AdamW(model.parameters())
    trained, stepping = accelerator.prepare(model, optimizer)
    alone.prepare(model, optimizer)  # the Accelerator of an AcceleratorRun refuses save_state
    theirs: list[float] = []
    with TimedCheckpointer(folder / "ours", interval_steps=1) as ckpt:
        run = AcceleratorRun(accelerator, ckpt)
        run.restore()
        ckpt.restore_rng()  # instead of run.batches(loader): the batches are drawn here
        for step in range(1, SAVES + 2):
            accelerator.backward(trained(torch.rand(2, 1024)).square().mean())
            stepping.step()
            stepping.zero_grad()
            run.after_step(step, SAVES + 1)
            with timed(theirs):
                alone.save_state(str(folder / "theirs"))
    bytes_ = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    return Blocked(ckpt.seconds[1:], theirs[1:], bytes_)


CASE = Case(
    name="accelerate",
    distribution="accelerate",
    lines=8,
    script=SCRIPTS / "accelerate_loop.py",
    arguments=("stateful",),
    preload=("holdfast.integrations.accelerate", "deepspeed", "torchdata.stateful_dataloader"),
    theirs="Accelerator.save_state",
    blocked=_blocked,
)
