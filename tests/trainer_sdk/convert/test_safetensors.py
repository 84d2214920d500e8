"""Weights are exported to safetensors files in the layout of Hugging Face, and imported from them."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tests.support import zygote
from tests.support.crash.failpoints import PANIC_EXIT_CODE, in_every_python
from tests.support.hang import HANG_SECONDS
from tests.support.shards.folders import damage, write_checkpoint
from tests.support.shards.placements import Tensor

import holdfast
from holdfast.__main__ import main
from holdfast.base.settings import current_environment
from holdfast.convert.exporting import complete_folder
from holdfast.convert.safetensors_files import read_model, write_model
from holdfast.convert.selection import entry_of
from holdfast_core.errors import ConfigError, CorruptionError, FormatError, UnsupportedStateError


class Model(torch.nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(10, 6)
        self.head = torch.nn.Parameter(torch.randn(3, 5).bfloat16())
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("scales", torch.ones(4).to(torch.float8_e4m3fn))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the steps 1 and 2 of a model and its optimizer."""
    model = Model()
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters()), "epoch": 3}
    with holdfast.Checkpointer(tmp_path / "ckpt", when_busy="wait") as ckpt:
        for step in (1, 2):
            with torch.no_grad():
                model.count.fill_(step)
            ckpt.save(step, state).wait(timeout=HANG_SECONDS)
    return tmp_path / "ckpt"


def weights() -> dict[str, torch.Tensor]:
    found = Model().state_dict()
    found["count"] = torch.tensor(2)
    return found


