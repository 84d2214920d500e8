"""DeepSpeed with ZeRO stage 1, beside `engine.save_checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.integrations.case import SCRIPTS, Blocked, Case

SAVES = 8
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def _blocked(folder: Path) -> Blocked:
    import os

    import torch
    import torch.distributed as dist
    from tests.support.frameworks import deepspeed_cpu

    from benchmarks.integrations.timed import TimedCheckpointer, timed
    from holdfast.integrations.deepspeed import HoldfastEngine

    os.environ["LOCAL_RANK"] = "0"  # DeepSpeed asks for it
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)

    def engine_of(seed: int) -> Any:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(10)))
        optimizer = torch.optim.AdamW(model.parameters())
        initialize: Any = deepspeed_cpu.deepspeed.initialize
        engine, *_ = initialize(model=model, optimizer=optimizer, config=CONFIG)
        return engine

    mine, its = engine_of(1), engine_of(1)
    ours: list[float] = []
    theirs: list[float] = []
    with TimedCheckpointer(folder / "ours", interval_steps=1) as ckpt:
        saver = HoldfastEngine(mine, ckpt)
        for _ in range(SAVES + 1):
            for engine in (mine, its):
                engine.backward(engine(torch.rand(2, 1024).bfloat16()).float().square().mean())
                engine.step()
            ckpt.settle()
            with timed(ours):
                saver.step_done()
            with timed(theirs):
                its.save_checkpoint(str(folder / "theirs"), tag="last")
    parameters = sum(p.numel() for p in mine.module.parameters())
    dist.destroy_process_group()
    # bf16 parameters, and fp32 parameters with two moments
    return Blocked(ours[1:], theirs[1:], 14 * parameters)


CASE = Case(
    name="deepspeed",
    distribution="deepspeed",
    lines=7,
    script=SCRIPTS / "page_of_one_rank.py",
    arguments=("deepspeed.md",),
    preload=(
        "tests.support.frameworks.deepspeed_cpu",
        "holdfast.integrations.deepspeed",
        "deepspeed.runtime.zero.muon.muon_optimizer",
    ),
    theirs="engine.save_checkpoint",
    blocked=_blocked,
)
