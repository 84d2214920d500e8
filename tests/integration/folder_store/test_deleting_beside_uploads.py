"""A script deletes checkpoints of a folder while its uploads to a store are under way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.crash.failpoints import in_every_python
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.launched import until

import holdfast
from holdfast_core.errors import ConfigError


def test_a_checkpoint_that_is_being_uploaded_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, folder = tmp_path / "go", tmp_path / "ckpt"
    for name, value in in_every_python(tmp_path, f"uploads.before_commit=wait:{go}").items():
        monkeypatch.setenv(name, value)
    state = {"t": torch.ones(4)}
    with holdfast.Checkpointer(
        holdfast.Folder(folder, store=f"file://{tmp_path}/store"), when_busy="wait"
    ) as ckpt:
        first = ckpt.save(1, state)
        until(lambda: any((folder / "readers").glob("s1-*")), "the upload of step 1")
        ckpt.save(2, state).wait(timeout=HANG_SECONDS)
        with pytest.raises(ConfigError, match=r"step 1 in .* is in use"):
            ckpt.delete(1)
        go.touch()
        first.wait("persisted", timeout=HANG_SECONDS)
        until(lambda: not any((folder / "readers").glob("s1-*")), "the end of the upload")
        assert ckpt.delete(1)
        assert [one.step for one in ckpt.list()] == [2]
    with holdfast.open(tmp_path / "store") as store:
        assert store.steps() == (1, 2)  # a delete from the folder is none from the store
