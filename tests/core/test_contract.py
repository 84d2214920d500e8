"""The contract of a sidecar: its environment, and store endpoints that are refused."""

from __future__ import annotations

import pytest
from tests.support.sidecar.contracts import contract_with

from holdfast_core.contract import SidecarContract, StoreConfig
from holdfast_core.errors import ConfigError


def text(endpoint: str) -> str:
    return StoreConfig(endpoint, True, "b", "p", "us-east-1").to_json()


@pytest.mark.parametrize(
    "endpoint",
    ["minio:9000", "minio.storage.svc", "10.0.0.1:1", "[::1]:65535", "[::1]", "file:///tmp/store"],
)
def test_endpoints_that_are_accepted(endpoint: str) -> None:
    assert StoreConfig.from_json(text(endpoint)).endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        "h:0",
        "h:00",
        "h:65536",
        "h:99999999999",
        "h:",
        "h:-1",
        "h:+1",
        "h:1_0",
        "h:\u0661",
        ":9000",
        "",
        "user:word@h:9000",
        "http://h:9000",
        "h:9000/",
        "h:9000?x",
        "h h:9000",
        "h:9000\n",
        "::1",
        "[::1]:0",
    ],
)
def test_endpoints_that_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"spec\.s3\.endpoint"):
        StoreConfig.from_json(text(endpoint))


@pytest.mark.parametrize("document", ["", "[]", "7", "null", "{}", '{"endpoint": 7}'])
def test_documents_that_are_refused(document: str) -> None:
    with pytest.raises(ConfigError, match="store configuration"):
        StoreConfig.from_json(document)


@pytest.mark.parametrize(
    ("more", "volumes"),
    [
        ((), ()),
        ((5,), (("/n-1", 5),)),
        ((5, 7), (("/n-1", 5), ("/n-2", 7))),
    ],
)
def test_further_node_volumes_are_in_the_environment(
    more: tuple[int, ...], volumes: tuple[tuple[str, int], ...]
) -> None:
    contract = contract_with(node_dir="/n", more_node_bytes=more)
    read = SidecarContract.from_env(contract.to_env())
    assert read == contract
    assert read.more_node_volumes() == volumes


def test_an_environment_of_an_operator_without_further_volumes_is_read() -> None:
    environment = contract_with(node_dir="/n").to_env()
    del environment["HOLDFAST_MORE_NODE_BYTES"]
    assert SidecarContract.from_env(environment).more_node_volumes() == ()


@pytest.mark.parametrize("text", ["5,", "x", "5;7", "1.5"])
def test_sizes_that_are_no_numbers_are_refused(text: str) -> None:
    environment = {**contract_with(node_dir="/n").to_env(), "HOLDFAST_MORE_NODE_BYTES": text}
    with pytest.raises(ConfigError, match="HOLDFAST_MORE_NODE_BYTES"):
        SidecarContract.from_env(environment)
