"""Which values of `dir` are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.base.options import folder_path
from holdfast_core.errors import ConfigError


@pytest.mark.fault("A script gives a URL as `dir`")
@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/x",
        Path("s3://bucket/x"),
        "S3://bucket/x",
        " s3://bucket/x",
        "gs://bucket/x",
        "abfss://c@account.dfs.core.windows.net/x",
        "hdfs://name/x",
        "https://host/x",
        "s3:/bucket/x",
        "file://host/x",
        "file://",
    ],
    ids=str,
)
def test_a_url_is_refused_and_no_directory_is_created(
    text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: holdfast.Checkpointer(dir=text),
        lambda: holdfast.restore({}, dir=text),
        lambda: holdfast.save(1, {}, dir=text),
    ):
        with pytest.raises(ConfigError, match=r"not supported here. A folder is.*store=\"s3:"):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "  ", "a\0b", b"ckpt"], ids=repr)
def test_a_value_that_is_not_a_path_is_refused(text: Any) -> None:
    with pytest.raises(ConfigError, match="expected the path of a folder"):
        holdfast.Checkpointer(dir=text)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/a/b", "/a/b"),
        (Path("/a/b"), "/a/b"),
        ("file:///a/b", "/a/b"),
        ("file://localhost/a/my%20ckpt", "/a/my ckpt"),
        ("FILE:///a", "/a"),
        ("/a/s3:/b", "/a/s3:/b"),
        ("/a/10:30", "/a/10:30"),
    ],
    ids=str,
)
def test_a_folder_is_accepted_in_each_form_of_a_path(text: Any, path: str) -> None:
    assert folder_path(text) == Path(path)


def test_a_relative_path_may_contain_a_colon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert folder_path("run-10:30") == tmp_path / "run-10:30"
    assert folder_path("./s3:/x") == tmp_path / "s3:/x"
