from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.errors import FormatError
from holdfast_core.format.canonical import append_crc, crc32c, digest_of, parse_digest


def test_known_values() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert digest_of(b"") == ("b3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262")


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_append_crcd_crc_is_the_crc_of_both(a: bytes, b: bytes) -> None:
    assert append_crc(crc32c(a), crc32c(b), len(b)) == crc32c(a + b)


@pytest.mark.parametrize("size", [1 << 20, (4 << 20) + 1, 32 << 20])
def test_append_crcd_crc_of_long_pieces(size: int) -> None:
    a, b = b"head" * 1000, bytes(size)
    assert append_crc(crc32c(a), crc32c(b), size) == crc32c(b, crc32c(a))


@pytest.mark.parametrize(
    "text", ["", "b3:", "b3:" + "0" * 63, "b3:" + "A" * 64, "b3:" + "0" * 64 + "\n", 5, None]
)
def test_what_is_no_digest_is_refused(text: object) -> None:
    with pytest.raises(FormatError, match="not a digest"):
        parse_digest(text, "field")
