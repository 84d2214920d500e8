"""A real node tier in a directory of its own, for tests that look at no file of it."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

from tests.support.shards.shard_files import flip_bit

from holdfast_core.ids import ShardRef
from holdfast_core.node.tier import DiskNodeTier

_IN_MEMORY = Path("/dev/shm")


class ScratchTier(DiskNodeTier):
    """An open node tier, in memory where /dev/shm exists. Its directory is removed with the object."""

    def __init__(self, *, capacity_bytes: int = 1 << 30) -> None:
        parent = _IN_MEMORY if _IN_MEMORY.is_dir() else None
        root = Path(tempfile.mkdtemp(prefix="holdfast-node-", dir=parent))
        weakref.finalize(self, shutil.rmtree, root, ignore_errors=True)
        super().__init__(root, capacity_bytes=capacity_bytes, fill_limit=1.0)
        self.open()

    def damage(self, ref: ShardRef, position: int) -> None:
        """Invert one bit of a stored file, as a failing disk would."""
        flip_bit(self.shard_path(ref), position)
