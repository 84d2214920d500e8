"""Ranks of a gang save the same steps at an interval that is given as a time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.trainer.launched import Launched, committed_step

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]  # many starts of torch

SCRIPT = """
import sys, torch, holdfast
import torch.distributed as dist

dist.init_process_group("gloo")
state = {"weight": torch.ones(4)}
saved, step = [], 0
with holdfast.Checkpointer(sys.argv[1], interval_seconds=1e-9, when_busy="wait") as ckpt:
    # All ranks know after the same step that three saves are done.
    while len(saved) < 3:
        step += 1
        dist.all_reduce(state["weight"].clone())
        if ckpt.should_save(step):
            ckpt.save(step, state)
            saved.append(step)
print("saved", *saved, "interval", ckpt.interval_steps, flush=True)
"""


def test_all_ranks_save_the_same_steps_by_time(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "ckpt"
    command = ["python", str(script), str(folder)]
    with Launched(tmp_path, ["--nproc-per-node", "3"], command) as run:
        assert run.wait() == 0, run.err()
        lines = re.findall(r"\[rank \d\] (saved .*)", run.out())
    assert len(lines) == 3
    (line,) = set(lines)
    steps = [int(word) for word in line.split()[1:4]]
    assert steps == list(range(steps[0], steps[0] + 3))
    assert line.endswith("interval 1")
    assert committed_step(folder) == steps[-1]
