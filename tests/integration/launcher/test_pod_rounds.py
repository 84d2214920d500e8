"""`holdfast run` in a pod: the sidecar starts rounds, ranks restart in place, no round runs twice."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.trainer.held import allow, held
from tests.support.trainer.launched import Launched, stop, until
from tests.support.trainer.watched_sidecar import WatchedSidecar

from holdfast_core.messages.schema import (
    Hello,
    LauncherState,
    RankStack,
)

ROOT = Path(__file__).resolve().parents[3]
TRAIN = ROOT / "examples/gpt/train.py"
STEPS = 24
RANKS = 2

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]  # many starts of torch


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[WatchedSidecar]:
    fake = WatchedSidecar(
        tmp_path / "shared", tmp_path / "node", world_size=RANKS, interval_steps=2
    )
    yield fake
    fake.stop()


def launch(
    tmp_path: Path, sidecar: WatchedSidecar, *more: str, limit: Path | None = None
) -> Launched:
    (tmp_path / "shared").mkdir(exist_ok=True)
    return Launched(
        tmp_path,
        ["--shutdown-timeout", "120"],
        [
            *([sys.executable, str(TRAIN)] if limit is None else held(limit, TRAIN)),
            *("--steps", str(STEPS), "--layers", "1", "--width", "32", "--batch", "2"),
            *("--final-digest", "-", "--progress-dir", str(tmp_path / "progress"), *more),
        ],
        sidecar.environment(),
    )


def begin(sidecar: WatchedSidecar) -> None:
    """Start the round as a sidecar does when the barrier opens."""
    sidecar.host_store()
    state = sidecar.launcher_state(
        lambda s: s.store is not None and s.store.round == sidecar.round, "the store's address"
    )
    sidecar.run(state.store.port)


def launcher_hellos(sidecar: WatchedSidecar) -> list[Hello]:
    return [m for m in sidecar.messages(Hello) if m.rank is None]


def ends_of(sidecar: WatchedSidecar, rank: int) -> set[tuple[int, int | None]]:
    """Return the code and the round of each end of a rank.

    The other rank may fail meanwhile, because it lost its peer.
    """
    states = sidecar.messages(LauncherState)
    return {(d.code, state.round) for state in states for d in state.dead if d.rank == rank}


def wait_for_end(sidecar: WatchedSidecar, round_: int) -> None:
    sidecar.launcher_state(lambda s: s.ended_below == round_, f"the end below round {round_}")


def digests(run: Launched) -> dict[int, str]:
    lines = [line.partition("] ")[2] for line in run.out().splitlines() if "finalDigest" in line]
    return {entry["rank"]: entry["finalDigest"] for entry in map(json.loads, lines)}


def test_three_rounds_end_in_the_bits_of_one(tmp_path: Path, sidecar: WatchedSidecar) -> None:
    calm = Launched(
        tmp_path / "calm",
        ["--nproc-per-node", str(RANKS)],
        [
            sys.executable,
            str(TRAIN),
            *("--steps", str(STEPS), "--layers", "1", "--width", "32", "--batch", "2"),
            *("--final-digest", "-", "--dir", str(tmp_path / "calm/ckpt"), "--interval", "5"),
        ],
    )
    with calm:
        assert calm.wait() == 0, calm.err()

    limit = tmp_path / "limit"
    allow(limit, 10)
    with launch(tmp_path, sidecar, "--sleep-per-step", "0.05", limit=limit) as run:
        sidecar.start()  # the sidecar starts after the launcher
        sidecar.wait_for(Hello)
        begin(sidecar)

        until(lambda: run.step_of(1) >= 6, "six steps")
        run.kill_rank(1)
        until(lambda: bool(ends_of(sidecar, 1)), "the end of rank 1")
        assert ends_of(sidecar, 1) == {(-9, 0)}
        sidecar.end(1)
        wait_for_end(sidecar, 1)
        sidecar.begin_round()
        begin(sidecar)

        allow(limit, 18)
        until(lambda: run.step_of(0) >= 14, "fourteen steps")
        sidecar.end(2)  # another member fails, so healthy ranks are ended
        wait_for_end(sidecar, 2)
        sidecar.begin_round()
        begin(sidecar)

        allow(limit, None)
        assert run.wait() == 0, run.err()
    assert sidecar.launcher_state(lambda s: s.finished, "the end").round == 2
    assert len(digests(calm)) == RANKS
    assert digests(run) == digests(calm)


def test_a_round_never_runs_twice(tmp_path: Path, sidecar: WatchedSidecar) -> None:
    sidecar.start()
    limit = tmp_path / "limit"
    allow(limit, 4)
    with launch(tmp_path, sidecar, limit=limit) as run:
        sidecar.wait_for(Hello)
        begin(sidecar)
        until(lambda: run.step_of(0) >= 1, "a step")
        os.kill(run.process.pid, signal.SIGKILL)  # the trainer's container dies
        run.wait()

    before = len(launcher_hellos(sidecar))
    with launch(tmp_path, sidecar) as again:
        until(lambda: len(launcher_hellos(sidecar)) > before, "the second launcher")
        hello = launcher_hellos(sidecar)[-1]
        assert (hello.round, hello.last_round) == (None, 0)
        begin(sidecar)
        until(lambda: "never forked twice" in again.err(), "the refusal")


def test_the_sidecar_may_restart_under_running_ranks(
    tmp_path: Path, sidecar: WatchedSidecar
) -> None:
    sidecar.start()
    limit = tmp_path / "limit"
    allow(limit, 4)
    with launch(tmp_path, sidecar, limit=limit) as run:
        sidecar.wait_for(Hello)
        begin(sidecar)
        until(lambda: run.step_of(0) >= 3, "three steps")
        before = len(launcher_hellos(sidecar))
        sidecar.die()
        allow(limit, 12)
        until(lambda: run.step_of(0) >= 8, "training goes on")
        sidecar.start(0)
        until(lambda: len(launcher_hellos(sidecar)) > before, "the launcher comes back")
        assert launcher_hellos(sidecar)[-1].round == 0
        allow(limit, None)
        assert run.wait() == 0, run.err()


def test_the_error_of_a_rank_is_in_its_report(tmp_path: Path, sidecar: WatchedSidecar) -> None:
    sidecar.start()
    program = tmp_path / "fails.py"
    program.write_text(
        "import os\nraise ValueError('rank ' + os.environ['RANK'] + ' has no luck')\n"
    )
    with Launched(tmp_path, [], ["python", str(program)], sidecar.environment()) as run:
        sidecar.wait_for(Hello)
        begin(sidecar)
        state = sidecar.launcher_state(lambda s: len(s.dead) == RANKS, "the ends of the ranks")
        assert run.process.poll() is None, "it waits for the next round"
    for death in state.dead:
        assert death.code == 1
        assert death.message.endswith(f"ValueError: rank {death.rank} has no luck")


def test_sigterm_saves_stops_and_does_not_finish_the_job(
    tmp_path: Path, sidecar: WatchedSidecar
) -> None:
    sidecar.start()
    with launch(tmp_path, sidecar, "--sleep-per-step", "0.2", "--steps", "10000") as run:
        sidecar.wait_for(Hello)
        begin(sidecar)
        until(lambda: run.step_of(0) >= 3, "three steps")
        run.process.terminate()
        assert run.wait() == 143
    # Another thread receives what the launcher sent before it ended.
    sidecar.launcher_state(lambda s: set(s.returned) == {0, 1}, "the ends of both ranks")
    assert not any(state.dead for state in sidecar.messages(LauncherState))
    assert not any(state.finished for state in sidecar.messages(LauncherState))


def test_a_launcher_that_has_finished_waits_for_its_release(
    tmp_path: Path, sidecar: WatchedSidecar
) -> None:
    sidecar.start()
    sidecar.released = False
    with launch(tmp_path, sidecar) as run:
        sidecar.wait_for(Hello)
        begin(sidecar)
        sidecar.launcher_state(lambda s: s.finished, "the end of the ranks")
        sidecar.die()
        before = len(sidecar.messages(LauncherState))
        sidecar.start(0)
        until(lambda: len(sidecar.messages(LauncherState)) > before, "the state after a restart")
        assert sidecar.messages(LauncherState)[-1].finished
        assert run.process.poll() is None
        sidecar.release()
        assert run.wait() == 0, run.err()


@pytest.mark.fault(
    "A sidecar is killed, and its ranks have returned before it receives its ROUND again"
)
def test_ranks_that_returned_still_finish_after_the_end_of_older_rounds(
    tmp_path: Path, sidecar: WatchedSidecar
) -> None:
    """A sidecar that was killed is sealed again for its round, after the ranks have returned."""
    sidecar.start()
    sidecar.released = False
    with launch(tmp_path, sidecar) as run:
        sidecar.wait_for(Hello)
        begin(sidecar)
        sidecar.launcher_state(lambda s: s.finished, "the end of the ranks")
        sidecar.end(0)
        sidecar.release()
        assert run.wait() == 0, run.err()


HANGS = """
import os, pathlib, sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
threading.Thread(target=threading.Event().wait, daemon=True).start()
def note():
    pathlib.Path(sys.argv[1], f"rank{dist.get_rank()}").write_text(f"1 {os.getpid()}")
