"""Checkpoints in a store are read, exported and verified without the folder that uploaded them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.hang import HANG_SECONDS
from tests.support.servers.minio_server import MinioServer

import holdfast
from holdfast.__main__ import main
from holdfast_core.errors import ConfigError, CorruptionError, NotFoundError

WEIGHT = torch.arange(300_000, dtype=torch.float32)


def uploaded(folder: Path, url: str, *steps: int) -> None:
    """Save some steps, which are in the store when this returns. Only a part of the state changes."""
    state: dict[str, Any] = {
        "model": {"weight": WEIGHT.clone(), "bias": torch.zeros(4)},
        "epoch": 2,
    }
    with holdfast.Checkpointer(holdfast.Folder(folder, store=url), when_busy="wait") as ckpt:
        for step in steps:
            state["model"]["bias"].fill_(step)
            ckpt.save(step, state).wait("persisted", timeout=HANG_SECONDS)


def test_tensors_and_slices_are_read_from_the_store(folder: Path, any_url: str) -> None:
    uploaded(folder, any_url, 1, 2)
    with holdfast.open(any_url) as store:
        assert store.steps() == (1, 2)
        for step in (1, 2):  # the second one refers to chunks of the first
            with store.at(step) as saved:
                tensors = saved.tensors()
                assert torch.equal(tensors["model.weight"].read(), WEIGHT)
                assert torch.equal(tensors["model.weight"][1000:1003], WEIGHT[1000:1003])
                assert tensors["model.bias"].read().tolist() == [float(step)] * 4
                assert saved.objects()["epoch"] == 2
        with pytest.raises(NotFoundError, match="expected step 9, found steps 1, 2"):
            store.at(9)


def test_the_command_line_reads_the_store(folder: Path, any_url: str, tmp_path: Path) -> None:
    uploaded(folder, any_url, 1)
    for verb in ("list", "show", "verify"):
        assert main([verb, any_url]) == 0
    assert main(["export", any_url, "--format", "hf", "--to", str(tmp_path / "out")]) == 0
    found = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(found["weight"], WEIGHT)


@pytest.mark.fault("A byte of an object changed, while a store is read without a training")
def test_a_damaged_object_is_not_returned(folder: Path, url: str, minio: MinioServer) -> None:
    uploaded(folder, url, 1)
    client, prefix = minio.admin(), url.removeprefix(f"s3://{minio.bucket}/")
    listed = client.list_objects(minio.bucket, prefix=prefix, recursive=True)
    (key,) = [
        str(item.object_name)
        for item in listed
        if "/rank000000-" in str(item.object_name) and not str(item.object_name).endswith(".layout")
    ]
    data = bytearray(client.get_object(minio.bucket, key).read())
    data[500_000] ^= 1

    client.put_object(minio.bucket, key, io.BytesIO(bytes(data)), len(data))
    with holdfast.open(url) as store, store.at() as saved:
        with pytest.raises(CorruptionError, match=r"model\.weight of step 1 in s3://"):
            saved.tensors()["model.weight"].read()


def test_an_empty_prefix_has_no_checkpoints(url: str) -> None:
    with holdfast.open(url) as store:
        assert store.steps() == ()
        with pytest.raises(NotFoundError, match="expected any checkpoint, found none"):
            store.at()


def test_a_directory_that_serves_as_the_store_is_read_like_a_bucket(
    folder: Path, tmp_path: Path
) -> None:
    uploaded(folder, f"file://{tmp_path}/a%20store", 3)
    for name in (tmp_path / "a store", f"file://{tmp_path}/a%20store"):
        with holdfast.open(name) as store, store.at(3) as saved:
            assert torch.equal(saved.tensors()["model.weight"].read(), WEIGHT)


def test_a_url_of_no_bucket_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not the name of a bucket"):
        holdfast.open("s3://No_Bucket/x")
