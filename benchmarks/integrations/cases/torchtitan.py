"""torchtitan, beside its own manager in asynchronous mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.integrations.case import SCRIPTS, Blocked, Case
from benchmarks.integrations.timed import timed

SAVES = 8


def _blocked(folder: Path) -> Blocked:
    import torch
    import torch.distributed as dist
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    from holdfast.integrations.torchtitan import HoldfastCheckpointManager

    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(10)))
    adamw = default_adamw()
    adamw.implementation = "for-loop"
    optimizers = adamw.build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=2)
    schedulers = schedule.build(optimizers=optimizers, training_steps=SAVES + 1)
    common: dict[str, Any] = {"enable": True, "interval": 1, "last_save_model_only": False}

    def built(config: Any) -> Any:
        return config.build(
            dataloader=schedulers,  # any object with a state_dict
            model_parts=[model],
            optimizers=optimizers,
            lr_schedulers=schedulers,
            states={},
            sd_adapter=None,
            base_folder=str(folder),
        )

    mine = built(HoldfastCheckpointManager.Config(folder="ours", **common))
    its = built(
        CheckpointManager.Config(folder="theirs", keep_latest_k=0, async_mode="async", **common)
    )
    mine.load()
    seconds: dict[Any, list[float]] = {mine: [], its: []}
    for step in range(1, SAVES + 2):
        model(torch.rand(2, 1024)).square().mean().backward()
        optimizers.step()
        optimizers.zero_grad()
        for manager in (mine, its):
            with timed(seconds[manager]):
                manager.save(step)
            manager.maybe_wait_for_saving()
    mine.close()
    its.close()
    dist.destroy_process_group()
    bytes_ = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    return Blocked(seconds[mine][1:], seconds[its][1:], bytes_)


CASE = Case(
    name="torchtitan",
    distribution="torchtitan",
    lines=2,
    script=SCRIPTS / "page_of_one_rank.py",
    arguments=("torchtitan.md",),
    preload=("torchtitan.components.optimizer", "holdfast.integrations.torchtitan"),
    theirs='CheckpointManager(async_mode="async")',
    blocked=_blocked,
)
