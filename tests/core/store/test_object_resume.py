"""Which parts of an unfinished upload are kept, and which upload is continued."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast_core.store.s3.client import UploadedPart
from holdfast_core.store.s3.upload import fullest_upload, is_part
from holdfast_core.tiers.objects import Part

PART = Part((b"x" * 100,), 100, 0xAA, is_last=False)
FIRST = UploadedPart(1, 100, 0xAA, '"one"')
SECOND = UploadedPart(2, 100, 0xBB, '"two"')


@pytest.mark.parametrize(
    ("listed", "kept"),
    [
        (FIRST, True),
        (replace(FIRST, crc32c=0xAB), False),
        (replace(FIRST, crc32c=None), False),
        (replace(FIRST, size_bytes=99), False),
        (replace(FIRST, etag=""), False),
    ],
    ids=["the-part", "other-bytes", "no-checksum", "cut", "no-etag"],
)
def test_only_an_equal_part_is_kept(listed: UploadedPart, kept: bool) -> None:
    assert is_part(PART, listed) is kept


@pytest.mark.parametrize(
    ("uploads", "expected"),
    [
        ({}, None),
        ({"empty": ()}, None),
        ({"one": (FIRST,), "two": (FIRST, SECOND), "none": ()}, "two"),
        ({"listed without a size": (replace(FIRST, size_bytes=-1),)}, None),
    ],
    ids=["no-upload", "nothing-there", "most-bytes", "no-size"],
)
def test_the_upload_with_most_bytes_is_continued(
    uploads: dict[str, tuple[UploadedPart, ...]], expected: str | None
) -> None:
    assert fullest_upload(uploads) == expected
