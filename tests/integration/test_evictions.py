"""Evicted pods of a gang of real launchers and sidecars, whose kubelet and API server are played."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo.local import Run, memory_of, training_command
from tests.support.trainer.launched import until

from holdfast_core.api import RecoveryStatus, TrainingJobSpec, changed
from holdfast_core.names import pod_name

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

GRACE_SECONDS = 300.0
"""Longer than a flush takes on any machine: a pod leaves as soon as it has flushed."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Return a job of two workers that saves at stops only, so that an eviction must not interrupt a save."""
    memory = memory_of(tmp_path)
    run = Run(tmp_path, memory, "gpt", training_command(1_000_000))
    template = run.cluster.job.spec.template
    spec = TrainingJobSpec.from_dict(
        {"workers": 2, "template": template, "checkpoint": {"interval": {"steps": 1_000_000}}}
    )
    run.cluster.job = changed(run.cluster.job, spec=spec)
    run.start()
    try:
        yield run
    finally:
        run.close()
        shutil.rmtree(memory, ignore_errors=True)


def trains(run: Run, round_: int) -> bool:
    assert not run.failed, run.explain()
    state = run.cluster.coordinator
    return state is not None and state.round == round_ and state.running


def test_the_eviction_of_the_coordinator_loses_no_step(run: Run) -> None:
    """Its sidecar commits the last step of the gang, and its launcher hosts the store of the ranks."""
    until(lambda: trains(run, 0), "the first step of every rank", seconds=600)
    job = run.cluster.job
    run.cluster.evict(pod_name(job.name, job.uid, 0, 0), GRACE_SECONDS)

    def recovery() -> RecoveryStatus | None:
        """Return the record of the recovery, which the operator completes after the gang trains again."""
        assert not run.failed, run.explain()
        record = run.cluster.job.status.last_recovery
        return record if record is not None and record.total_seconds is not None else None

    until(lambda: recovery() is not None, "the gang to train again", seconds=600)
    record = recovery()
    assert record is not None
    assert record.round == 1, run.explain()
    assert (record.lost_steps, record.workers) == (0, (0,)), run.explain()
    assert record.restored_step is not None
    assert record.sources is not None
    assert (record.sources.memory, record.sources.peer) == (1, 1), run.explain()
