"""Which parts of an unfinished upload are believed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast_core.ids import ByteRange
from holdfast_core.store.s3.client import UploadedPart
from holdfast_core.store.upload.parts import Part, PartPlan
from holdfast_core.store.upload.resume import OpenUpload, best_upload, fullest_upload, kept_etags

PLAN = PartPlan(
    (
        Part(1, ByteRange(0, 100), 0xAA),
        Part(2, ByteRange(100, 200), 0xBB),
        Part(3, ByteRange(200, 230), 0xCC),
    ),
    230,
    0xDD,
)
FIRST = UploadedPart(1, 100, 0xAA, '"one"')
SECOND = UploadedPart(2, 100, 0xBB, '"two"')
THIRD = UploadedPart(3, 30, 0xCC, '"three"')


@pytest.mark.parametrize(
    ("listed", "kept"),
    [
        ([], {}),
        ([FIRST], {1: '"one"'}),
        ([SECOND, FIRST, THIRD], {1: '"one"', 2: '"two"', 3: '"three"'}),
        ([replace(FIRST, crc32c=0xAB)], {}),
        ([replace(FIRST, crc32c=None)], {}),
        ([replace(FIRST, size_bytes=99)], {}),
        ([replace(FIRST, etag="")], {}),
        ([replace(FIRST, number=2), THIRD], {3: '"three"'}),
        ([replace(THIRD, number=4)], {}),
        ([replace(FIRST, number=0)], {}),
    ],
    ids=[
        "nothing",
        "one",
        "all",
        "other-bytes",
        "no-checksum",
        "cut",
        "no-etag",
        "under-another-number",
        "beyond-the-plan",
        "no-number",
    ],
)
def test_kept(listed: list[UploadedPart], kept: dict[int, str]) -> None:
    assert kept_etags(PLAN, listed) == kept


@pytest.mark.parametrize(
    ("uploads", "expected"),
    [
        ({}, None),
        ({"a": []}, None),
        ({"a": [replace(FIRST, crc32c=0)]}, None),
        ({"a": [THIRD], "b": [FIRST]}, OpenUpload("b", {1: '"one"'})),
        ({"a": [FIRST, THIRD], "b": [SECOND]}, OpenUpload("a", {1: '"one"', 3: '"three"'})),
    ],
    ids=["none", "empty", "nothing-usable", "more-bytes-not-more-parts", "most"],
)
def test_best(uploads: dict[str, list[UploadedPart]], expected: OpenUpload | None) -> None:
    assert best_upload(PLAN, uploads) == expected


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
def test_without_a_plan_the_upload_of_which_most_is_there_is_taken_up(
    uploads: dict[str, tuple[UploadedPart, ...]], expected: str | None
) -> None:
    assert fullest_upload(uploads) == expected
