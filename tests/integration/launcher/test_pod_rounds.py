"""`holdfast run` in a pod: the sidecar starts rounds, ranks restart in place, no round runs twice."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.trainer.launched import Launched, until

from holdfast.testing import FakeSidecar
from holdfast_core.messages.schema import (
    Ended,
    Exited,
    Finish,
    Hello,
    LocalRole,
    StoreAddress,
)

ROOT = Path(__file__).resolve().parents[3]
TRAIN = ROOT / "examples/gpt/train.py"
STEPS = 24
RANKS = 2

pytestmark = pytest.mark.integration


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[FakeSidecar]:
    fake = FakeSidecar(tmp_path / "shared", tmp_path / "node", world_size=RANKS, interval_steps=2)
    yield fake
    fake.stop()


def launch(tmp_path: Path, sidecar: FakeSidecar, *more: str) -> Launched:
    (tmp_path / "shared").mkdir(exist_ok=True)
    return Launched(
        tmp_path,
        ["--grace", "30"],
        [
            sys.executable,
            str(TRAIN),
            *("--steps", str(STEPS), "--layers", "1", "--width", "32", "--batch", "2"),
            *("--final-digest", "-", "--progress-dir", str(tmp_path / "progress"), *more),
        ],
        sidecar.environment(),
    )


def begin(sidecar: FakeSidecar) -> None:
    """Start the round as a sidecar does when the barrier opens."""
    before = len(sidecar.messages(StoreAddress))
    sidecar.host_store()
    address = sidecar.wait_for(StoreAddress, before + 1)
    assert address.round == sidecar.round
    sidecar.run(address.port)


def launcher_hellos(sidecar: FakeSidecar) -> list[Hello]:
    return [m for m in sidecar.messages(Hello) if m.role is LocalRole.LAUNCHER]


def digests(run: Launched) -> dict[int, str]:
    lines = [line.partition("] ")[2] for line in run.out().splitlines() if "finalDigest" in line]
    return {entry["rank"]: entry["finalDigest"] for entry in map(json.loads, lines)}


def test_three_rounds_end_in_the_bits_of_one(tmp_path: Path, sidecar: FakeSidecar) -> None:
    calm = Launched(
        tmp_path / "calm",
        ["--nproc", str(RANKS)],
        [
            sys.executable,
            str(TRAIN),
            *("--steps", str(STEPS), "--layers", "1", "--width", "32", "--batch", "2"),
            *("--final-digest", "-", "--dir", str(tmp_path / "calm/ckpt"), "--interval", "5"),
        ],
    )
    with calm:
        assert calm.wait() == 0, calm.err()

    with launch(tmp_path, sidecar, "--sleep-per-step", "0.05") as run:
        sidecar.start()  # the sidecar starts after the launcher
        sidecar.wait_for(Hello)
        begin(sidecar)

        until(lambda: run.step_of(1) >= 6, "six steps")
        run.kill_rank(1)
        exited = sidecar.wait_for(Exited)
        assert (exited.rank, exited.code, exited.round) == (1, -9, 0)
        sidecar.end(1)
        assert sidecar.wait_for(Ended).round == 1
        sidecar.begin_round()
        begin(sidecar)

        until(lambda: run.step_of(0) >= 14, "fourteen steps")
        sidecar.end(2)  # another member fails, so healthy ranks are ended
        assert sidecar.wait_for(Ended, 2).round == 2
        sidecar.begin_round()
        begin(sidecar)

        assert run.wait() == 0, run.err()
    assert sidecar.messages(Finish)[-1].round == 2
    assert len(digests(calm)) == RANKS
    assert digests(run) == digests(calm)


def test_a_round_never_runs_twice(tmp_path: Path, sidecar: FakeSidecar) -> None:
    sidecar.start()
    with launch(tmp_path, sidecar, "--sleep-per-step", "0.2") as run:
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


def test_the_sidecar_may_restart_under_running_ranks(tmp_path: Path, sidecar: FakeSidecar) -> None:
    sidecar.start()
    with launch(tmp_path, sidecar, "--sleep-per-step", "0.1") as run:
        sidecar.wait_for(Hello)
        begin(sidecar)
        until(lambda: run.step_of(0) >= 3, "three steps")
        before = len(launcher_hellos(sidecar))
        sidecar.die()
        until(lambda: run.step_of(0) >= 8, "training goes on")
        sidecar.start(0)
        until(lambda: len(launcher_hellos(sidecar)) > before, "the launcher comes back")
        assert launcher_hellos(sidecar)[-1].round == 0
        assert run.wait() == 0, run.err()


def test_the_error_of_a_rank_is_in_its_report(tmp_path: Path, sidecar: FakeSidecar) -> None:
    sidecar.start()
    program = tmp_path / "fails.py"
    program.write_text(
        "import os\nraise ValueError('rank ' + os.environ['RANK'] + ' has no luck')\n"
    )
    with Launched(tmp_path, [], ["python", str(program)], sidecar.environment()) as run:
        sidecar.wait_for(Hello)
        begin(sidecar)
        sidecar.wait_for(Exited, RANKS)
        assert run.process.poll() is None, "it waits for the next round"
    for exited in sidecar.messages(Exited):
        assert exited.code == 1
        assert exited.message.endswith(f"ValueError: rank {exited.rank} has no luck")


def test_sigterm_saves_stops_and_does_not_finish_the_job(
    tmp_path: Path, sidecar: FakeSidecar
) -> None:
    sidecar.start()
    with launch(tmp_path, sidecar, "--sleep-per-step", "0.2", "--steps", "10000") as run:
        sidecar.wait_for(Hello)
        begin(sidecar)
        until(lambda: run.step_of(0) >= 3, "three steps")
        run.process.terminate()
        assert run.wait() == 143
    last = [m for m in sidecar.messages(Exited)]
    assert [m.code for m in last] == [0, 0]
    assert sidecar.messages(Finish) == []


def test_finish_is_asked_until_it_is_released(tmp_path: Path, sidecar: FakeSidecar) -> None:
    sidecar.start()
    sidecar.released = False
    with launch(tmp_path, sidecar) as run:
        sidecar.wait_for(Hello)
        begin(sidecar)
        sidecar.wait_for(Finish, 2)
        assert run.process.poll() is None
        sidecar.released = True
        assert run.wait() == 0, run.err()
