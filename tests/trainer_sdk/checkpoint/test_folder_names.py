"""Folders with unusual names and links."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast_core.errors import ConfigError


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_a_folder_whose_name_is_not_utf8_is_refused(tmp_path: Path, form: str) -> None:
    root = form.format(tmp_path / os.fsdecode(b"ckpt-\xff"))
    with pytest.raises(ConfigError, match="expected a path that UTF-8 can encode"):
        holdfast.Checkpointer(dir=root)
    with pytest.raises(ConfigError, match="expected a path that UTF-8 can encode"):
        holdfast.open(root)


def test_an_identity_that_is_a_loop_of_links_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "run-id").symlink_to("run-id")
    with holdfast.Checkpointer(dir=tmp_path, interval_steps=0) as ckpt:
        ckpt.restore({"w": np.zeros(2)})
        ckpt.save(1, {"w": np.ones(2)}).wait("local")
        with pytest.raises(ConfigError, match="run-id: Too many levels of symbolic links"):
            assert ckpt.run_id
