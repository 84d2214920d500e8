"""`holdfast run` on several nodes, played by launchers on this machine that share a folder.

Each launcher has a directory of its own in shared memory, as nodes have. Kills are real.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.servers.ports import free_port
from tests.support.trainer.held import allow, held
from tests.support.trainer.launched import Launched, committed_step, until

ROOT = Path(__file__).resolve().parents[3]
TRAIN = ROOT / "examples/gpt/train.py"
STEPS = 60
ENDLESS = 1_000_000

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]  # many starts of torch


@dataclass
class Cluster:
    """Launchers of several nodes, which share `folder`."""

    folder: Path
    nodes: int
    options: tuple[str, ...]
    command: tuple[str, ...]
    port: int
    stack: contextlib.ExitStack

    def start(self, node: int, *options: str, **environment: str) -> Launched:
        """Start the launcher of a node, for the first time or again."""
        directory = self.folder / f"node{node}-{len(list(self.folder.glob(f'node{node}-*')))}"
        words = [
            *("--nnodes", str(self.nodes), "--node-rank", str(node), "--rdzv-id", "test"),
            *("--rdzv-endpoint", f"localhost:{self.port}", *self.options, *options),
        ]
        return self.stack.enter_context(Launched(directory, words, self.command, environment))

    def start_all(self) -> list[Launched]:
        return [self.start(node) for node in range(self.nodes)]

    @property
    def committed(self) -> int:
        return committed_step(self.folder / "ckpt")

    def train(self, steps: int, pause: str = "0", *, is_held: bool = False) -> None:
        """Set the training that launchers start.

        Args:
            steps: Number of steps.
            pause: Seconds between two steps.
            is_held: Whether the training does only the steps that `go_on` allows.
        """
        start = held(self.limit, TRAIN) if is_held else [sys.executable, str(TRAIN)]
        self.command = (
            *start,
            *("--steps", str(steps), "--layers", "1", "--width", "16", "--batch", "2"),
            *("--dir", str(self.folder / "ckpt"), "--interval", "3"),
            *("--final-digest", "-", "--progress-dir", str(self.folder / "progress")),
            *("--sleep-per-step", pause),
        )

    @property
    def limit(self) -> Path:
        return self.folder / "limit"

    def go_on(self) -> None:
        """Let the training do some more steps, and wait until one of them is committed."""
        before = self.committed
        allow(self.limit, before + 9)
        until(lambda: self.committed > before, f"a commit after step {before}")

    def step_of(self, rank: int) -> int:
        return self._progress_of(rank)[0]

    def pid_of(self, rank: int) -> int | None:
        return self._progress_of(rank)[1]

    def kill_rank(self, rank: int) -> None:
        pid = self.pid_of(rank)
        assert pid is not None, f"rank {rank} has not done a step yet"
        os.kill(pid, signal.SIGKILL)

    def _progress_of(self, rank: int) -> tuple[int, int | None]:
        with contextlib.suppress(FileNotFoundError):
            step, pid = (self.folder / f"progress/rank{rank}").read_text().split()
            return int(step), int(pid)
        return 0, None


@contextlib.contextmanager
def cluster(folder: Path, nodes: int, *options: str) -> Iterator[Cluster]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "progress").mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        made = Cluster(folder, nodes, options, (), free_port(), stack)
        made.train(STEPS)
        yield made


def digests(*launchers: Launched) -> dict[int, str]:
    lines = [line.partition("] ")[2] for run in launchers for line in run.out().splitlines()]
    entries = [json.loads(line) for line in lines if "finalDigest" in line]
    return {entry["rank"]: entry["finalDigest"] for entry in entries}


def expect_success(*launchers: Launched) -> None:
    for run in launchers:
        assert run.wait() == 0, run.err()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The digests of the same four ranks on one node, which nothing disturbs."""
    folder = tmp_path_factory.mktemp("calm")
    with cluster(folder, 1, "--nproc-per-node", "4") as one:
        run = one.start(0)
        expect_success(run)
    found = digests(run)
    assert sorted(found) == [0, 1, 2, 3]
    return found


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Hide torch from launchers that start no rank: its import dominates their time."""
    directory = tmp_path_factory.mktemp("no-torch")
    (directory / "torch.py").write_text("raise ModuleNotFoundError(__name__, name=__name__)\n")
    return {"PYTHONPATH": str(directory)}


def test_kills_of_ranks_and_launchers_do_not_change_a_bit(
    tmp_path: Path, expected: dict[int, str]
) -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", "9")
    with cluster(tmp_path, 2, *options) as both:
        both.train(STEPS, "0.05", is_held=True)
        allow(both.limit, 0)
        first, second = both.start_all()
        both.go_on()

        both.kill_rank(3)
        until(lambda: "in round 0; restarting all ranks" in first.err(), "round 1")
        both.go_on()

        os.kill(second.process.pid, signal.SIGKILL)
        second.process.wait()
        until(lambda: "ended in round 1; restarting all ranks" in first.err(), "node 1 is missed")
        second = both.start(1)
        until(lambda: "round 2: forking" in second.err(), "round 2")
        both.go_on()

        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        until(lambda: "joining again" in second.err(), "node 0 is missed")
        first = both.start(0)
        allow(both.limit, None)
        expect_success(first, second)
        assert "restored step" in first.err()
        assert "is the same folder on all 2 nodes" in first.err()
        assert digests(first, second) == expected


def test_the_limit_of_restarts_counts_for_the_gang(tmp_path: Path) -> None:
    with cluster(tmp_path, 2, "--max-restarts", "1") as both:
        both.train(ENDLESS, "0.2")
        first, second = both.start_all()
        ended: set[int | None] = {None}
        for rank, round_ in ((1, 0), (0, 1)):

            def all_have_begun(ended: set[int | None] = ended) -> bool:
                return both.pid_of(0) not in ended and both.pid_of(1) not in ended

            until(all_have_begun, f"a step of both ranks in round {round_}")
            ended |= {both.pid_of(0), both.pid_of(1)}
            both.kill_rank(rank)
            until(lambda n=round_: f"in round {n};" in first.err(), f"the end of round {round_}")  # type: ignore[misc]
        assert first.wait() == second.wait() == 137
        assert "no restarts are left" in first.err()
        assert "no restarts are left" in second.err()


def test_a_signal_to_one_launcher_stops_all_nodes_at_the_same_step(tmp_path: Path) -> None:
    with cluster(tmp_path, 2, "--shutdown-timeout", "120") as both:
        both.train(ENDLESS, "0.05")
        first, second = both.start_all()
        until(lambda: both.step_of(0) > 1, "two steps")
        os.kill(second.process.pid, signal.SIGTERM)
        assert (first.wait(), second.wait()) == (143, 143), first.err() + second.err()
        stopped = both.committed
        assert 0 < stopped < ENDLESS
        both.train(stopped + 3)
        again = both.start_all()
        expect_success(*again)
        assert f"restored step {stopped} " in again[0].err()


@pytest.mark.parametrize(
    ("node", "text"),
    [
        pytest.param(0, "node 1 of 2 nodes did not join at localhost", id="node-1-is-missing"),
        pytest.param(1, "node 1 could not join node 0 at localhost", id="node-0-is-missing"),
    ],
)
def test_a_node_that_is_missing_ends_the_wait_of_the_others(
    tmp_path: Path, node: int, text: str, light: dict[str, str]
) -> None:
    with cluster(tmp_path, 2, "--rdzv-conf", "join_timeout=1") as both:
        alone = both.start(node, **light)
        assert alone.wait() == 1
        assert text in alone.err()


def test_a_launcher_without_the_id_of_the_run_cannot_join(
    tmp_path: Path, light: dict[str, str]
) -> None:
    with cluster(tmp_path, 2) as both:
        first = both.start(0, **light)
        until(lambda: "waiting for node 1" in first.err(), "node 0 listens")
        stranger = both.start(1, "--rdzv-id", "other", "--rdzv-conf", "join_timeout=1", **light)
        assert stranger.wait() == 1
        assert "--rdzv-id or HOLDFAST_RUN_TOKEN may differ" in stranger.err()
        assert "its --rdzv-id or HOLDFAST_RUN_TOKEN differs" in first.err()
        assert "has joined" not in first.err()


def test_a_node_with_another_number_of_ranks_is_refused(
    tmp_path: Path, light: dict[str, str]
) -> None:
    with cluster(tmp_path, 2) as both:
        both.start(0, **light)
        other = both.start(1, "--nproc-per-node", "2", **light)
        assert other.wait() == 1
        assert "it starts 2 ranks, node 0 starts 1" in other.err()


NOT_SHARED = """
import os, pathlib, sys, time, torch, holdfast
root, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
with holdfast.Checkpointer(dir=root / f"ckpt{os.environ['GROUP_RANK']}") as ckpt:
    try:
        ckpt.restore({"t": torch.zeros(1)})
    except holdfast.ConfigError as error:
        print(error, file=sys.stderr, flush=True)
        # The end of the first rank ends the others, maybe before they print.
        (root / f"refused{rank}").touch()
        while not all((root / f"refused{other}").exists() for other in range(2)):
            time.sleep(0.01)
        raise
"""


def test_nodes_that_do_not_share_the_folder_are_refused_at_the_start(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(NOT_SHARED)
    with cluster(tmp_path, 2) as both:
        both.command = (sys.executable, str(script), str(tmp_path))
        launchers = both.start_all()
        for run in launchers:
            assert run.wait() == 1
            assert "is not the same folder on all nodes: rank 0 on" in run.err()
        assert not list(tmp_path.glob("ckpt*/.shared-*"))