def assert_same(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(
            found[name].view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        )


def test_an_export_has_the_names_and_the_bits_of_the_model(folder: Path, tmp_path: Path) -> None:
    assert main(["export", str(folder), "--format", "hf", "--to", str(tmp_path / "out")]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert_same(load_file(tmp_path / "out/model.safetensors"), weights())
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_step_and_a_type_can_be_chosen(folder: Path, tmp_path: Path) -> None:
    words = ["export", f"{folder}@1", "--format", "hf", "--to", str(tmp_path / "out")]
    assert main([*words, "--dtype", "bfloat16"]) == 0
    found = load_file(tmp_path / "out/model.safetensors")
    assert found["count"].item() == 1
    assert found["embed.weight"].dtype == torch.bfloat16
    assert torch.equal(found["embed.weight"], weights()["embed.weight"].bfloat16())
    assert {found[name].dtype for name in ("scales", "mask")} == {torch.float8_e4m3fn, torch.bool}


@pytest.mark.parametrize("limit", [1, 100, 250])
def test_a_large_model_has_several_files_and_an_index(
    folder: Path, tmp_path: Path, limit: int
) -> None:
    with holdfast.open(folder) as opened, opened.at() as saved:
        (tmp_path / "out").mkdir()
        write_model(tmp_path / "out", entry_of(saved, "model", None), max_file_bytes=limit)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    total = sum(t.numel() * t.element_size() for t in weights().values())
    assert index["metadata"] == {"total_size": total}
    found: dict[str, torch.Tensor] = {}
    for file in files:
        one = load_file(tmp_path / "out" / file)
        size = sum(t.numel() * t.element_size() for t in one.values())
        assert size <= limit or sum(t.numel() > 0 for t in one.values()) == 1
        assert {index["weight_map"][name] for name in one} == {file}
        found |= one
    assert_same(found, weights())
    assert_same(read_model(tmp_path / "out"), weights())


def test_the_parts_of_all_ranks_are_exported_whole(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).random((64, 48), dtype=np.float32)
    tensors = {"model.w": (Tensor("F32", whole.shape, [1, 0]), whole)}
    write_checkpoint(tmp_path / "ckpt", tensors, [2, 2])
    words = ["export", str(tmp_path / "ckpt"), "--format", "hf", "--to", str(tmp_path / "out")]
    assert main(words) == 0
    found = load_file(tmp_path / "out/model.safetensors")["w"]
    assert np.array_equal(found.numpy(), whole)


def test_the_configuration_is_copied_without_weights(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "base"
    config.mkdir()
    for name in ("config.json", "tokenizer.json", "merges.txt"):
        (config / name).write_text(name)
    for name in ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"):
        (config / name).write_text("weights of another model")
    words = ["export", str(folder), "--format", "hf", "--to", str(tmp_path / "out")]
    assert main([*words, "--config-from", str(config)]) == 0
    found = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert found == ["config.json", "merges.txt", "model.safetensors", "tokenizer.json"]
    assert_same(load_file(tmp_path / "out/model.safetensors"), weights())


# ------------------------------------------------------------------------ failures


@pytest.mark.parametrize(
    ("step", "words", "code", "text"),
    [
        ("@7", [], 5, "expected step 7, found steps 1, 2"),
        ("", ["--entry", "net"], 2, "no tensors below 'net'.*model"),
        ("", ["--config-from", "/nowhere"], 2, "expected a config.json"),
    ],
    ids=str,
)
def test_a_wrong_choice_leaves_no_output(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    step: str,
    words: list[str],
    code: int,
    text: str,
) -> None:
    out = tmp_path / "out"
    assert main(["export", f"{folder}{step}", "--format", "hf", "--to", str(out), *words]) == code
    assert re.search(text, capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


def test_an_output_that_exists_is_not_changed(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    words = ["export", str(folder), "--format", "hf", "--to", str(out)]
    assert main(words) == 0  # an empty folder may be filled
    (out / "model.safetensors").write_text("mine")
    assert main(words) == 6
    assert (out / "model.safetensors").read_text() == "mine"


@pytest.mark.fault("An export is made to a mount point or a link")
@pytest.mark.parametrize("kind", ["link", "mount point"])
def test_a_folder_that_cannot_be_replaced_is_refused_before_the_export(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    out = tmp_path / "out" if kind == "link" else Path("/dev/shm")
    if kind == "link":
        (tmp_path / "empty").mkdir()
        out.symlink_to(tmp_path / "empty")
    assert main(["export", str(folder), "--format", "hf", "--to", str(out)]) == 6
    assert f"{out} is a link or a mount point" in capsys.readouterr().err


@pytest.mark.fault("An export meets the unfinished output of another process")
def test_an_export_removes_only_its_own_unfinished_output(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/download").write_text("of another program")
    words = ["export", str(folder), "--format", "hf", "--to", str(tmp_path / "out")]
    assert main(words) == 0
    assert (tmp_path / "out.partial/download").read_text() == "of another program"
    with pytest.raises(KeyError), complete_folder(tmp_path / "new") as partial:
        partial.rename(tmp_path / "other")
        partial.mkdir()
        (partial / "file").write_text("of the next export")
        raise KeyError
    assert (partial / "file").read_text() == "of the next export"


@pytest.mark.fault("An export is killed before or between its files, or before its rename")
@pytest.mark.parametrize("where", ["export.file_written", "export.before_rename"])
def test_a_killed_export_leaves_no_folder_that_looks_complete_and_can_be_repeated(
    folder: Path, tmp_path: Path, where: str
) -> None:
    out = tmp_path / "out"
    words = ["export", str(folder), "--format", "hf", "--to", str(out)]
    ended = zygote.run(
        [sys.executable, "-m", "holdfast", *words],
        env={**current_environment(), **in_every_python(tmp_path, f"{where}=panic")},
    )
    assert ended.returncode == PANIC_EXIT_CODE
    assert not out.exists()
    assert main(words) == 0
    assert_same(load_file(out / "model.safetensors"), weights())
    assert not (tmp_path / "out.holdfast-partial").exists()


@pytest.mark.fault("A byte of a shard changed, while a checkpoint is exported")
def test_damaged_bytes_are_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = np.ones((1 << 16, 4), np.float32)
    write_checkpoint(tmp_path / "ckpt", {"model.w": (Tensor("F32", whole.shape), whole)}, [1])
    path = damage(tmp_path / "ckpt", 0, offset=700_000)
    words = ["export", str(tmp_path / "ckpt"), "--format", "hf", "--to", str(tmp_path / "out")]
    assert main(words) == 3
    assert str(path) in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


@pytest.mark.fault("An export meets a type that safetensors does not have")
@pytest.mark.parametrize("kind", [torch.complex128, torch.float8_e4m3fnuz], ids=str)
def test_a_type_that_safetensors_does_not_have_is_refused(
    tmp_path: Path, kind: torch.dtype
) -> None:
    with holdfast.Checkpointer(tmp_path / "ckpt") as ckpt:
        ckpt.save(1, {"model": {"z": torch.ones(3).to(kind)}}).wait(timeout=HANG_SECONDS)
    with holdfast.open(tmp_path / "ckpt") as opened, opened.at() as saved:
        with pytest.raises(UnsupportedStateError, match=f"z: safetensors has no type {kind}"):
            write_model(tmp_path, entry_of(saved, "model", None))


# ------------------------------------------------------------------------ import


def test_weights_are_imported_as_step_0_and_trained_from(tmp_path: Path) -> None:
    source = Model(seed=5)
    (tmp_path / "base").mkdir()
    save_file(source.state_dict(), tmp_path / "base/model.safetensors", {"format": "pt"})
    words = ["import", str(tmp_path / "base"), "--format", "hf", "--to", str(tmp_path / "ckpt")]
    assert main(words) == 0
    model = Model(seed=6)
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    with holdfast.Checkpointer(tmp_path / "ckpt", strict=False) as ckpt:
        assert ckpt.list() == ((0, 0),)
        assert list(ckpt.steps(2, state)) == [0, 1]
        assert ckpt.skipped == ("optim: expected AdamW, found nothing in the checkpoint",)
    assert_same(model.state_dict(), source.state_dict())


def test_an_import_into_a_folder_with_checkpoints_changes_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    words = ["import", str(tmp_path / "model.safetensors"), "--format", "hf", "--to", str(folder)]
    assert main(words) == 6
    assert "has checkpoints already, the newest of step 2" in capsys.readouterr().err
    with holdfast.open(folder) as opened:
        assert opened.steps() == (1, 2)


def test_an_export_and_an_import_give_the_same_bits(folder: Path, tmp_path: Path) -> None:
    assert main(["export", str(folder), "--format", "hf", "--to", str(tmp_path / "out")]) == 0
    words = ["import", str(tmp_path / "out"), "--format", "hf", "--to", str(tmp_path / "new")]
    assert main(words) == 0
    with holdfast.open(tmp_path / "new") as opened, opened.at(0) as saved:
        assert_same(
            {n: t.read() for n, t in saved.tensors().items()},
            {f"model.{n}": t for n, t in weights().items()},
        )


def test_files_without_tensors_are_not_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({}, tmp_path / "model.safetensors")
    words = ["import", str(tmp_path / "model.safetensors"), "--format", "hf"]
    assert main([*words, "--to", str(tmp_path / "ckpt")]) == 1
    assert "has no tensors" in capsys.readouterr().err
    assert holdfast.Checkpointer(tmp_path / "ckpt").list() == ()


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.fault("A safetensors file to import is cut off")
@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        ("nothing", ConfigError, "expected a safetensors file"),
        ("cut header", CorruptionError, "cut off or not a safetensors file"),
        ("cut data", CorruptionError, "the file is cut off or damaged"),
        ("no json", CorruptionError, "expected a JSON header"),
        (
            "missing tensor",
            CorruptionError,
            "tensor 'b' of model.safetensors.index.json is not in it",
        ),
        ("deep header", CorruptionError, "expected a JSON header"),
        ("deep index", FormatError, "expected JSON"),
        ("missing file", Exception, "model-00002-of-00002"),
        ("foreign path", FormatError, "expected the name of a file in the folder"),
        ("no index", ConfigError, "but no model.safetensors.index.json"),
        ("twice", FormatError, "tensor 'a' is also in another file"),
    ],
    ids=str,
)
def test_files_that_are_not_whole_are_refused(
    tmp_path: Path, what: str, error: type[Exception], text: str
) -> None:
    first = tmp_path / "model-00001-of-00002.safetensors"
    if what not in ("nothing", "twice"):
        save_file({"a": torch.arange(100)}, first)
    if what == "cut header":
        os.truncate(first, 20)
    elif what == "cut data":
        os.truncate(first, first.stat().st_size - 8)
    elif what == "no json":
        first.write_bytes(first.read_bytes().replace(b"{", b"[", 1))
    elif what == "deep header":
        deep = b"[" * 100_000
        first.write_bytes(len(deep).to_bytes(8, "little") + deep)
    elif what == "deep index":
        (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    elif what == "twice":
        for name in ("one", "two"):
            save_file({"a": torch.arange(100)}, tmp_path / f"{name}.safetensors")
    files = {
        "missing tensor": {"a": first.name, "b": first.name},
        "missing file": {"a": first.name, "b": "model-00002-of-00002.safetensors"},
        "foreign path": {"a": "../model.safetensors"},
    }
    if what in files:
        write_index(tmp_path, files[what])
    elif what in ("cut header", "cut data", "no json", "deep header"):
        write_index(tmp_path, {"a": first.name})
    with pytest.raises(error, match=text):
        read_model(tmp_path)


def header_of(entries: str, data_bytes: int) -> bytes:
    text = entries.encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


A_BYTE = '"dtype":"U8","shape":[4],"data_offsets"'


@pytest.mark.fault(
    "A safetensors file with overlaps, gaps, repeated keys or other bytes is imported"
)
@pytest.mark.parametrize(
    ("header", "data_bytes", "text"),
    [
        (f'{{"a":{{{A_BYTE}:[0,4]}},"b":{{{A_BYTE}:[0,4]}}}}', 4, "'b' begins at byte 0"),
        (f'{{"a":{{{A_BYTE}:[0,4]}},"b":{{{A_BYTE}:[2,6]}}}}', 6, "'b' begins at byte 2"),
        (f'{{"a":{{{A_BYTE}:[0,4]}},"b":{{{A_BYTE}:[5,9]}}}}', 9, "'b' begins at byte 5"),
        (f'{{"a":{{{A_BYTE}:[1,5]}}}}', 5, "'a' begins at byte 1"),
        (f'{{"a":{{{A_BYTE}:[0,4]}}}}', 9, "9 bytes of data"),
        (f'{{"__metadata__":[],"a":{{{A_BYTE}:[0,4]}}}}', 4, "__metadata__"),
        (f'{{"__metadata__":{{"x":1}},"a":{{{A_BYTE}:[0,4]}}}}', 4, "__metadata__: 'x'"),
    ],
    ids=["same", "overlap", "gap", "first-gap", "rest", "no-map", "no-text"],
)
def test_what_safetensors_forbids_is_refused(
    tmp_path: Path, header: str, data_bytes: int, text: str
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header_of(header, data_bytes))
    with pytest.raises(FormatError, match=re.escape(text)):
        read_model(path)
    with pytest.raises(SafetensorError):
        load_file(path)


def test_a_header_with_a_repeated_key_is_refused(tmp_path: Path) -> None:
    """The library takes the last one."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(header_of(f'{{"a":{{{A_BYTE}:[0,4]}},"a":{{{A_BYTE}:[0,4]}}}}', 4))
    with pytest.raises(CorruptionError, match="duplicate key 'a'"):
        read_model(path)
