"""Which error a call of an S3 store raises when another thread has closed the store."""

from __future__ import annotations

import pytest
from tests.support.servers.credentials import StaticCredentials

from holdfast_core.contract import StoreConfig
from holdfast_core.errors import UnavailableError
from holdfast_core.store.s3.client import S3Client
from holdfast_core.store.s3.credentials import Keys
from holdfast_core.store.s3.store import S3ObjectStore

CONFIG = StoreConfig("localhost:1", False, "bucket", "", "")


@pytest.mark.fault("A delete is called on a closed S3 store")
def test_a_store_that_is_closed_deletes_nothing() -> None:
    objects = S3ObjectStore(S3Client(CONFIG, StaticCredentials(Keys("access", "secret"))))
    objects.close()
    with pytest.raises(UnavailableError, match="being closed"):
        objects.delete(["one"])
