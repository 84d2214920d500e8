"""A store that refuses is an error before the first step."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.servers.played_google import PlayedGoogle
from tests.support.trainer.counted import Training

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


@pytest.mark.fault("The store of Google refuses the key or the account, or has no such bucket")
@pytest.mark.parametrize(
    ("url", "variables", "reason"),
    [
        pytest.param("", {"GOOGLE_APPLICATION_CREDENTIALS": "/absent"}, "No such file", id="key"),
        pytest.param("", {"GOOGLE_BEARER_TOKEN": "x"}, "unset GOOGLE_BEARER_TOKEN", id="token"),
        pytest.param("gs://absent/x", {}, "create the bucket", id="bucket"),
    ],
)
def test_a_store_of_google_that_refuses_is_an_error_before_the_first_step(
    folder: Path,
    google_url: str,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    variables: dict[str, str],
    reason: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=reason):
        holdfast.Checkpointer(holdfast.Folder(folder, store=url or google_url)).open()


@pytest.mark.fault("A server of Google replaces objects although a write is conditional")
def test_a_folder_probes_its_store_before_the_first_upload(
    folder: Path, google: PlayedGoogle, google_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    google.ignores_conditions = True
    training = Training()
    with holdfast.Checkpointer(holdfast.Folder(folder, store=google_url)) as ckpt:
        ckpt.save(1, training.state).wait("persisted", timeout=HANG_SECONDS)
    put = [unquote(path) for method, path, _ in google.asked if method == "PUT"]
    probes = [".holdfast-probe" in path for path in put]
    assert probes == sorted(probes, reverse=True), put
    assert probes[0] and not probes[-1]
    assert f"{google_url} ignores conditional writes" in capfd.readouterr().err
