"""Quantities and durations: which texts are parsed and which are refused."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.api import CheckpointStatus, parse_duration, parse_quantity_bytes
from holdfast_core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1024", 1024),
        ("20Gi", 21474836480),
        ("1.5Ti", 1649267441664),
        ("500M", 500000000),
        ("1k", 1000),
        (".5Ki", 512),
        ("1e9", 1000000000),
        ("2E3", 2000),
        ("1E", 10**18),
        ("1Ei", 2**60),
        ("100m", 1),
        ("0.1", 1),
        ("+3Mi", 3145728),
    ],
)
def test_quantities(text: str, expected: int) -> None:
    assert parse_quantity_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "Gi", "20GB", "20 Gi", "20gi", "1..5", "1e", "0x10", "20K", "1e999999999", "١"]
)
def test_a_text_that_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a number of bytes"):
        parse_quantity_bytes(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1h", timedelta(hours=1)),
        ("90m30s", timedelta(minutes=90, seconds=30)),
        ("1h0m0s", timedelta(hours=1)),
        ("1.5h", timedelta(minutes=90)),
        ("250ms", timedelta(milliseconds=250)),
        ("168h", timedelta(days=7)),
        ("0s", timedelta(0)),
    ],
)
def test_durations(text: str, expected: timedelta) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize(
    "text", ["", "1", "1d", "1 h", "-1h", "h", "1h 30m", "1hm", "one", "5us", "١h"]
)
def test_a_text_that_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected numbers with units"):
        parse_duration(text)


def test_a_duration_longer_than_python_knows() -> None:
    with pytest.raises(ConfigError, match="too long"):
        parse_duration("9" * 20 + "h")


@given(st.integers(0, 2**62))
def test_plain_bytes_are_themselves(count: int) -> None:
    assert parse_quantity_bytes(str(count)) == count


@given(st.integers(0, 10**6), st.integers(0, 59), st.integers(0, 59))
def test_parts_of_a_duration_add_up(hours: int, minutes: int, seconds: int) -> None:
    expected = timedelta(hours=hours, minutes=minutes, seconds=seconds)
    assert parse_duration(f"{hours}h{minutes}m{seconds}s") == expected


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused_by_name(text: str) -> None:
    for parse in (parse_quantity_bytes, parse_duration):
        try:
            parse(text)
        except ConfigError as error:
            assert repr(text) in str(error) or "too long" in str(error)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (None, "-"),
        (0, "0.0 B"),
        (1023, "1023.0 B"),
        (1536, "1.5 KiB"),
        (6_729_440, "6.4 MiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_the_size_of_a_checkpoint_has_a_unit(size_bytes: int | None, text: str) -> None:
    assert CheckpointStatus(bytes=size_bytes).to_dict()["size"] == text
