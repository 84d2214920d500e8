"""Tests here run against each of two S3 servers. Every test has its own prefix, tier and proxy.

Tests that use `objects` also run on Azurite, on a directory and in memory.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.servers.azurite_server import AzuriteServer
from tests.support.servers.hostile_s3 import DripReply, Hang, HostileProxy
from tests.support.servers.minio_server import MinioServer
from tests.support.servers.settings import find_tool
from tests.support.servers.store_server import (
    ACCESS_KEY,
    REGION,
    SECRET_KEY,
    ServerUnavailableError,
    StoreServer,
    prefix_policy,
)
from tests.support.shards.builders import shard_header
from tests.support.shards.replicas import Compressing
from tests.support.shards.shard_files import write_shard
from tests.support.tiers.objects import MemoryObjectStore
from tests.support.tiers.store_bench import MIB, Bench
from tests.support.tiers.stores import s3_store, s3_tier

from holdfast_core.contract import StoreConfig
from holdfast_core.store.cloud.store import CloudObjectStore
from holdfast_core.store.directory import DirectoryObjectStore
from holdfast_core.store.s3.client import S3Client
from holdfast_core.store.s3.credentials import Keys
from holdfast_core.store.s3.errors import Retrier, RetryPolicy
from holdfast_core.store.s3.http import Timeouts
from holdfast_core.store.tier import ObjectTier
from holdfast_core.tiers.objects import ObjectStore


class VersitygwServer(StoreServer):
    """VersityGW server with one process.

    Objects are files, and the directory must support extended attributes.
    """

    tool: ClassVar[str] = "versitygw"

    def command(self) -> list[str]:
        users = self.data_dir.parent / "users"
        users.mkdir(exist_ok=True)
        # Without --keep-alive the server closes the connection after each reply.
        listen = ["--port", self.endpoint, "--region", REGION, "--keep-alive", "--quiet"]
        return [
            *listen,
            "--iam-dir",
            str(users),
            "--iam-cache-disable",
            "posix",
            str(self.data_dir),
        ]

    def environment(self) -> dict[str, str]:
        return {"ROOT_ACCESS_KEY_ID": ACCESS_KEY, "ROOT_SECRET_ACCESS_KEY": SECRET_KEY}

    def add_user(self, keys: Keys, prefix: str) -> None:
        """Grant `keys` the rights below `prefix`.

        A bucket has one policy here, so only the newest user has rights.
        """
        secret = ["--secret", keys.secret_key, "--role", "user"]
        self._administer("create-user", "--access", keys.access_key, *secret)
        policy = prefix_policy(self.bucket, prefix, {"Principal": {"AWS": [keys.access_key]}})
        self.admin().set_bucket_policy(self.bucket, json.dumps(policy))

    def remove_user(self, keys: Keys) -> None:
        self._administer("delete-user", "--access", keys.access_key)

    def _administer(self, *arguments: str) -> None:
        account = ["--access", ACCESS_KEY, "--secret", SECRET_KEY, "--region", REGION]
        where = ["--endpoint-url", f"http://{self.endpoint}"]
        command = [str(find_tool(self.tool)), "admin", *account, *where, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
        if done.returncode != 0:
            raise ServerUnavailableError(
                f"versitygw admin {arguments[0]}: {done.stdout}{done.stderr}"
            )


SERVERS: dict[str, type[StoreServer]] = {"minio": MinioServer, "versitygw": VersitygwServer}


@pytest.fixture(scope="session")
def running() -> Iterator[Callable[[str], StoreServer]]:
    """Return a server by name. Each is started once, when it is first needed."""
    started: dict[str, StoreServer] = {}
    with ExitStack() as stack:

        def server(name: str) -> StoreServer:
            if name not in started:
                started[name] = stack.enter_context(SERVERS[name]())
            return started[name]

        yield server


@pytest.fixture(scope="session", params=SERVERS)
def server(request: pytest.FixtureRequest, running: Callable[[str], StoreServer]) -> StoreServer:
    return running(request.param)


@pytest.fixture
def prefix() -> str:
    """Return a prefix that no other test uses."""
    return f"test/{secrets.token_hex(6)}"


@pytest.fixture
def store(server: StoreServer, prefix: str) -> StoreConfig:
    """Return a configuration that connects to the server directly."""
    return server.config(prefix)


@pytest.fixture
def quick() -> Retrier:
    """Return a policy with enough attempts for the faults of a test, and with short waits."""
    return Retrier(RetryPolicy(max_attempts=5, base_seconds=0.01, cap_seconds=0.05))


@pytest.fixture(scope="session")
def azurite() -> Iterator[AzuriteServer]:
    with AzuriteServer() as server:
        yield server


@pytest.fixture(params=[*SERVERS, "azurite", "directory", "memory"])
def objects(
    request: pytest.FixtureRequest,
    running: Callable[[str], StoreServer],
    prefix: str,
    quick: Retrier,
    tmp_path: Path,
) -> Iterator[ObjectStore]:
    """Return a store of each kind."""
    found: ObjectStore
    match request.param:
        case "azurite":
            azure = request.getfixturevalue("azurite")
            found = CloudObjectStore(azure.config(prefix), azure.credentials, retrier=quick)
        case "directory":
            found = DirectoryObjectStore(tmp_path / "objects")
        case "memory":
            found = MemoryObjectStore()
        case name:
            one = running(name)
            found = s3_store(one.config(prefix), one.credentials, retrier=quick)
    yield found
    found.close()


@pytest.fixture
def tier(server: StoreServer, store: StoreConfig, quick: Retrier) -> Iterator[ObjectTier]:
    tier = s3_tier(store, server.credentials, retrier=quick)
    yield tier
    tier.close()


@pytest.fixture
def gang(tmp_path: Path, tier: ObjectTier) -> Iterator[Compressing]:
    found = Compressing(tmp_path, tier)
    yield found
    found.close()


@pytest.fixture
def proxy(server: StoreServer) -> Iterator[HostileProxy]:
    with HostileProxy(server.endpoint, Keys(ACCESS_KEY, SECRET_KEY)) as proxy:
        yield proxy


@pytest.fixture
def proxied(
    request: pytest.FixtureRequest,
    server: StoreServer,
    store: StoreConfig,
    proxy: HostileProxy,
    quick: Retrier,
) -> Iterator[ObjectTier]:
    """Return a tier on the same store as `tier`, through the proxy.

    It times out after seconds only in a case with a parameter that lets the proxy be silent or slow. A server
    whose disk is slow is silent as well, and a request that is sent again would be one too many.
    """
    config = server.config(store.prefix, endpoint=proxy.endpoint)
    parameters = request.node.callspec.params.values()
    silent = any(isinstance(value, Hang | DripReply) for value in parameters)
    timeouts = Timeouts(idle_seconds=5.0, grace_seconds=5.0) if silent else Timeouts()
    tier = s3_tier(config, server.credentials, retrier=quick, timeouts=timeouts)
    yield tier
    tier.close()


@pytest.fixture
def bench(
    tmp_path: Path,
    tier: ObjectTier,
    proxied: ObjectTier,
    proxy: HostileProxy,
    server: StoreServer,
    store: StoreConfig,
) -> Iterator[Bench]:
    client = S3Client(store, server.credentials)
    small, large = 300_000, 11 * MIB
    with (
        write_shard(tmp_path, shard_header(small, rank=0), os.urandom(small)) as whole,
        write_shard(
            tmp_path, shard_header(large, rank=1, chunk_bytes=4 * MIB), os.urandom(large)
        ) as parts,
    ):
        yield Bench(server, proxied, tier, proxy, client, whole, parts, tmp_path)
