"""Every NodeTier passes the same contract."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.tiers.faulty import Faults, FaultyNodeTier
from tests.support.tiers.memory import MemoryTier
from tests.support.tiers.tier_contract import TierContract

from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.tiers.base import NodeTier

SMALL_BYTES = 1_000_000


def opened(root: Path, capacity_bytes: int) -> DiskNodeTier:
    tier = DiskNodeTier(root, capacity_bytes=capacity_bytes)
    tier.open()
    return tier


class TestDiskNodeTier(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> NodeTier:
        return opened(tmp_path / "node", 256 << 20)

    @pytest.fixture
    def small_tier(self, tmp_path: Path) -> NodeTier:
        return opened(tmp_path / "small", SMALL_BYTES)


class TestDiskNodeTierOnTmpfs(TierContract):
    @pytest.fixture
    def root(self) -> Iterator[Path]:
        shared = Path("/dev/shm")
        if not shared.is_dir():
            pytest.skip("no tmpfs at /dev/shm")
        with tempfile.TemporaryDirectory(prefix="holdfast-test-", dir=shared) as root:
            yield Path(root)

    @pytest.fixture
    def tier(self, root: Path) -> NodeTier:
        return opened(root, 256 << 20)

    @pytest.fixture
    def small_tier(self, root: Path) -> NodeTier:
        return opened(root, SMALL_BYTES)


class TestMemoryTier(TierContract):
    @pytest.fixture
    def tier(self) -> NodeTier:
        return MemoryTier()

    @pytest.fixture
    def small_tier(self) -> NodeTier:
        return MemoryTier(capacity_bytes=SMALL_BYTES)


class TestFaultyNodeTierWithoutFaults(TierContract):
    @pytest.fixture
    def tier(self) -> NodeTier:
        return FaultyNodeTier(MemoryTier(), Faults())

    @pytest.fixture
    def small_tier(self) -> NodeTier:
        return FaultyNodeTier(MemoryTier(capacity_bytes=SMALL_BYTES), Faults())
