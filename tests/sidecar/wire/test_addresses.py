"""Addresses of members, with and without ports."""

from __future__ import annotations

import pytest

from holdfast_core.errors import ConfigError
from holdfast_sidecar.wire.client import Endpoint, parse_address


@pytest.mark.parametrize(
    ("address", "expected", "url"),
    [
        ("10.1.2.3", Endpoint("10.1.2.3", 7070, 7071), "https://10.1.2.3:7070"),
        ("127.0.0.1:41:42", Endpoint("127.0.0.1", 41, 42), "https://127.0.0.1:41"),
        ("fd00::2", Endpoint("fd00::2", 7070, 7071), "https://[fd00::2]:7070"),
        ("[fd00::2]:41:42", Endpoint("fd00::2", 41, 42), "https://[fd00::2]:41"),
    ],
)
def test_parse(address: str, expected: Endpoint, url: str) -> None:
    endpoint = parse_address(address, control_port=7070, bulk_port=7071)
    assert endpoint == expected
    assert endpoint is not None and endpoint.url == url


def test_unknown_yet() -> None:
    assert parse_address("", control_port=1, bulk_port=2) is None


@pytest.mark.parametrize("address", ["host", "10.0.0.1:7070", "10.0.0.1:a:b", "evil.example:1:2"])
def test_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="member address"):
        parse_address(address, control_port=1, bulk_port=2)
