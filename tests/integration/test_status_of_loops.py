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
from demo.local import WORKERS, Run
from tests.support.trainer.launched import until

from holdfast_core.api import HangsSpec, JobCondition, JobPhase, changed
from holdfast_core.names import pod_name
from holdfast_operator.model.reasons import Reason

STEPS = 43
"""Not a multiple of the interval of 10, so step 43 is saved only because it is the last."""

SET_UP = """
import os, time
import holdfast, torch, torch.distributed as dist
dist.init_process_group("gloo")
weight = torch.zeros(8)
state = {"weight": weight, "rng": holdfast.RNG()}
def train():
    if os.environ["HOLDFAST_ROUND"] == "0" and dist.get_rank() == 1 and weight[0] > 60:
        time.sleep(3600)  # round 0 must not end before its failure
    gradient = torch.ones(8)
    try:
        dist.all_reduce(gradient)
    except RuntimeError:
        time.sleep(3600)  # this rank lost its peer: it must not fail before the launcher of the peer reports
        raise
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
        is_last = step == STEPS
        if ckpt.should_save(step) or is_last:
            ckpt.save(step, state, is_last=is_last)
"""
WITHOUT_CONTEXT_MANAGER = """
step = holdfast.restore(state) or 0
saved = None
while step < STEPS:
    train()
    step += 1
    if step == STEPS and saved is not None:
        saved.wait()  # on a busy machine the last save would be skipped, because the one before goes on
    if step % 10 == 0 or step == STEPS:
        saved = holdfast.save(step, state)
"""
TEAR_DOWN = """
dist.barrier()
dist.destroy_process_group()
"""

SLEEPS = None
"""The failure of a rank that sleeps for ever, which the script itself does."""
HANG_SECONDS = 20
NO_HANG_SECONDS = 3600

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("forked_pods"),
]


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="holdfast-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.fault("A rank is killed in a job, for each way to save")
@pytest.mark.fault("A rank's process is stopped (SIGSTOP) while the gang trains")
@pytest.mark.fault("A rank sleeps for ever before a collective")
@pytest.mark.parametrize(
    ("loop", "failure", "reason"),
    [
        pytest.param(WITH_STEPS, signal.SIGSTOP, Reason.HUNG, id="steps; a rank is stopped"),
        pytest.param(
            WITH_SHOULD_SAVE,
            signal.SIGKILL,
            Reason.RANK_FAILED,
            id="restore, should_save, save; a rank is killed",
        ),
        pytest.param(
            WITHOUT_CONTEXT_MANAGER,
            SLEEPS,
            Reason.HUNG,
            id="module-level restore and save; a rank sleeps for ever",
        ),
    ],
)
def test_the_status_is_true_while_it_runs_and_final_at_the_end(
    loop: str, failure: signal.Signals | None, reason: Reason, tmp_path: Path, memory: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SET_UP + loop.replace("STEPS", str(STEPS)) + TEAR_DOWN)
    launch = (sys.executable, "-m", "holdfast", "run", "--", sys.executable, str(script))
    run = Run(tmp_path, memory, "job", launch)
    spec = run.cluster.job.spec
    seconds = HANG_SECONDS if reason is Reason.HUNG else NO_HANG_SECONDS
    policy = changed(spec.failure_policy, hangs=HangsSpec(seconds=seconds))
    run.cluster.job = changed(run.cluster.job, spec=changed(spec, failure_policy=policy))
    phases: set[str] = set()

    def status_is(wanted: str, round_: int) -> bool:
        assert not run.failed, run.explain()
        status = run.cluster.job.status
        phases.add(status.phase)
        return status.phase == wanted and status.restart_round == round_

    run.start()
    try:
        until(lambda: status_is(JobPhase.RUNNING, 0), "the first round to run", 600)
        until(lambda: (run.cluster.job.status.last_committed_step or 0) >= 10, "a commit")
        killed = pod_name("job", run.cluster.job.uid, 1, run.cluster.job.status.members[1])
        for pid in run.cluster.pods[killed].rank_pids():
            if failure is not None:
                os.kill(pid, failure)
        until(lambda: status_is(JobPhase.SUCCEEDED, 1), "the end of round 1", 600)
    finally:
        run.close()
    status = run.cluster.job.status
    assert status.is_true(JobCondition.COMPLETE)
    assert status.step == status.last_committed_step == STEPS
    assert status.last_persisted.step == STEPS
    assert status.goodput.training_seconds >= 0.05 * STEPS / 2
    assert 0.0 < status.goodput.ratio < 1.0
    record = status.last_recovery
    assert (record.reason, record.workers) == (reason, (1,))
    assert record.sources.keys() <= {"memory", "node"}, "all pods stayed"
    assert sum(record.sources.values()) == WORKERS
    if reason is Reason.HUNG:
        begun = next(event for event in run.cluster.events if "round 1 begins" in event)
        assert "rank 1 did not arrive" in begun
        assert "the others are in: all_reduce (distributed_c10d.py:" in begun
    assert record.total_seconds == pytest.approx(sum(record.phases().values()))
    assert set(record.phases()) >= {"detect", "seal", "rendezvous", "first_step"}
    assert JobPhase.RESTARTING in phases
