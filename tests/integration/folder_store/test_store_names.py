"""Stores that are named wrongly are refused before anything is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast_core.errors import ConfigError


@pytest.mark.parametrize(
    "store",
    ["bucket/x", "gs://", "gs://Bucket/x", "s3://Bucket/x", "s3://bucket/a//b", "s3://bucket/x?y"],
)
def test_a_url_that_names_no_store_is_refused(folder: Path, store: str) -> None:
    with pytest.raises(ConfigError, match="the store "):
        holdfast.Checkpointer(holdfast.Folder(folder, store=store))
