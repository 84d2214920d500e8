"""The four walks, each run with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from demo.local import Run, memory_of
from tests.support.operator.operator_account import running_account
from tests.support.operator.operator_bed import OperatorBed, opened_bed
from tests.support.trainer.launched import until
from tools.trace.recording import Call, Recording

from holdfast_core.api import TrainingJobSpec, changed

SECONDS = 300.0
"""Longest wait for one event."""

_LOOP = """
import os, sys, time
import torch, holdfast
def told(step):
    while not os.path.exists(os.path.join(sys.argv[1], f"save-{step}")):
        time.sleep(0.01)
state = {"weight": torch.zeros(1000), "rng": holdfast.RNG()}
with holdfast.Checkpointer(*sys.argv[2:]) as ckpt:
    ckpt.restore(state)
    for step in (1, 2):
        told(step)
        ckpt.save(step, state).wait("local")
        with open(os.path.join(sys.argv[1], f"local-{step}"), "w"):
            pass
    told(3)
"""
"""Two saves, each when the file that asks for it exists. The first one prepares what later ones use."""


@dataclass(frozen=True, slots=True)
class Walk:
    title: str
    record: Callable[[Recording, Path], None]


def a_save_in_a_pod(recording: Recording, folder: Path) -> None:
    """Save a step in two workers, until the object store has it."""
    script = _script(folder)
    launch = (sys.executable, "-m", "holdfast", "run", "--", sys.executable, str(script))
    with patch.dict(os.environ, recording.environment()):  # the pods inherit them
        run = Run(folder, memory_of(folder), "job", (*launch, str(folder)))
        spec = TrainingJobSpec.from_dict(
            {
                "workers": 2,
                "template": run.cluster.job.spec.template,
                "checkpoint": {
                    "interval": {"steps": 1},
                    "object": {"storeRef": {"name": "main"}, "every": {"steps": 1}},
                },
            }
        )
        run.cluster.job = changed(run.cluster.job, spec=spec)
        run.start()

        def persisted(step: int) -> bool:
            assert not run.failed, run.explain()
            last = run.cluster.job.status.last_persisted
            return last is not None and last.step >= step

        try:
            _record_second_save(recording, folder, persisted)
        finally:
            run.close()


def a_save_in_a_folder(recording: Recording, folder: Path) -> None:
    """Save a step in one process, until it is durable in the folder."""
    command = [sys.executable, str(_script(folder)), str(folder), str(folder / "ckpt")]
    variables = {**os.environ, **recording.environment()}
    process = subprocess.Popen(command, env=variables)

    def saved(step: int) -> bool:
        assert process.poll() is None, "the training ended"
        return (folder / f"local-{step}").exists()

    try:
        _record_second_save(recording, folder, saved)
        _tell(folder, 3)
        process.wait(SECONDS)
    finally:
        process.kill()
        process.wait()


def the_start_of_a_job(recording: Recording, folder: Path) -> None:
    """Create a TrainingJob, until the operator reports that it trains. The kubelets are played.

    The operator is up and has read the cluster when the walk begins, as it is when a user applies a job.
    """
    with _operator(recording, folder) as bed, recording.walk():
        bed.train()


def a_lost_pod(recording: Recording, folder: Path) -> None:
    """Delete a pod of a gang that trains, until it trains again. The kubelets are played."""
    with _operator(recording, folder) as bed:
        bed.train()
        bed.store_at(0, 40)
        with recording.walk():
            bed.lose(1)
            bed.until_recovered(1)


WALKS = (
    Walk("A save in a pod, until the object store has it", a_save_in_a_pod),
    Walk("A save in a folder, until it is durable", a_save_in_a_folder),
    Walk("`kubectl apply` of a TrainingJob, until it trains: the operator", the_start_of_a_job),
    Walk("A lost pod, until the gang trains again: the operator", a_lost_pod),
)


def calls_of(walk: Walk) -> Sequence[Call]:
    """Run the walk and return its calls."""
    with tempfile.TemporaryDirectory(prefix="holdfast-trace-") as name:
        folder = Path(name)
        recording = Recording(folder / "calls")
        walk.record(recording, folder / "work")
        return recording.calls()


@contextmanager
def _operator(recording: Recording, folder: Path) -> Iterator[OperatorBed]:
    """Run an operator with a real API server, in which no job exists."""
    folder.mkdir()
    with running_account(folder) as account, opened_bed(account, "team-a", folder) as bed:
        bed.executed = True
        bed.settings |= recording.environment()
        bed.start_operator()
        until(lambda: _is_ready(bed), "the operator has read the cluster", SECONDS)
        yield bed


def _is_ready(bed: OperatorBed) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{bed.health_port}/readyz") as reply:
            return bool(reply.status == 200)
    except OSError:  # no port yet, or 503
        return False


def _script(folder: Path) -> Path:
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(_LOOP)
    return script


def _record_second_save(
    recording: Recording, folder: Path, is_saved: Callable[[int], bool]
) -> None:
    """Let the script save step 1, and record how it saves step 2."""
    _tell(folder, 1)
    until(lambda: is_saved(1), "the first save", SECONDS)
    with recording.walk():
        _tell(folder, 2)
        until(lambda: is_saved(2), "the second save", SECONDS)


def _tell(folder: Path, step: int) -> None:
    (folder / f"save-{step}").touch()
