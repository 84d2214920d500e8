"""Gangs of real sidecar processes, and an object store for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.servers.minio_server import MinioServer
from tests.support.servers.store_server import ACCESS_KEY, SECRET_KEY
from tests.support.sidecar.gang import Gang, Gangs
from tests.support.tiers.stores import s3_tier

from holdfast_core.contract import StoreConfig
from holdfast_core.store.tier import ObjectTier


@pytest.fixture
def gangs(tmp_path: Path) -> Iterator[Gangs]:
    """Gangs with a given number of workers, which end with the test: `gangs(2)`."""
    made: list[Gang] = []

    def make(
        workers: int, *, store: StoreConfig | None = None, store_dir: Path | None = None
    ) -> Gang:
        gang = Gang(tmp_path, workers, store=store, store_dir=store_dir or tmp_path / "store")
        made.append(gang)
        return gang

    yield make
    for gang in made:
        gang.kill()


@pytest.fixture(scope="module")
def minio() -> Iterator[MinioServer]:
    with MinioServer() as server:
        yield server


@pytest.fixture
def store(minio: MinioServer, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arguments that give a gang its own store."""
    keys = tmp_path / "store"
    keys.mkdir()
    (keys / "accessKey").write_text(ACCESS_KEY)
    (keys / "secretKey").write_text(SECRET_KEY)
    return {"store": minio.config(f"p/{request.node.name}"), "store_dir": keys}


@pytest.fixture
def tier(minio: MinioServer, store: dict[str, Any]) -> Iterator[ObjectTier]:
    """A second client of the gang's store."""
    tier = s3_tier(store["store"], minio.credentials)
    yield tier
    tier.close()


@pytest.fixture
def stored(minio: MinioServer, store: dict[str, Any]) -> Callable[[str], list[str]]:
    """Names of the objects in the gang's store that contain a text: `stored(".pack")`."""
    prefix = store["store"].prefix

    def matching(part: str) -> list[str]:
        listed = minio.admin().list_objects(minio.bucket, prefix=prefix, recursive=True)
        return [str(item.object_name) for item in listed if part in str(item.object_name)]

    return matching
