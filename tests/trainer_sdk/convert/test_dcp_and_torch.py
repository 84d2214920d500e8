"""States are exported for torch.distributed.checkpoint and torch.load, and weights imported from both."""

from __future__ import annotations

import os
import re
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.hang import HANG_SECONDS
from tests.support.shards.folders import damage, write_checkpoint
from tests.support.shards.placements import Tensor
from torch.distributed import checkpoint as untyped

import holdfast
from holdfast.__main__ import main

dcp: Any = untyped


def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with step 3 of a model, its optimizer, and other values."""
    model, optimizer = make(1)
    state = {
        "model": model,
        "optim": optimizer,
        "rng": holdfast.RNG(),
        "curve": np.arange(3.0),
        "z": torch.ones(2, dtype=torch.complex128),
        "epoch": 2,
    }
    with holdfast.Checkpointer(tmp_path / "ckpt", interval_steps=3, when_busy="wait") as ckpt:
        for _ in ckpt.steps(3, state):
            step(model, optimizer)
    return tmp_path / "ckpt"


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = make(1)
    for _ in range(3):
        step(model, optimizer)
    return model, optimizer


def assert_continues(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check that a further step ends in the same bits as without the export."""
    expected = trained()
    for pair in (expected, (model, optimizer)):
        step(*pair)
    for name, tensor in expected[0].state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_a_training_continues_from_a_torch_file(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    assert main(["export", str(folder), "--format", "torch", "--to", str(out)]) == 0
    found = torch.load(out, weights_only=True)
    assert found["epoch"] == 2
    assert found["curve"].tolist() == [0.0, 1.0, 2.0]
    assert found["z"].dtype == torch.complex128
    assert "rng" in found
    model, optimizer = make(2)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optim"])
    assert_continues(model, optimizer)


def test_one_entry_of_the_state_is_a_torch_file_of_its_own(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.pt"
    words = ["export", str(folder), "--format", "torch", "--to", str(out), "--entry", "model"]
    assert main([*words, "--dtype", "float16"]) == 0
    found = torch.load(out, weights_only=True)
    assert {name: t.half().tolist() for name, t in trained()[0].state_dict().items()} == {
        name: tensor.tolist() for name, tensor in found.items()
    }
    assert {tensor.dtype for tensor in found.values()} == {torch.float16}
    assert main(words) == 6  # the file exists
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "model.pt"]


def test_a_training_continues_from_a_dcp_checkpoint(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["export", str(folder), "--format", "dcp", "--to", str(out)]) == 0
    model, optimizer = make(2)
    step(model, optimizer)  # so that DCP has tensors to fill
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "epoch": 0}
    dcp.load(state, storage_reader=dcp.FileSystemReader(out), no_dist=True)
    model.load_state_dict(state["model"])  # type: ignore[arg-type]
    optimizer.load_state_dict(state["optim"])  # type: ignore[arg-type]
    assert state["epoch"] == 2
    assert_continues(model, optimizer)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        pytest.param(
            lambda path: torch.jit.script(torch.nn.Linear(1, 1)).save(path),
            r"found an archive of TorchScript: .*torch\.jit\.load\(path\)\.state_dict\(\)",
            id="TorchScript",
        ),
        pytest.param(
            lambda path: torch.save(torch.nn.Linear(1, 1), path),
            r"found an object of torch\.nn\.modules\.linear\.Linear, .*model\.state_dict\(\)",
            id="a module",
        ),
        pytest.param(
            lambda path: path.write_bytes(b"hello"),
            r"found a file that torch\.load cannot",
            id="text",
        ),
    ],
)
def test_another_file_than_one_of_tensors_is_refused_without_advice_that_does_not_apply(
    write: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "model.pt")
    words = ["import", str(tmp_path / "model.pt"), "--format", "torch", "--to", str(tmp_path / "o")]
    assert main(words) == 1
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert "weights_only" not in error
    assert "safe_globals" not in error


@pytest.mark.fault("A state with tensors within tuples is exported for DCP")
def test_tensors_within_tuples_are_in_a_dcp_checkpoint(tmp_path: Path) -> None:
    """DCP pickles a tuple as one value. The states of numpy's generators are tuples with an array."""
    state = {"pair": (torch.arange(3.0), 2), "list": [(np.arange(2), {"deep": torch.ones(1)})]}
    with holdfast.Checkpointer(tmp_path / "ckpt") as ckpt:
        ckpt.save(1, state).wait(timeout=HANG_SECONDS)
    words = ["export", str(tmp_path / "ckpt"), "--format", "dcp", "--to", str(tmp_path / "out")]
    assert main(words) == 0
    found: dict[str, Any] = {"pair": None, "list": None}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "out"), no_dist=True)
    assert (found["pair"][0].tolist(), found["pair"][1]) == ([0.0, 1.0, 2.0], 2)
    assert found["list"][0][0].tolist() == [0, 1]
    assert found["list"][0][1]["deep"].tolist() == [1.0]


def test_a_dcp_export_has_one_tensor_in_memory_at_a_time(tmp_path: Path) -> None:
    parts = {
        f"model.w{n}": (Tensor("F32", (2048, 1024), [0]), np.full((2048, 1024), n, np.float32))
        for n in range(24)
    }
    write_checkpoint(tmp_path / "ckpt", parts, [2])
    tracemalloc.start()
    try:
        words = ["export", str(tmp_path / "ckpt"), "--format", "dcp", "--to", str(tmp_path / "out")]
        assert main(words) == 0
        assert tracemalloc.get_traced_memory()[1] < 128 << 20  # of 192 MiB
    finally:
        tracemalloc.stop()
    found = {"model.w7": torch.empty(2048, 1024)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "out"), no_dist=True)
    assert found["model.w7"].unique().tolist() == [7.0]


