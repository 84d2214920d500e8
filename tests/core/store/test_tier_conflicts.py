"""A store that holds other bytes under the name of a shard, and does not replace them, as S3 does not."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from tests.support.shards.builders import shard_header
from tests.support.shards.replicas import NAMESPACE
from tests.support.shards.shard_files import write_shard
from tests.support.tiers.objects import MemoryObjectStore

from holdfast.testing.object_store_contract import everything
from holdfast_core.errors import AlreadyExistsError, UnavailableError
from holdfast_core.store.tier import ObjectTier
from holdfast_core.tiers.objects import ObjectSource


class FailingOnceStore(MemoryObjectStore):
    """Cannot be read once, when `fails` is set."""

    fails = False

    def read_into(
        self, key: str, start: int, buffer: memoryview, stopped: threading.Event | None = None
    ) -> None:
        if self.fails:
            self.fails = False
            raise UnavailableError(f"{key}: it cannot be read now")
        super().read_into(key, start, buffer, stopped)


class KeepingStore(MemoryObjectStore):
    """Ignores `replace`, and counts the bytes that are read."""

    bytes_read = 0

    def write(self, key: str, source: ObjectSource, *, replace: bool = False) -> None:
        super().write(key, source)

    def read_into(
        self, key: str, start: int, buffer: memoryview, stopped: threading.Event | None = None
    ) -> None:
        self.bytes_read += len(buffer)
        super().read_into(key, start, buffer, stopped)


@pytest.mark.fault("A store holds other bytes under a shard's name, and the upload is tried again")
def test_a_conflict_is_read_once_for_all_attempts_of_an_upload(tmp_path: Path) -> None:
    store, size = KeepingStore(), 300_000
    tier = ObjectTier(store)
    with write_shard(tmp_path, shard_header(size), os.urandom(size)) as reader:
        tier.upload_shard(NAMESPACE, reader)
        (item,) = everything(store, "")
        data, since = store.objects[item.key]
        store.objects[item.key] = data[:-5000] + b"x" * 5000, since
        with pytest.raises(AlreadyExistsError):
            tier.upload_shard(NAMESPACE, reader)
        read = store.bytes_read
        assert read > 0
        for _ in range(3):
            with pytest.raises(AlreadyExistsError):
                tier.upload_shard(NAMESPACE, reader)
        assert store.bytes_read == read
        store.objects[item.key] = data, since
        tier.upload_shard(NAMESPACE, reader)
    tier.close()


def test_a_damaged_object_that_could_not_be_read_once_is_replaced_later(tmp_path: Path) -> None:
    store, size = FailingOnceStore(), 300_000
    tier = ObjectTier(store)
    with write_shard(tmp_path, shard_header(size), os.urandom(size)) as reader:
        tier.upload_shard(NAMESPACE, reader)
        (item,) = everything(store, "")
        data, since = store.objects[item.key]
        store.objects[item.key] = data[:-5000] + b"x" * 5000, since
        store.fails = True
        with pytest.raises(UnavailableError):
            tier.upload_shard(NAMESPACE, reader)
        tier.upload_shard(NAMESPACE, reader)
        assert store.objects[item.key][0] == data
    tier.close()
