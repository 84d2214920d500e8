"""A run whose ranks were killed ends with the same bits as an uninterrupted run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.crash.failpoints import in_every_python
from tests.support.trainer.held import allow, held
from tests.support.trainer.launched import Launched, committed_step, until

ROOT = Path(__file__).resolve().parents[3]
TRAIN = ROOT / "examples/gpt/train.py"
STEPS = 40

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]  # many starts of torch


def launched(
    directory: Path, ranks: int, restarts: int, start: Sequence[str], *more: str
) -> Launched:
    progress = directory / "progress"
    return Launched(
        directory,
        ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)],
        [
            *start,
            *("--steps", str(STEPS), "--layers", "2", "--width", "32", "--batch", "2"),
            *("--dir", str(directory / "ckpt"), "--interval", "3"),
            *("--final-digest", "-", "--progress-dir", str(progress), *more),
        ],
    )


def digests(run: Launched) -> dict[int, str]:
    lines = [line.partition("] ")[2] for line in run.out().splitlines() if "finalDigest" in line]
    return {entry["rank"]: entry["finalDigest"] for entry in map(json.loads, lines)}


@pytest.mark.parametrize("ranks", [pytest.param(1, id="alone"), pytest.param(3, id="three-ranks")])
def test_kills_do_not_change_a_bit(tmp_path: Path, ranks: int) -> None:
    with launched(tmp_path / "calm", ranks, 0, [sys.executable, str(TRAIN)]) as calm:
        assert calm.wait() == 0, calm.err()
    expected = digests(calm)
    assert sorted(expected) == list(range(ranks))

    victims = [(ranks - 1, 8), (0, 20)]
    limit = tmp_path / "limit"
    allow(limit, 12)
    start = held(limit, TRAIN)
    with launched(tmp_path / "killed", ranks, 5, start, "--sleep-per-step", "0.05") as run:
        # A rank that dies before its first save is durable has nothing to restore.
        until(lambda: committed_step(tmp_path / "killed/ckpt") > 0, "the first commit")
        for victim, step in victims:
            allow(limit, step + 4)
            until(lambda v=victim, s=step: run.step_of(v) >= s, f"step {step}")  # type: ignore[misc]
            run.kill_rank(victim)
        allow(limit, None)
        assert run.wait() == 0, run.err()
    assert run.err().count("restarting all ranks in place") == len(victims), run.err()
    assert run.err().count("restored step") >= len(victims)
    assert digests(run) == expected


SLOW = """
import os, signal, sys, time, holdfast, numpy as np
folder, go = sys.argv[1:]
rank = int(os.environ["RANK"])
state = {"t": np.zeros(1 << 18)}
with holdfast.Checkpointer(dir=folder) as ckpt:
    done = ckpt.restore(state)
    print("restored", done, state["t"][-1], flush=True)
    if done is None:
        ckpt.save(1, {"t": np.full(1 << 18, 1.0)}).wait("local")
        if rank == 0:
            os.unlink(go)
        while os.path.exists(go):
            time.sleep(0.01)
        ckpt.save(2, {"t": np.full(1 << 18, 2.0)})
        assert ckpt._session.wait_acknowledged(540)
        open(f"{go}.{rank}", "w").close()
        while not all(os.path.exists(f"{go}.{other}") for other in range(2)):
            time.sleep(0.01)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
"""


def test_what_was_saved_when_a_rank_was_killed_is_restored(tmp_path: Path) -> None:
    """All ranks end and restart while both persisters are still writing step 2."""
    program, go = tmp_path / "program.py", tmp_path / "go"
    program.write_text(SLOW)
    go.touch()
    hanging = in_every_python(tmp_path, f"node.write=wait:{go}")
    command = [sys.executable, str(program), str(tmp_path / "ckpt"), str(go)]
    with Launched(
        tmp_path, ["--nproc-per-node", "2", "--max-restarts", "1"], command, hanging
    ) as run:
        until(lambda: "waiting for process" in run.err(), "the ranks that start again wait")
        go.touch()
        assert run.wait() == 0, run.err()
    assert sorted(run.out().splitlines()) == [
        f"[rank {rank}] restored {text}" for rank in range(2) for text in ("2 2.0", "None 0.0")
    ]
