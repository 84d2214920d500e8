"""The slurm script of docs/training.md, unchanged, with a stand-in for srun and scontrol.

The stand-in starts torchrun for each node on this machine. No slurm runs here.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.servers.ports import free_port
from tests.support.trainer.launched import children_of, committed_step, until

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/training.md"
NODES = 2
ENDLESS = 1_000_000

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]  # many starts of torch

SRUN = """#!{python}
import os, signal, subprocess, sys

words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
# This machine has no GPU, and its name is localhost on every node.
words = ["1" if word == "gpu" else word for word in words]
words[1:1] = ["--local-addr", "localhost"]
nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
tasks = [subprocess.Popen(words) for _ in range(nodes)]
signal.signal(signal.SIGTERM, lambda number, _: [task.send_signal(number) for task in tasks])
codes = [task.wait() for task in tasks]
sys.exit(max(codes))
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames nodes[1-2]" ] && echo localhost && echo localhost
"""
TRAIN = """
import os, sys, time, torch, holdfast
import torch.distributed as dist

dist.init_process_group("gloo")
assert dist.get_world_size() == 2 and os.environ["GROUP_RANK"] == os.environ["RANK"]
t = torch.zeros(4)
with holdfast.Checkpointer(dir="ckpt", interval_steps=5, when_busy="wait") as ckpt:
    for index in ckpt.steps(int(open("total").read()), {"t": t}):
        dist.barrier()
        t += 1
        time.sleep(0.05)
        open(f"step{os.environ['RANK']}", "w").write(str(index + 1))
    if not ckpt.stopping:
        # One write: ranks without buffers share the log, and a second argument is a second write.
        sys.stdout.write(f"done {int(t[0])}\\n")
dist.destroy_process_group()
"""


def batch_script() -> str:
    (found,) = re.findall(r"^```sh\n(#!/bin/bash\n.*?)^```", PAGE.read_text(), re.M | re.S)
    return str(found)


def job_with_a_free_port() -> int:
    """Return the number of a job whose port of the rendezvous, which follows from it, is free."""
    assert "$((15000 + SLURM_JOB_ID % 10000))" in batch_script()
    return next(port for port in iter(free_port, None) if 15_000 <= port < 25_000) - 15_000


def start(folder: Path, job: int) -> subprocess.Popen[bytes]:
    """Start the batch script as slurm does on the first node of the job."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (folder / "train.py").write_text(TRAIN)
    (folder / "job.sh").write_text(batch_script())
    own = Path(sys.executable).parent
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            ["bash", "job.sh"],
            cwd=folder,
            env={
                **os.environ,
                "PATH": f"{programs}:{own}:{os.environ['PATH']}",
                "SLURM_JOB_ID": str(job),
                "SLURM_JOB_NUM_NODES": str(NODES),
                "SLURM_JOB_NODELIST": "nodes[1-2]",
                "OMP_NUM_THREADS": "1",
            },
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def test_the_slurm_script_trains_stops_before_its_time_limit_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "total").write_text(str(ENDLESS))
    job = job_with_a_free_port()
    process = start(tmp_path, job)
    started = (tmp_path / "step1").exists
    until(lambda: started() or process.poll() is not None, "a step")
    log = (tmp_path / "log").read_text
    assert started(), log()
    # slurm sends the signal of --signal to the processes of the step, not to the batch script.
    for pid in children_of(process.pid):
        with contextlib.suppress(OSError):  # a process of the ranks that has ended
            if "srun" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGTERM)
    assert process.wait(HANG_SECONDS) != 0
    stopped = committed_step(tmp_path / "ckpt")
    assert 0 < stopped < ENDLESS

    total = stopped + 3
    (tmp_path / "total").write_text(str(total))
    again = start(tmp_path, job)
    assert again.wait(HANG_SECONDS) == 0, log()
    assert f"restored step {stopped} " in log()
    assert "is the same folder on all 2 nodes" in log()
    assert log().count(f"done {total}") == NODES
