"""Keys from files are consistent, current, and never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_core.errors import ConfigError
from holdfast_core.store.s3.credentials import FileCredentials, Keys


def publish(directory: Path, generation: str, **files: str) -> None:
    """Replace all files as the kubelet does: a new directory and one swapped symbolic link."""
    directory.mkdir(exist_ok=True)
    data = directory / f"..{generation}"
    data.mkdir()
    for name, text in files.items():
        (data / name).write_text(text)
    link = directory / "..tmp"
    link.symlink_to(data.name)
    link.rename(directory / "..data")
    for name in files:
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")


def test_credentials_are_read_from_files_and_follow_a_rotation(tmp_path: Path) -> None:
    store = tmp_path / "store"
    publish(store, "1", accessKey="a1\n", secretKey="s1\n")
    provider = FileCredentials(store)
    assert provider.retrieve() == Keys("a1", "s1", None)
    publish(store, "2", accessKey="a2", secretKey="s2", sessionToken="t2")
    assert provider.retrieve() == Keys("a2", "s2", "t2")


def test_unchanged_files_are_not_read_again(tmp_path: Path) -> None:
    publish(tmp_path / "store", "1", accessKey="a", secretKey="s")
    provider = FileCredentials(tmp_path / "store")
    assert provider.retrieve() is provider.retrieve()
    assert provider.refresh() == provider.retrieve()


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, "an empty directory"),
        ({"accessKey": "a"}, "accessKey"),
        ({"accessKey": "a", "secretKey": "  "}, "accessKey, secretKey"),
        ({"AWS_ACCESS_KEY_ID": "a"}, "AWS_ACCESS_KEY_ID"),
    ],
    ids=["nothing", "no-secret-key", "blank", "other-names"],
)
def test_a_missing_file_is_named(tmp_path: Path, files: dict[str, str], found: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"expected files accessKey and secretKey.*{found}"):
        FileCredentials(tmp_path).retrieve()


def test_an_absent_directory_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no readable directory"):
        FileCredentials(tmp_path / "absent").retrieve()


def test_the_ca_file_is_optional(tmp_path: Path) -> None:
    assert FileCredentials(tmp_path).ca_file is None
    (tmp_path / "ca.crt").write_text("x")
    assert FileCredentials(tmp_path).ca_file == str(tmp_path / "ca.crt")


def test_a_secret_is_not_in_the_repr() -> None:
    assert "hunter2" not in repr(Keys("a", "hunter2", "hunter2-token"))


@pytest.mark.fault("A log line or an error prints an object that holds keys")
def test_the_repr_has_no_part_of_the_keys() -> None:
    shown = repr(Keys("ACCESS-KEY", "SECRET-KEY", "SESSION-TOKEN"))
    assert [word for word in ("ACCESS-KEY", "SECRET-KEY", "SESSION-TOKEN") if word in shown] == []


@pytest.mark.fault("A key contains what no header can carry")
@pytest.mark.parametrize(
    "token", ["two\nlines-of-a-token", "a-tok\x00en", "a tok en", "t\u00f6ken"]
)
def test_a_key_that_is_not_valid_in_a_header_is_refused_without_its_text(
    tmp_path: Path, token: str
) -> None:
    """Otherwise the HTTP library would refuse the key later, with an error that quotes it."""
    publish(tmp_path / "store", "1", accessKey="access", secretKey="secret", sessionToken=token)
    with pytest.raises(ConfigError, match="sessionToken: expected one key") as caught:
        FileCredentials(tmp_path / "store").retrieve()
    assert token not in str(caught.value)
