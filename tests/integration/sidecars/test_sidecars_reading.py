"""The checkpoints that the sidecars of a job uploaded are read on another machine, without the cluster."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.sidecars.one_worker import OneWorker
from tests.support.hang import HANG_SECONDS
from tests.support.servers.minio_server import MinioServer
from tests.support.sidecar.gang import Gangs

import holdfast
from holdfast.__main__ import main
from holdfast_core.errors import ConfigError, NotFoundError

WEIGHT = torch.arange(300_000, dtype=torch.float32)


def train() -> None:
    """Save steps 1 and 2. Only a part of the state changes."""
    with holdfast.Checkpointer(when_busy="wait") as ckpt:
        for step in (1, 2):
            model = {"weight": WEIGHT.clone(), "bias": torch.full((4,), float(step))}
            state = {"model": model, "epoch": step}
            ckpt.save(step, state).wait("persisted", timeout=HANG_SECONDS)


def expect_checkpoints(url: str) -> None:
    with holdfast.open(url) as job:
        assert job.steps() == (1, 2)
        for step in job.steps():
            with job.at(step) as saved:
                tensors = saved.tensors()
                assert torch.equal(tensors["model.weight"].read(), WEIGHT)
                assert tensors["model.bias"][1:3].tolist() == [float(step)] * 2
                assert saved.objects()["epoch"] == step
        with pytest.raises(NotFoundError, match="expected step 9, found steps 1, 2"):
            job.at(9)


def test_a_job_is_found_below_its_prefix_and_by_its_own_url(
    gangs: Gangs,
    store: dict[str, Any],
    minio: MinioServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    async def scenario() -> str:
        async with gangs(1, **store) as gang:
            worker = OneWorker(gang, monkeypatch, slots=2)
            worker.policy = replace(worker.policy, object_every_steps=1)
            await worker.begin()
            await asyncio.to_thread(train)
            return gang.operator.job_uid

    uid = asyncio.run(scenario())
    for name in ("HOLDFAST_JOB_UID", "HOLDFAST_ROUND"):
        monkeypatch.delenv(name)
    for name, value in minio.client_environment().items():
        monkeypatch.setenv(name, value)
    prefix = f"s3://{minio.bucket}/{store['store'].prefix}"
    of_job = f"{prefix}/team-a/{uid}"
    expect_checkpoints(prefix)
    expect_checkpoints(of_job)
    assert main(["export", of_job, "--format", "hf", "--to", str(tmp_path / "out")]) == 0

    folder = holdfast.Folder(tmp_path / "ckpt", store=prefix)
    with holdfast.Checkpointer(folder) as ckpt:
        ckpt.save(7, {"x": torch.ones(1)}).wait("persisted", timeout=HANG_SECONDS)
    with pytest.raises(ConfigError, match="several trainings") as raised:
        holdfast.open(prefix)
    assert f"{of_job}  job gpt, newest step 2" in str(raised.value)
    assert f"{prefix}/standalone/standalone  uploaded by a folder, newest step 7" in str(
        raised.value
    )
    expect_checkpoints(of_job)
    with holdfast.open(f"{prefix}/standalone/standalone") as other:
        assert other.steps() == (7,)
    with holdfast.open(f"{prefix}/nothing") as empty:
        assert empty.steps() == ()
