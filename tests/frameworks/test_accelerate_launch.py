"""The SDK in ranks that `accelerate launch` starts and restarts. Kills are real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)  # several starts of torch and accelerate

SCRIPT = """
import os, signal, torch, holdfast
from accelerate import Accelerator
from tests.support.frameworks.digest import digest_of

kills = [int(word) for word in os.environ["KILLS"].split(",") if word != "none"]
accelerator = Accelerator(cpu=True)
rank, attempt = accelerator.process_index, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
torch.manual_seed(1 + rank)
state = {"model": model, "optim": optimizer.optimizer, "rng": holdfast.RNG()}
with holdfast.Checkpointer(dir="ckpt", interval_steps=3, when_busy="wait") as ckpt:
    for index in ckpt.steps(30, state):
        accelerator.backward(model(torch.randn(8, 16)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if attempt < len(kills) and index == kills[attempt] and rank == attempt % 2:
            os.kill(os.getpid(), signal.SIGKILL)
assert accelerator.num_processes == 2
print(f"digest {rank} {digest_of(model.parameters())}\\n", end="", flush=True)
accelerator.end_training()
"""


def trained(folder: Path, kills: str) -> set[str]:
    """Train in `folder` under `accelerate launch`, and return the digests of both ranks.

    Rank n % 2 kills itself at step kills[n] of restart n.
    """
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("accelerate")), "launch", "--multi_gpu"),
            *("--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"),
            *("--rdzv_backend", "c10d", "--mixed_precision", "no", "--dynamo_backend", "no"),
            *("--max_restarts", str(len(kills.split(",")))),
            "train.py",
        ],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "KILLS": kills,
            # Without it and the c10d backend, torch 2.15 keeps gloo's keys of the attempt before. Ranks that
            # read them wait for ranks that are gone.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("restored step") == (len(kills.split(",")) if kills != "none" else 0)
    return {line for line in done.stdout.splitlines() if line.startswith("digest")}


def test_ranks_that_accelerate_restarts_end_in_the_bits_of_an_undisturbed_run(
    tmp_path: Path,
) -> None:
    calm = trained(tmp_path / "calm", "none")
    assert len(calm) == 2
    assert trained(tmp_path / "killed", "8,17") == calm
