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


@pytest.mark.fault("A sidecar is given an endpoint such as `http://h:0`")
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


@pytest.mark.parametrize("text", ["5,", "x", "1.5"])
def test_sizes_that_are_no_numbers_are_refused(text: str) -> None:
    environment = {**contract_with(node_dir="/n").to_env(), "HOLDFAST_NODE_CAPACITY_BYTES": text}
    with pytest.raises(ConfigError, match="HOLDFAST_NODE_CAPACITY_BYTES"):
        SidecarContract.from_env(environment)
