"""The peers of the benchmark of recoveries: what their ranks save is what they load, and what their pods run.

The store is a dictionary. The benchmark itself uses MinIO.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.recovery.peers import dcp_async, torch_save, training
from benchmarks.recovery.peers.jobset import JobSetOfDcp
from benchmarks.recovery.peers.peer import Peer
from benchmarks.recovery.peers.plain_job import PlainJob
from tests.support.trainer.launched import until
from torch.distributed.checkpoint.api import CheckpointException


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, bytes]:
    objects: dict[str, bytes] = {}

    def upload(file: str, key: str) -> None:
        objects[key] = Path(file).read_bytes()

    def download(key: str, file: str) -> bool:
        Path(file).write_bytes(objects.get(key, b""))
        return key in objects

    def s3(method: str, key: str, body: bytes) -> int:
        assert method == "PUT"
        objects[key] = body
        return 200

    for module in (dcp_async, torch_save):
        monkeypatch.setattr(module, "upload", upload)
        monkeypatch.setattr(module, "download", download)
    monkeypatch.setattr(training, "s3", s3)
    monkeypatch.setattr(dcp_async, "_FOLDER", str(tmp_path / "dcp"))
    monkeypatch.setattr(torch_save, "_FILE", str(tmp_path / "state.pt"))
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    return objects


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("gang")
@pytest.mark.parametrize("new", [torch_save.TorchSave, dcp_async.DcpAsync])
def test_a_rank_loads_what_it_saved_last(new: Any, store: dict[str, bytes]) -> None:
    saved: dict[str, Any] = {"step": 20, "ballast0": torch.arange(1000.0)}
    ranks = new()
    ranks.save(20, saved)
    saved["step"] = 40
    saved["ballast0"].add_(1.0)
    ranks.save(40, saved)
    until(lambda: store.get(training.LATEST) == b"40", "the newest step to be named")
    loaded: dict[str, Any] = {"step": 0, "ballast0": torch.zeros(1000)}
    new().load(40, loaded)
    assert loaded["step"] == 40
    assert torch.equal(loaded["ballast0"], torch.arange(1000.0) + 1.0)


@pytest.mark.usefixtures("gang")
@pytest.mark.parametrize("new", [torch_save.TorchSave, dcp_async.DcpAsync])
def test_a_rank_without_its_file_does_not_train(new: Any, store: dict[str, bytes]) -> None:
    with pytest.raises((FileNotFoundError, CheckpointException), match="the store has no"):
        new().load(20, {"step": 0, "ballast0": torch.zeros(1000)})


@pytest.mark.parametrize(
    ("peer", "program"),
    [(PlainJob, torch_save), (JobSetOfDcp, dcp_async)],
)
def test_a_peer_runs_a_program_of_this_package(peer: type[Peer], program: ModuleType) -> None:
    assert program.__name__ == f"{training.__package__}.{peer.PROGRAM}"
