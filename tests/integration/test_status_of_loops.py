"""The status of a whole job, from the first step to Complete, for each API that its script may use.

The gang consists of real processes: launchers, ranks and sidecars. The operator's decisions are real, and
only the cluster is simulated.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo.local import Run
from tests.support.trainer.launched import until

from holdfast_core.api import JobCondition, JobPhase
from holdfast_core.names import pod_name

STEPS = 43
"""Not a multiple of the interval of 10, so step 43 is saved only because it is the last."""

SET_UP = """
import time
import holdfast, torch, torch.distributed as dist
dist.init_process_group("gloo")
weight = torch.zeros(8)
state = {"weight": weight, "rng": holdfast.RNG()}
def train():
    gradient = torch.ones(8)
    dist.all_reduce(gradient)
    weight.add_(gradient)
    time.sleep(0.05)
"""
WITH_STEPS = """
with holdfast.Checkpointer() as ckpt:
    for _ in ckpt.steps(total=STEPS, state=state):
        train()
"""
WITH_SHOULD_SAVE = """
with holdfast.Checkpointer() as ckpt:
    step = ckpt.restore(state) or 0
    while step < STEPS:
        train()
        step += 1
        if ckpt.should_save(step) or step == STEPS:
            ckpt.save(step, state)
"""
WITHOUT_CONTEXT_MANAGER = """
step = holdfast.restore(state) or 0
while step < STEPS:
    train()
    step += 1
    if step % 10 == 0 or step == STEPS:
        holdfast.save(step, state)
"""
TEAR_DOWN = """
dist.barrier()
dist.destroy_process_group()
"""

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="holdfast-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(WITH_STEPS, id="steps"),
        pytest.param(WITH_SHOULD_SAVE, id="restore, should_save, save"),
        pytest.param(WITHOUT_CONTEXT_MANAGER, id="module-level restore and save"),
    ],
)
def test_the_status_is_true_while_it_runs_and_final_at_the_end(
    loop: str, tmp_path: Path, memory: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SET_UP + loop.replace("STEPS", str(STEPS)) + TEAR_DOWN)
    launch = (sys.executable, "-m", "holdfast", "run", "--", sys.executable, str(script))
    run = Run(tmp_path, memory, "job", launch)
    phases: set[str] = set()

    def status_is(wanted: str, round_: int) -> bool:
        assert not run.failed, run.explain()
        status = run.cluster.job.status
        phases.add(status.phase)
        return status.phase == wanted and status.restart_round == round_

    run.start()
    try:
        until(lambda: status_is(JobPhase.RUNNING, 0), "the first round to run", 600)
        until(lambda: (run.cluster.job.status.last_committed_step or 0) >= 10, "a commit", 300)
        killed = pod_name("job", run.cluster.job.uid, 1, run.cluster.job.status.members[1])
        for pid in run.cluster.pods[killed].rank_pids():
            os.kill(pid, signal.SIGKILL)
        until(lambda: status_is(JobPhase.SUCCEEDED, 1), "the end of round 1", 600)
    finally:
        run.close()
    status = run.cluster.job.status
    assert status.is_true(JobCondition.COMPLETE)
    assert status.step == status.last_committed_step == STEPS
    assert status.last_persisted is not None
    assert status.last_persisted.step == STEPS
    assert status.goodput is not None
    assert status.goodput.training_seconds >= 0.05 * STEPS / 2
    assert 0.0 < status.goodput.ratio < 1.0
    record = status.last_recovery
    assert record is not None
    assert record.total_seconds == pytest.approx(sum(record.phases().values()))
    assert set(record.phases()) >= {"detect", "seal", "rendezvous", "first_step"}
    assert JobPhase.RESTARTING in phases