@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_damaged_bytes_leave_no_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    whole = np.ones((1 << 16, 4), np.float32)
    write_checkpoint(tmp_path / "ckpt", {"w": (Tensor("F32", whole.shape), whole)}, [1])
    path = damage(tmp_path / "ckpt", 0, offset=700_000)
    words = ["export", str(tmp_path / "ckpt"), "--format", form, "--to", str(tmp_path / "out")]
    assert main(words) == 3
    assert str(path) in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


@pytest.mark.parametrize("form", ["hf", "dcp", "torch"])
def test_an_array_of_a_type_that_torch_does_not_have_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    with holdfast.Checkpointer(tmp_path / "ckpt") as ckpt:
        ckpt.save(1, {"model": {"sum": np.ones(3, np.longdouble)}}).wait(timeout=HANG_SECONDS)
    words = ["export", str(tmp_path / "ckpt"), "--format", form, "--to", str(tmp_path / "out")]
    assert main(words) == 1
    assert f"sum: torch has no type {np.dtype(np.longdouble)}" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["dcp", "torch"])
@pytest.mark.parametrize("entry", ["model", "net"])
def test_weights_are_imported_alone_or_below_their_entry(
    tmp_path: Path, form: str, entry: str
) -> None:
    weights = make(4)[0].state_dict()
    state: Any = dict(weights) if entry == "net" else {"model": weights, "step": 9}
    source = tmp_path / "source"
    if form == "dcp":
        dcp.save(state, storage_writer=dcp.FileSystemWriter(source), no_dist=True)
    else:
        torch.save(state, source)
    words = ["import", str(source), "--format", form, "--to", str(tmp_path / "ckpt")]
    assert main([*words, "--entry", entry]) == 0
    model = make(5)[0]
    with holdfast.Checkpointer(tmp_path / "ckpt") as ckpt:
        assert ckpt.restore({entry: model}) == 0
    for name, tensor in weights.items():
        assert torch.equal(model.state_dict()[name], tensor)


class Harmful:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("harm"),)


@pytest.mark.fault("A torch file to import contains code")
@pytest.mark.fault("A shard, a manifest or a layout is hostile")
@pytest.mark.fault("A file of torch to import has nested tensors, no tensors or code")
@pytest.mark.parametrize(
    ("what", "code", "text"),
    [
        ("a pickle of code", 1, "found an object of"),
        ("no file", 5, "there is no file or folder"),
        ("no tensors", 1, "choose the key with --entry; found epoch, weights"),
        ("other tensors", 1, "choose the key with --entry; found rng, weights"),
        ("text", 1, "torch.load cannot read"),
    ],
)
def test_a_torch_file_without_weights_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
    code: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "source.pt"
    if what == "a pickle of code":
        torch.save({"w": torch.ones(2), "x": Harmful()}, source)
    elif what == "no tensors":
        torch.save({"epoch": 1, "weights": {"w": torch.ones(2)}}, source)
    elif what == "other tensors":
        torch.save({"rng": torch.get_rng_state(), "weights": {"w": torch.ones(2)}}, source)
    elif what == "text":
        source.write_text("hello")
    words = ["import", str(source), "--format", "torch", "--to", str(tmp_path / "ckpt")]
    assert main(words) == code
    assert text in capsys.readouterr().err
    assert not (tmp_path / "harm").exists()
    with holdfast.Checkpointer(tmp_path / "ckpt") as ckpt:
        assert ckpt.list() == ()


@pytest.mark.fault("A DCP checkpoint to import is damaged")
@pytest.mark.parametrize(
    ("what", "code", "text"),
    [
        ("no file", 1, "__0_0.distcp): No such file"),
        ("cut file", 3, "source: RuntimeError: PytorchStreamReader"),
        ("cut metadata", 3, "source/.metadata: UnpicklingError"),
    ],
)
def test_a_damaged_dcp_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, code: int, text: str
) -> None:
    source = tmp_path / "source"
    state = {"model": {"w": torch.ones(100)}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(source), no_dist=True)
    if what == "no file":
        (source / "__0_0.distcp").unlink()
    elif what == "cut file":
        os.truncate(source / "__0_0.distcp", 10)
    else:
        os.truncate(source / ".metadata", 10)
    words = ["import", str(source), "--format", "dcp", "--to", str(tmp_path / "ckpt")]
    assert main(words) == code
    assert text in capsys.readouterr().err


@pytest.mark.fault("An export meets a full disk")
@pytest.mark.parametrize("form", ["hf", "dcp", "torch"])
def test_a_full_disk_is_named_and_leaves_no_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """A limit on the length of files stands for the full disk."""
    whole = np.ones((1 << 16, 4), np.float32)
    write_checkpoint(tmp_path / "ckpt", {"model.w": (Tensor("F32", whole.shape), whole)}, [1])
    words = ["export", str(tmp_path / "ckpt"), "--format", form, "--to", str(tmp_path / "out")]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        assert main(words) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capsys.readouterr().err
    assert f"writing {tmp_path}/out" in error
    assert "File too large" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


def test_a_folder_that_is_no_dcp_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["import", str(tmp_path), "--format", "dcp", "--to", str(tmp_path / "ckpt")]
    assert main(words) == 2
    assert "expected a DCP checkpoint, found no file .metadata" in capsys.readouterr().err
