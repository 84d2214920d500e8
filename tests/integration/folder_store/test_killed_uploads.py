"""A persister is killed at each step of an upload. What the store lists can be restored, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests.support.crash.failpoints import VARIABLE, in_every_python
from tests.support.hang import HANG_SECONDS

import holdfast

STEPS = (
    "uploads.taken",
    "uploads.before_shard",
    "uploads.after_shard",
    "uploads.share_recorded",
    "uploads.before_commit",
    "uploads.after_commit",
    "uploads.before_delete",
)


@pytest.mark.fault("A persister is killed at a step of an upload")
@pytest.mark.parametrize("where", STEPS)
def test_the_next_persister_completes_an_upload(
    tmp_path: Path, folder: Path, any_url: str, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    for name, value in in_every_python(tmp_path, f"{where}=panic@1").items():
        monkeypatch.setenv(name, value)
    state = {"t": torch.rand(50_000)}
    ckpt = holdfast.Checkpointer(holdfast.Folder(folder, store=any_url, store_keep_last=1))
    ckpt.open()
    monkeypatch.delenv(VARIABLE)  # later persisters are not killed
    with ckpt:
        for step in (1, 2):
            state["t"] += 1
            ckpt.save(step, state).wait("persisted", timeout=HANG_SECONDS)
    shutil.rmtree(folder)
    fresh = {"t": torch.zeros(50_000)}
    with holdfast.Checkpointer(holdfast.Folder(folder, store=any_url)) as again:
        assert again.restore(fresh) == 2
    assert torch.equal(fresh["t"].view(torch.int32), state["t"].view(torch.int32))
