"""A store that refuses is an error before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast_core.errors import ConfigError


@pytest.mark.fault("The store refuses keys or endpoint")
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        pytest.param("AWS_SECRET_ACCESS_KEY", "wrong", "SignatureDoesNotMatch", id="secret"),
        pytest.param("AWS_ACCESS_KEY_ID", "nobody", "no such access key", id="key"),
        pytest.param("AWS_ENDPOINT_URL", "localhost:9000", "expected https://", id="endpoint"),
        pytest.param("AWS_PROFILE", "absent", "neither .* has this profile", id="profile"),
    ],
)
def test_a_store_that_refuses_is_an_error_before_the_first_step(
    folder: Path, url: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=reason):
        holdfast.Checkpointer(holdfast.Folder(folder, store=url)).open()


def test_a_bucket_that_does_not_exist_is_an_error_before_the_first_step(
    folder: Path, url: str
) -> None:
    with pytest.raises(ConfigError, match="create the bucket or correct its name"):
        holdfast.Checkpointer(holdfast.Folder(folder, store="s3://absent/x")).open()
