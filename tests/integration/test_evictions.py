"""Evicted pods of a gang of real launchers and sidecars, whose kubelet and API server are played."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from demo.local import Run, memory_of, training_command
from tests.support.trainer.launched import until

from holdfast_core.api import RecoveryStatus, TrainingJobSpec, changed
from holdfast_core.ids import RestartRound, Worker
from holdfast_core.names import pod_name

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("forked_pods"),
]

GRACE_SECONDS = 300.0
"""Longer than a flush takes on any machine: a pod leaves as soon as it has flushed."""


UPLOADS_NOTHING: dict[str, object] = {
    "object": {"storeRef": {"name": "main"}, "every": {"steps": 1_000_000}}
}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Return a job of two workers that saves at stops only, so that an eviction must not interrupt a save."""
    yield from _started(tmp_path, {})


@pytest.fixture
def run_without_copies(tmp_path: Path) -> Iterator[Run]:
    """Return a job like `run` without copies on peers, whose interval asks for no upload."""
    yield from _started(tmp_path, {"peer": {"copies": 0}, **UPLOADS_NOTHING})


@pytest.fixture(params=[2, 3], ids=["all workers", "two of three workers"])
def run_that_uploads_nothing(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    """Return a job with one copy of each shard, whose interval asks for no upload."""
    yield from _started(tmp_path, UPLOADS_NOTHING, workers=request.param)


def _started(tmp_path: Path, tiers: dict[str, object], *, workers: int = 2) -> Iterator[Run]:
    memory = memory_of(tmp_path)
    run = Run(tmp_path, memory, "gpt", training_command(1_000_000))
    run.cluster.job = changed(run.cluster.job, spec=_spec(run, tiers, workers=workers))
    run.start()
    try:
        yield run
    finally:
        run.close()
        shutil.rmtree(memory, ignore_errors=True)


def _spec(run: Run, tiers: dict[str, object], *, workers: int = 2) -> TrainingJobSpec:
    return TrainingJobSpec.from_dict(
        {
            "workers": workers,
            "template": run.cluster.job.spec.template,
            "checkpoint": {"interval": {"steps": 1_000_000}, **tiers},
        }
    )


def trains(run: Run, round_: int) -> bool:
    assert not run.failed, run.explain()
    state = run.cluster.coordinator
    return state is not None and state.round == round_ and state.running


@pytest.mark.fault("A pod of a gang without copies on peers is evicted (coordinator, other worker)")
@pytest.mark.parametrize("worker", [0, 1], ids=["coordinator", "other"])
def test_without_copies_an_evicted_pod_loses_no_step(run_without_copies: Run, worker: int) -> None:
    """The gang persists the step at which it stopped before the pod ends, although the step is not due."""
    run = run_without_copies
    record = evict(run, worker)
    assert (record.lost_steps, record.workers) == (0, (worker,)), run.explain()
    assert record.sources["object"] == 1, run.explain()


@pytest.mark.fault("A coordinator's pod is evicted while its gang trains")
def test_the_eviction_of_the_coordinator_loses_no_step(run: Run) -> None:
    """Its sidecar commits the last step of the gang, and its launcher hosts the store of the ranks."""
    record = evict(run, 0)
    assert (record.lost_steps, record.workers) == (0, (0,)), run.explain()
    assert record.sources is not None
    assert record.sources == {"memory": 1, "peer": 1}, run.explain()


def test_workers_that_leave_together_lose_no_step(run_that_uploads_nothing: Run) -> None:
    """The copies of worker 0 are on worker 1, which leaves, too: only the object store keeps the step."""
    run = run_that_uploads_nothing
    record = evict(run, 0, 1)
    assert (record.lost_steps, record.workers) == (0, (0, 1)), run.explain()
    assert record.sources["object"] >= 1, run.explain()


def test_workers_that_leave_together_do_not_wait_for_a_store_that_fails(
    run_that_uploads_nothing: Run,
) -> None:
    """Their grace period is an hour, and they give up after 20 seconds in which no upload succeeds."""
    run = run_that_uploads_nothing
    until(lambda: trains(run, 0), "the first step of every rank", seconds=600)
    store = run.base / "store"
    shutil.rmtree(store, ignore_errors=True)
    store.write_text("not a directory")
    job = run.cluster.job
    pods = [run.cluster.pods[pod_name(job.name, job.uid, worker, 0)] for worker in (0, 1)]
    leave(run, [pod.spec.name for pod in pods], grace_seconds=3600.0)
    for pod in pods:
        assert not pod.node.exists()


def leave(run: Run, pods: Sequence[str], *, grace_seconds: float) -> None:
    """Evict pods at the same time, and wait until all are gone."""
    with ThreadPoolExecutor(len(pods)) as threads:
        list(threads.map(lambda pod: run.cluster.evict(pod, grace_seconds), pods))


def evict(run: Run, *workers: int) -> RecoveryStatus:
    """Evict workers of a gang that trains. Return the recovery once the gang trains again."""
    until(lambda: trains(run, 0), "the first step of every rank", seconds=600)
    job = run.cluster.job
    pods = [pod_name(job.name, job.uid, Worker(worker), RestartRound(0)) for worker in workers]
    leave(run, pods, grace_seconds=GRACE_SECONDS)

    def recovery() -> RecoveryStatus | None:
        """Return the record of the recovery, which the operator completes after the gang trains again."""
        assert not run.failed, run.explain()
        record = run.cluster.job.status.last_recovery
        return record if record is not None and record.total_seconds is not None else None

    until(lambda: recovery() is not None, "the gang to train again", seconds=600)
    record = recovery()
    assert record.round == 1, run.explain()
    assert record.restored_step is not None
    return record
