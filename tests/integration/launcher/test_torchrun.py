"""The SDK under plain torchrun, which restarts the ranks itself. The kills are real, and so is torchrun."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import zygote
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.launched import children_of, committed_step, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]  # many starts of torch

STEPS = 30
ENDLESS = 1_000_000
SCRIPT = """
import hashlib, os, signal, sys, time, torch, holdfast
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

kills = [int(word) for word in sys.argv[1].split(",") if word]
steps, pause = int(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(1 + rank)
state = {"model": model, "optim": optimizer, "rng": holdfast.RNG()}
with holdfast.Checkpointer(dir="ckpt", interval_steps=3, when_busy="wait") as ckpt:
    for index in ckpt.steps(steps, state):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if attempt < len(kills) and index == kills[attempt] and rank == attempt % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(pause)
        print("step", index + 1, flush=True)
    if not ckpt.stopping:
        data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        print("digest", rank, hashlib.sha256(data).hexdigest(), flush=True)
dist.destroy_process_group()
"""


STARTED: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    while STARTED:
        process = STARTED.pop()
        for pid in [*children_of(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def start(
    folder: Path, kills: str = "", steps: int = STEPS, pause: float = 0.0
) -> subprocess.Popen[bytes]:
    """Start torchrun in `folder`. Rank n % 2 kills itself at step kills[n] of restart n."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    with (folder / "log").open("ab") as log:
        process = zygote.Popen(
            [
                sys.executable,
                *(str(Path(sys.executable).with_name("torchrun")), "--standalone"),
                *("--nproc-per-node", "2", "--max-restarts", str(len(kills.split(",")))),
                *("train.py", kills, str(steps), str(pause)),
            ],
            cwd=folder,
            # torch 2.15 otherwise keeps the keys of the attempt before, and ranks wait for addresses of
            # processes that have ended.
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    STARTED.append(process)
    return process


def finish(process: subprocess.Popen[bytes], folder: Path) -> set[str]:
    """Wait for the end and return the digests of both ranks."""
    code = process.wait(HANG_SECONDS)
    log = (folder / "log").read_text()
    assert code == 0, log
    found = {line for line in log.splitlines() if line.startswith("digest")}
    assert len(found) == 2, log
    return found


def test_ranks_that_torchrun_restarts_end_in_the_bits_of_an_undisturbed_run(
    tmp_path: Path,
) -> None:
    calm = finish(start(tmp_path / "calm"), tmp_path / "calm")
    killed = finish(start(tmp_path / "killed", "8,17"), tmp_path / "killed")
    assert killed == calm
    assert (tmp_path / "killed/log").read_text().count("restored step") == 2


def test_sigterm_to_torchrun_saves_the_last_step(tmp_path: Path) -> None:
    process = start(tmp_path, steps=ENDLESS, pause=0.2)
    until(lambda: "step 5" in (tmp_path / "log").read_text(), "five steps", 300)
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_SECONDS) != 0
    stopped = committed_step(tmp_path / "ckpt")
    assert 5 <= stopped < ENDLESS
    finish(start(tmp_path, steps=stopped + 3), tmp_path)
    assert f"restored step {stopped} " in (tmp_path / "log").read_text()
