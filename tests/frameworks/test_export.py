"""Exports and imports with the real packages: transformers, safetensors and DCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as untyped
from transformers import GPT2Config, GPT2LMHeadModel

import holdfast
from holdfast.conversion import Import, import_weights
from holdfast.convert.exporting import Export, export

dcp: Any = untyped


def tiny(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=2, n_head=2))


def assert_same(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder of save_pretrained, with weights in several files."""
    tiny(1).save_pretrained(tmp_path / "base", max_shard_size="2KB")
    assert (tmp_path / "base/model.safetensors.index.json").exists()
    return tmp_path / "base"


def trained(folder: Path) -> GPT2LMHeadModel:
    """Train two steps from the weights in `folder`, save there, and return the model."""
    model = tiny(2)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": optimizer}
    ids = torch.arange(8)[None]
    with holdfast.Checkpointer(folder, strict=False, when_busy="wait") as ckpt:
        for index in ckpt.steps(2, state):
            if index == 0:
                assert_same(model, tiny(1))
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    return model


def test_weights_go_from_save_pretrained_through_a_training_to_from_pretrained(
    base: Path, tmp_path: Path
) -> None:
    folder, out = str(tmp_path / "ckpt"), tmp_path / "out"
    import_weights(Import(base, "hf", folder))
    model = trained(tmp_path / "ckpt")
    export(Export(folder, "hf", out, config_from=base))
    assert_same(GPT2LMHeadModel.from_pretrained(out), model)
    export(Export(folder, "hf", tmp_path / "out16", dtype="bfloat16", config_from=base))
    found = GPT2LMHeadModel.from_pretrained(tmp_path / "out16", dtype=torch.bfloat16)
    assert_same(found, model.bfloat16())


def test_weights_go_from_dcp_through_a_training_to_dcp(tmp_path: Path) -> None:
    state: Any = {"model": tiny(1).state_dict()}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "base"), no_dist=True)
    folder, out = str(tmp_path / "ckpt"), tmp_path / "out"
    import_weights(Import(tmp_path / "base", "dcp", folder))
    model = trained(tmp_path / "ckpt")
    export(Export(folder, "dcp", out))
    found = tiny(3)
    state = {"model": found.state_dict()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(out), no_dist=True)
    found.load_state_dict(state["model"])
    assert_same(found, model)
