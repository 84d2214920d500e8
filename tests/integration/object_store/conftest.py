"""All tests here run against each of two servers; every test has a prefix, a tier and a proxy."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from tests.support.servers.hostile_s3 import HostileProxy
from tests.support.servers.minio_server import MinioServer
from tests.support.servers.store_server import ACCESS_KEY, SECRET_KEY, StoreServer
from tests.support.servers.versitygw_server import VersitygwServer

from holdfast_core.contract import StoreConfig
from holdfast_core.store.s3.credentials import Keys
from holdfast_core.store.s3.http import Timeouts
from holdfast_core.store.s3.retry import Retrier, RetryPolicy
from holdfast_core.store.tier import S3ObjectTier

SERVERS: dict[str, type[StoreServer]] = {"minio": MinioServer, "versitygw": VersitygwServer}


@pytest.fixture(scope="session", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    with SERVERS[request.param]() as server:
        yield server


@pytest.fixture
def store(server: StoreServer) -> StoreConfig:
    """Straight to the server, below a prefix that nobody else has."""
    return server.config(f"test/{secrets.token_hex(6)}")


@pytest.fixture
def quick() -> Retrier:
    """Enough attempts to get over what a test breaks, without its waits."""
    return Retrier(RetryPolicy(max_attempts=5, base_seconds=0.01, cap_seconds=0.05))


@pytest.fixture
def tier(server: StoreServer, store: StoreConfig, quick: Retrier) -> Iterator[S3ObjectTier]:
    tier = S3ObjectTier(store, server.credentials, retrier=quick)
    yield tier
    tier.close()


@pytest.fixture
def proxy(server: StoreServer) -> Iterator[HostileProxy]:
    with HostileProxy(server.endpoint, Keys(ACCESS_KEY, SECRET_KEY)) as proxy:
        yield proxy


@pytest.fixture
def proxied(
    server: StoreServer, store: StoreConfig, proxy: HostileProxy, quick: Retrier
) -> Iterator[S3ObjectTier]:
    """The same store as `tier`, by way of the proxy; gives up on silence after a second."""
    config = server.config(store.prefix, endpoint=proxy.endpoint)
    tier = S3ObjectTier(
        config,
        server.credentials,
        retrier=quick,
        timeouts=Timeouts(2.0, idle_seconds=1.0, grace_seconds=5.0),
    )
    yield tier
    tier.close()