def read_data():
    note()
    while True:
        time.sleep(3600)
def exchange():
    note()
    dist.all_reduce(torch.ones(1))
exchange() if dist.get_rank() == 0 else read_data()
"""


tokens = map(str, itertools.count())


Stacks = dict[int, RankStack]


def stacks(sidecar: WatchedSidecar, wanted: Callable[[Stacks], bool], what: str) -> Stacks:
    """Request the stacks of all ranks until they are as wanted, and return them by rank.

    Ranks come to their last line, and a busy machine answers, at any time.
    """
    found: Stacks = {}

    def as_wanted() -> bool:
        token = next(tokens)
        sidecar.take_stacks(token)
        state = sidecar.launcher_state(lambda s: s.stacks_token == token, "the stacks")
        assert state.round == 0
        found.update({s.rank: s for s in state.stacks})
        return len(found) == RANKS and wanted(found)

    until(as_wanted, what)
    return found


@pytest.mark.fault("A launcher is asked where stopped and waiting ranks are")
def test_the_launcher_finds_out_where_ranks_hang(tmp_path: Path, sidecar: WatchedSidecar) -> None:
    sidecar.start()
    program = tmp_path / "hangs.py"
    program.write_text(HANGS)
    command = [sys.executable, str(program), str(tmp_path / "progress")]
    with Launched(tmp_path, [], command, sidecar.environment()) as run:
        sidecar.wait_for(Hello)
        begin(sidecar)
        until(lambda: run.step_of(0) == run.step_of(1) == 1, "the last lines of both ranks")

        def at_their_last_lines(found: Stacks) -> bool:
            reads = found[1].stack.startswith("read_data (hangs.py:11)")
            return found[0].waits and reads and not (found[0].moves or found[1].moves)

        first = stacks(sidecar, at_their_last_lines, "the last lines of both ranks")
        assert "exchange (hangs.py:" in first[0].stack
        assert not first[1].waits
        log = run.err()
        assert "rank 1: Thread 0x" in log
        assert 'hangs.py", line 11 in read_data' in log

        pid = run.pid_of(1)
        assert pid is not None
        stop(pid)
        stopped = stacks(sidecar, lambda found: found[0].is_known, "the answer of rank 0")
        assert (stopped[1].is_known, stopped[1].moves) == (False, False)
        assert stopped[1].stopped
        assert stopped[1].stack == "its process is stopped, in state T (stopped)"
        sidecar.end(1)
        wait_for_end(sidecar, 1)  # a stopped process is ended, too


@pytest.mark.fault("Ranks are no Python scripts when their stacks are requested")
def test_a_program_that_is_no_python_script_survives_the_request(
    tmp_path: Path, sidecar: WatchedSidecar
) -> None:
    sidecar.start()
    with Launched(tmp_path, [], ["sleep", "3600"], sidecar.environment()) as run:
        sidecar.wait_for(Hello)
        begin(sidecar)
        until(lambda: "forking ranks" in run.err(), "the forks")
        found = stacks(
            sidecar, lambda found: not any(s.moves for s in found.values()), "the started programs"
        )
        assert [(s.is_known, s.stopped) for s in found.values()] == [(False, False)] * RANKS
        assert not any(state.dead for state in sidecar.messages(LauncherState))
