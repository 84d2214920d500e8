"""The contracts of object store and object tier, over every store that needs no server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from examples.object_store.sqlite_store import SqliteObjectStore
from tests.support.tiers.object_tier_contract import ObjectTierContract
from tests.support.tiers.objects import MemoryObjectStore

from holdfast.testing import ObjectStoreContract, ReadableStoreContract
from holdfast_core.store.directory import DirectoryObjectStore
from holdfast_core.store.upload import Document
from holdfast_core.tiers.objects import ObjectStore, ReadableStore


def open_store(kind: str, folder: Path) -> ObjectStore:
    match kind:
        case "directory":
            return DirectoryObjectStore(folder / "objects")
        case "sqlite":
            return SqliteObjectStore(folder / "objects.sqlite")
        case _:
            return MemoryObjectStore(page_keys=7)


@pytest.fixture(params=["directory", "memory", "sqlite"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return open_store(request.param, tmp_path)


class TestObjectStores(ObjectStoreContract):
    """Every store without a server."""


class TestObjectTiers(ObjectTierContract):
    """The object tier in every store without a server."""


class TestReadableStores(ReadableStoreContract):
    """A folder that is read here and written by another object."""

    @pytest.fixture
    def objects(self, tmp_path: Path) -> ReadableStore:
        return open_store("directory", tmp_path)

    @pytest.fixture
    def put(self, tmp_path: Path) -> Callable[[str, bytes], object]:
        writer = open_store("directory", tmp_path)
        return lambda key, data: writer.write(key, Document(data))
