"""DCP, beside its own `async_save`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.integrations.case import SCRIPTS, Blocked, Case
from benchmarks.integrations.timed import timed

SAVES = 8


def _blocked(folder: Path) -> Blocked:
    import warnings

    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import async_save

    import holdfast
    from holdfast.integrations import dcp

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(10)))
    optimizer = torch.optim.AdamW(model.parameters())
    ours: list[float] = []
    theirs: list[float] = []
    with holdfast.Checkpointer(folder / "ours", interval_steps=1, when_busy="wait") as ckpt:
        for step in range(1, SAVES + 2):
            model(torch.rand(2, 1024)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optim": moments, "step": step}
            with timed(ours):
                ours_done = dcp.async_save(state, storage_writer=dcp.StorageWriter(ckpt, step))
            ours_done.result()
            with timed(theirs):
                theirs_done: Any = async_save(state, checkpoint_id=folder / "theirs", no_dist=True)
            theirs_done.result()
    bytes_ = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    return Blocked(ours[1:], theirs[1:], bytes_)


CASE = Case(
    name="dcp",
    distribution="torch",
    lines=6,
    script=SCRIPTS / "page_of_one_rank.py",
    arguments=("dcp.md",),
    preload=("torch.distributed.fsdp", "holdfast.integrations.dcp"),
    theirs="torch.distributed.checkpoint.async_save",
    blocked=_blocked,
)
