"""The SDK under plain torchrun, which restarts the ranks itself. The kills are real, and so is torchrun.

Two nodes are two processes of torchrun on this machine, which share a folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.support import zygote
from tests.support.hang import HANG_SECONDS
from tests.support.servers.ports import free_port
from tests.support.trainer.held import allow, held
from tests.support.trainer.launched import children_of, committed_step, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]  # many starts of torch

STEPS = 30
ENDLESS = 1_000_000
# The ranks write to one file. Each line is one text, because PYTHONUNBUFFERED makes each a write of its own.
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
        print(f"step {index + 1}\\n", end="", flush=True)
    if not ckpt.stopping:
        data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        print(f"digest {rank} {hashlib.sha256(data).hexdigest()}\\n", end="", flush=True)
dist.destroy_process_group()
"""


STARTED: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    while STARTED:
        lose(STARTED.pop())


def start(
    folder: Path, kills: str = "", steps: int = STEPS, pause: float = 0.0
) -> subprocess.Popen[bytes]:
    """Start torchrun in `folder`. Rank n % 2 kills itself at step kills[n] of restart n."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    restarts = str(len(kills.split(",")))
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", restarts]
    return torchrun(folder, [*words, "train.py", kills, str(steps), str(pause)], "log")


def torchrun(folder: Path, words: Sequence[str], log: str) -> subprocess.Popen[bytes]:
    with (folder / log).open("ab") as file:
        process = zygote.Popen(
            [sys.executable, str(Path(sys.executable).with_name("torchrun")), *words],
            cwd=folder,
            # torch 2.15 otherwise keeps the keys of the attempt before, and ranks wait for addresses of
            # processes that have ended.
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    STARTED.append(process)
    return process


def start_node(folder: Path, node: int, port: int, *command: str) -> subprocess.Popen[bytes]:
    """Start torchrun for one of two nodes with one rank each. Its output goes to log<node>.

    Node 0 hosts the rendezvous.
    """
    words = [
        *("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "test"),
        *("--rdzv-conf", f"is_host={node == 0}", "--local-addr", "localhost", *command),
    ]
    return torchrun(folder, words, f"log{node}")


def lose(process: subprocess.Popen[bytes]) -> None:
    """Kill torchrun and its ranks, as the loss of their node does."""
    for pid in [*children_of(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def finish(process: subprocess.Popen[bytes], folder: Path) -> set[str]:
    """Wait for the end and return the digests of both ranks."""
    code = process.wait(HANG_SECONDS)
    log = (folder / "log").read_text()
    assert code == 0, log
    found = {line for line in log.splitlines() if line.startswith("digest")}
    assert len(found) == 2, log
    return found


@pytest.mark.fault("A rank is killed under plain torchrun")
def test_ranks_that_torchrun_restarts_end_in_the_bits_of_an_undisturbed_run(
    tmp_path: Path,
) -> None:
    calm = finish(start(tmp_path / "calm"), tmp_path / "calm")
    killed = finish(start(tmp_path / "killed", "8,17"), tmp_path / "killed")
    assert killed == calm
    assert (tmp_path / "killed/log").read_text().count("restored step") == 2


def test_sigterm_to_torchrun_saves_the_last_step(tmp_path: Path) -> None:
    process = start(tmp_path, steps=ENDLESS, pause=0.2)
    until(lambda: "step 5" in (tmp_path / "log").read_text(), "five steps")
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_SECONDS) != 0
    stopped = committed_step(tmp_path / "ckpt")
    assert 5 <= stopped < ENDLESS
    finish(start(tmp_path, steps=stopped + 3), tmp_path)
    assert f"restored step {stopped} " in (tmp_path / "log").read_text()


@pytest.mark.fault("A node of a gang under torchrun is lost and replaced")
def test_the_gang_goes_on_after_a_node_was_replaced_and_ends_in_the_same_bits(
    tmp_path: Path,
) -> None:
    calm = finish(start(tmp_path / "calm"), tmp_path / "calm")
    folder = tmp_path / "nodes"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    limit = tmp_path / "limit"
    allow(limit, 12)
    _, *program = held(limit, Path("train.py"))
    command = (*program, "", str(STEPS), "0")
    port = free_port()
    nodes = [start_node(folder, node, port, *command) for node in range(2)]
    until(lambda: committed_step(folder / "ckpt") > 0, "a commit")
    lose(nodes[1])
    allow(limit, None)
    # The new torchrun of node 1 has restarted nothing yet, and that of node 0 has.
    nodes[1] = start_node(folder, 1, port, *command)
    for process in nodes:
        assert process.wait(HANG_SECONDS) == 0, logs_of(folder)
    found = {line for line in logs_of(folder).splitlines() if line.startswith("digest")}
    assert found == calm, logs_of(folder)
    assert "restored step" in logs_of(folder)


def logs_of(folder: Path) -> str:
    return "".join((folder / f"log{node}").read_text() for node in range(2))


NOT_SHARED = """
import os, torch, holdfast
import torch.distributed as dist
dist.init_process_group("gloo")
with holdfast.Checkpointer(dir=f"ckpt{os.environ['GROUP_RANK']}") as ckpt:
    try:
        ckpt.restore({"t": torch.zeros(1)})
    except holdfast.ConfigError as error:
        print(error, flush=True)
        dist.barrier()
        raise
"""


@pytest.mark.fault("The nodes do not share the folder")
def test_nodes_that_do_not_share_the_folder_are_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NOT_SHARED)
    port = free_port()
    nodes = [start_node(tmp_path, node, port, "--max-restarts", "0", "train.py") for node in (0, 1)]
    for node, process in enumerate(nodes):
        assert process.wait(HANG_SECONDS) == 1
        log = (tmp_path / f"log{node}").read_text()
        assert "is not the same folder on all nodes: rank 0 on" in log
    assert not list(tmp_path.glob("ckpt*/.shared-*"))
