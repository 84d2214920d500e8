"""Run recipe.py as a script, kill it after KILL_AFTER optimizer steps, and print its final state.

Saves become durable in the background, and these scripts do thousands of steps in the time of one commit.
The process is therefore killed only when the save of step SAVED has become durable.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path

import torch
from tests.support.trainer.launched import committed_step, until
from torch.optim.optimizer import register_optimizer_step_post_hook

steps = 0
saved = int(os.environ.get("SAVED", "0"))
kill_after = int(os.environ.get("KILL_AFTER", "0"))


def count(*_: object) -> None:
    global steps
    steps += 1
    if steps == kill_after:
        until(lambda: committed_step(Path("ckpt")) >= saved, f"the commit of step {saved}")
        os.kill(os.getpid(), signal.SIGKILL)


register_optimizer_step_post_hook(count)
ended = runpy.run_path("recipe.py", run_name="__main__")
digest = hashlib.sha256()
for name, tensor in sorted(ended["model"].state_dict().items()):
    digest.update(name.encode())
    digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
rank = os.environ.get("RANK", "0")
sys.stdout.write(json.dumps({"rank": rank, "steps": steps, "digest": digest.hexdigest()}) + "\n")
