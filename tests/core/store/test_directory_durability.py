"""An object of a store in a directory is durable before its writer relies on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.crash.fsyncs import recorded_fsyncs

from holdfast_core.node.files import TEMP_PREFIX
from holdfast_core.store.directory import DirectoryObjectStore
from holdfast_core.store.upload import Document

KEY = "jobs/one/manifest.json"


def test_the_bytes_of_an_object_are_durable_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryObjectStore(tmp_path)
    store.write("jobs/one/other", Document(b"makes the directories"))
    synced = recorded_fsyncs(monkeypatch)
    store.write(KEY, Document(b"{}"))
    file, directory = synced
    assert file.name.startswith(TEMP_PREFIX)
    assert directory == (tmp_path / KEY).parent


def test_an_object_that_another_process_has_written_is_durable_before_it_is_relied_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That process may have been killed between the link and its fsync."""
    DirectoryObjectStore(tmp_path).write(KEY, Document(b"{}"))
    store = DirectoryObjectStore(tmp_path)
    synced = recorded_fsyncs(monkeypatch)
    store.write(KEY, Document(b"{}"))
    assert synced[-1] == (tmp_path / KEY).parent
    synced.clear()
    store.write(KEY, Document(b"{}"))
    assert synced == [(tmp_path / KEY).parent]


def test_a_replaced_object_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryObjectStore(tmp_path)
    store.write(KEY, Document(b"damaged"))
    synced = recorded_fsyncs(monkeypatch)
    store.write(KEY, Document(b"{}"), replace=True)
    file, directory = synced
    assert file.name.startswith(TEMP_PREFIX)
    assert directory == (tmp_path / KEY).parent
    assert store.get(KEY) == b"{}"


def test_an_object_is_not_gone_before_its_directory_says_so_durably(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryObjectStore(tmp_path)
    store.write(KEY, Document(b"{}"))
    synced = recorded_fsyncs(monkeypatch)
    store.delete([KEY])
    assert synced == [(tmp_path / KEY).parent]
