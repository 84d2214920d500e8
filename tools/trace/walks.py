"""The four walks, each run with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from demo.local import Run, memory_of
from tests.support.chart import NAMESPACE
from tests.support.operator.operator_account import (
    OperatorAccount,
    audit_arguments,
    install_crds,
)
from tests.support.operator.operator_bed import OperatorBed
from tests.support.operator.played_kubelet import PlayedKubelet
from tests.support.servers.control_plane import ControlPlane
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
    with _variables(recording.environment()):
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
            _tell(folder, 1)
            until(lambda: persisted(1), "the first step in the object store", SECONDS)
            with recording.walk():
                _tell(folder, 2)
                until(lambda: persisted(2), "the second step in the object store", SECONDS)
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
        _tell(folder, 1)
        until(lambda: saved(1), "the first step in the folder", SECONDS)
        with recording.walk():
            _tell(folder, 2)
            until(lambda: saved(2), "the second step in the folder", SECONDS)
        _tell(folder, 3)
        process.wait(SECONDS)
    finally:
        process.kill()
        process.wait()


def the_start_of_a_job(recording: Recording, folder: Path) -> None:
    """Create a TrainingJob, until the operator reports that it trains. The kubelets are played."""
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
    with ExitStack() as stack:
        plane = stack.enter_context(ControlPlane(extra_args=audit_arguments(folder)))
        install_crds(plane)
        plane.create_namespace(NAMESPACE)
        account = OperatorAccount(plane, folder)
        account.install()
        plane.create_namespace("team-a")
        account.may_watch("team-a")
        kubelet = PlayedKubelet(plane, "team-a", "node-a")
        kubelet.register()
        stack.callback(kubelet.close)
        bed = OperatorBed(account, "team-a", folder, kubelet, executed=True)
        bed.settings |= recording.environment()
        bed.start_operator()
        stack.callback(bed.kill_operator)
        yield bed


def _script(folder: Path) -> Path:
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(_LOOP)
    return script


def _tell(folder: Path, step: int) -> None:
    (folder / f"save-{step}").touch()


@contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, which the pods inherit."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
