"""The layouts of this pod's ranks, in the shared volume (shm.layout_files) and on the node tier.

The layouts of saves are stored on the node tier. From there they go to the nodes and to the object store that
get a copy of a shard which names them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast_core.errors import CorruptionError, NotFoundError
from holdfast_core.format.digest import digest_of
from holdfast_core.format.rank_layout import (
    LayoutDigests,
    RankLayout,
    layout_digests,
    parse_rank_layout,
)
from holdfast_core.ids import Digest
from holdfast_core.save.place import SavePools
from holdfast_core.shm.layout_files import LayoutFiles
from holdfast_core.tiers.base import NodeTier


class RankLayouts:
    """Access to the layout documents of this pod's ranks, in the shared volume and on the node tier."""

    def __init__(self, directory: Path, node: NodeTier, pools: SavePools) -> None:
        self._files = LayoutFiles(directory)
        self._node = node
        self._pools = pools
        self.known: dict[Digest, LayoutDigests] = {}
        """What layouts of saves have in common with others. `ensure` adds those of its layouts."""

    async def ensure(self, digest: Digest, put: Callable[[bytes], object] | None = None) -> None:
        """Make the document durable on the node tier. One that is there is only marked as used.

        Args:
            digest: Digest of the document.
            put: Puts the document into the node tier, in place of `put_layout`.

        Raises:
            NotFoundError: The document is not in the shared volume.
            FormatError: The document is too large, or is no regular file, or no layout.
            CorruptionError: The document has another digest.
            UnavailableError: The document cannot be read.
        """
        if digest not in self.known or not await self._pools.meta.run(
            self._node.keep_layout, digest
        ):
            self.known[digest] = await self._pools.meta.run(self._store, digest, put)

    async def digests(self, digest: Digest) -> LayoutDigests:
        """Return what the layout of an own shard has in common with others.

        Raises what `document` raises.
        """
        if digest not in self.known:
            # The process that stored this shard has ended since.
            self.known[digest] = await self._pools.read.run(self._digests, digest)
        return self.known[digest]

    async def document(self, digest: Digest) -> bytes:
        """Return the layout of an own shard. It is stored again if the node tier has lost it.

        Raises what `ensure` raises.
        """
        return await self._pools.read.run(self._document, digest)

    async def wanted(self, digest: Digest) -> RankLayout:
        """Return the layout of the payload that a rank requests from the restore point.

        The document is read from the shared volume and is not stored. Raises what `ensure` raises.
        """
        return await self._pools.read.run(lambda: parse_rank_layout(self._files.read(digest)))

    async def publish(self, document: bytes) -> Digest:
        """Write a layout to the shared volume, where the ranks read it. Raises UnavailableError."""
        digest = digest_of(document)
        await self._pools.meta.run(self._files.ensure, document, digest)
        return digest

    def _store(self, digest: Digest, put: Callable[[bytes], object] | None = None) -> LayoutDigests:
        document = self._files.read(digest)
        digests = layout_digests(document)
        (put or self._node.put_layout)(document)
        return digests

    def _digests(self, digest: Digest) -> LayoutDigests:
        return layout_digests(self._document(digest))

    def _document(self, digest: Digest) -> bytes:
        try:
            return self._node.get_layout(digest)
        except (NotFoundError, CorruptionError):
            self._store(digest)
            return self._node.get_layout(digest)
