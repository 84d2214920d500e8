"""Which writes the room of a volume allows. The size limit counts whole files, the file system counts
blocks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast_core.errors import CapacityError
from holdfast_core.node.volume import Budget

TERABYTE = 1 << 40


@pytest.mark.fault("A write goes into a spare file below the size limit of an emptyDir")
def test_blocks_that_a_spare_file_has_count_against_the_size_limit(tmp_path: Path) -> None:
    """Kubernetes measures an emptyDir by the sizes of its files, and evicts a pod above the limit."""
    budget = Budget(tmp_path, 1000, 1.0)
    budget.add(500)
    with pytest.raises(CapacityError, match=r"needs 501 bytes \(1 of them new\)"):
        budget.take(501, "a shard", blocks=1)
    budget.take(500, "a shard", blocks=1)
    assert budget.free_bytes() == 0


def test_without_a_size_limit_only_new_blocks_count(tmp_path: Path) -> None:
    budget = Budget(tmp_path, 0, 1.0)
    with pytest.raises(CapacityError):
        budget.take(1000 * TERABYTE, "a shard")
    budget.take(1000 * TERABYTE, "a shard", blocks=4096)
    budget.give_back(1000 * TERABYTE, blocks=4096)
    volume = os.statvfs(tmp_path)
    assert budget.free_bytes() <= volume.f_blocks * volume.f_frsize
    assert budget.used_bytes == 0
