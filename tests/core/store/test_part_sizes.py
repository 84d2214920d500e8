"""Lengths of the parts of an upload, within the limits of S3 and of memory."""

from __future__ import annotations

import pytest

from holdfast_core.store.s3.upload import part_sizes

MIB = 1 << 20
MOST = 10_000
"""S3's limit of the parts of one object."""


@pytest.mark.parametrize("part_mib", [5, 6, 7, 64])
@pytest.mark.parametrize("parts", [MOST - 1, MOST, MOST + 1])
@pytest.mark.parametrize("in_memory", [False, True])
def test_no_object_has_more_parts_than_s3_allows(
    part_mib: int, parts: int, in_memory: bool
) -> None:
    """An upload whose length is not known before may end with one more part."""
    size = parts * part_mib * MIB
    found = part_sizes(size, 5 * MIB, 4, in_memory=in_memory)
    assert -(-size // found.part_bytes) + 1 <= MOST


def test_parts_that_are_made_in_memory_share_its_limit() -> None:
    found = part_sizes(1 << 30, 64 * MIB, 4, in_memory=True)
    assert (found.part_bytes, found.at_once) == (8 * MIB, 4), "six parts in 48 MiB"
    assert part_sizes(1 << 30, 64 * MIB, 4, in_memory=False).part_bytes == 64 * MIB
