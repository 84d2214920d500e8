"""The contracts of object store and object tier, over real S3 servers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.support.servers.store_server import StoreServer
from tests.support.tiers.object_tier_contract import ObjectTierContract
from tests.support.tiers.stores import s3_store

from holdfast.testing import ObjectStoreContract
from holdfast_core.contract import StoreConfig
from holdfast_core.tiers.objects import ObjectStore

pytestmark = pytest.mark.integration


@pytest.fixture
def objects(server: StoreServer, store: StoreConfig) -> Iterator[ObjectStore]:
    """Return a bucket without objects. Its client waits as in production.

    On a busy machine a server that gets one object from several writers shows none of them for a moment.
    """
    bucket = f"contract-{secrets.token_hex(6)}"
    server.admin().make_bucket(bucket)
    found = s3_store(replace(store, bucket=bucket), server.credentials)
    yield found
    found.close()


class TestObjectStores(ObjectStoreContract):
    """The contract of object stores, for every S3 server."""


class TestObjectTiers(ObjectTierContract):
    """The contract of object tiers, for every S3 server."""
