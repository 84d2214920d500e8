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
    run.cluster.job = changed(run.cluster.job, spec=_spec(run, {}))
    run.start()
    try:
        yield run
    finally:
        run.close()
        shutil.rmtree(memory, ignore_errors=True)


@pytest.fixture
def run_without_copies(tmp_path: Path) -> Iterator[Run]:
    """Return a job like `run` without copies on peers, whose interval asks for no upload."""
    memory = memory_of(tmp_path)
    run = Run(tmp_path, memory, "gpt", training_command(1_000_000))
    tiers = {
        "peer": {"copies": 0},
        "object": {"storeRef": {"name": "main"}, "every": {"steps": 1_000_000}},
    }
    run.cluster.job = changed(run.cluster.job, spec=_spec(run, tiers))
    run.start()
    try:
        yield run
    finally:
        run.close()
        shutil.rmtree(memory, ignore_errors=True)


def _spec(run: Run, tiers: dict[str, object]) -> TrainingJobSpec:
    return TrainingJobSpec.from_dict(
        {
            "workers": 2,
            "template": run.cluster.job.spec.template,
            "checkpoint": {"interval": {"steps": 1_000_000}, **tiers},
        }
    )


def trains(run: Run, round_: int) -> bool:
    assert not run.failed, run.explain()
    state = run.cluster.coordinator
    return state is not None and state.round == round_ and state.running


@pytest.mark.parametrize("worker", [0, 1], ids=["coordinator", "other"])
def test_without_copies_an_evicted_pod_loses_no_step(run_without_copies: Run, worker: int) -> None:
    """The gang persists the step at which it stopped before the pod ends, although the step is not due."""
    run = run_without_copies
    record = evict(run, worker)
    assert (record.lost_steps, record.workers) == (0, (worker,)), run.explain()
    assert record.sources is not None
    assert record.sources.object == 1, run.explain()


def test_the_eviction_of_the_coordinator_loses_no_step(run: Run) -> None:
    """Its sidecar commits the last step of the gang, and its launcher hosts the store of the ranks."""
    record = evict(run, 0)
    assert (record.lost_steps, record.workers) == (0, (0,)), run.explain()
    assert record.sources is not None
    assert (record.sources.memory, record.sources.peer) == (1, 1), run.explain()


def evict(run: Run, worker: int) -> RecoveryStatus:
    """Evict a worker of a gang that trains. Return the recovery once the gang trains again."""
    until(lambda: trains(run, 0), "the first step of every rank", seconds=600)
    job = run.cluster.job
    run.cluster.evict(pod_name(job.name, job.uid, worker, 0), GRACE_SECONDS)

    def recovery() -> RecoveryStatus | None:
        """Return the record of the recovery, which the operator completes after the gang trains again."""
        assert not run.failed, run.explain()
        record = run.cluster.job.status.last_recovery
        return record if record is not None and record.total_seconds is not None else None

    until(lambda: recovery() is not None, "the gang to train again", seconds=600)
    record = recovery()
    assert record is not None
    assert record.round == 1, run.explain()
    assert record.restored_step is not None
    return record
