"""Layout documents in the shared volume, named by their digest.

The SDK writes a document there for each layout that its ranks save or restore with, and the sidecar puts
layouts there that ranks request. The trainer can write to the volume, so a document counts only if its
size is bounded and its digest matches. The layouts of saves are stored on the node tier. From there they go
to the nodes and to the object store that get a copy of a shard which names them.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from holdfast_core.errors import (
    CorruptionError,
    HoldfastError,
    NotFoundError,
    UnavailableError,
)
from holdfast_core.format.canonical import MAX_DOCUMENT_BYTES
from holdfast_core.format.digest import digest_of, hex_of
from holdfast_core.format.rank_layout import (
    LayoutDigests,
    RankLayout,
    layout_digests,
    parse_rank_layout,
)
from holdfast_core.ids import Digest
from holdfast_core.shm.shared_files import opened_directory, read_regular, replace_file
from holdfast_core.tiers.base import NodeTier
from holdfast_sidecar.base.pools import Pools


class RankLayouts:
    """Access to the layout documents of this pod's ranks, in the shared volume and on the node tier."""

    def __init__(self, directory: Path, node: NodeTier, pools: Pools) -> None:
        self._directory = directory
        self._node = node
        self._pools = pools
        self._known: dict[Digest, LayoutDigests] = {}

    async def ensure(self, digest: Digest) -> None:
        """Make the document durable on the node tier. One that is there is only marked as used.

        Raises:
            NotFoundError: The document is not in the shared volume.
            FormatError: The document is too large, or is no regular file, or no layout.
            CorruptionError: The document has another digest.
            UnavailableError: The document cannot be read.
        """
        if digest not in self._known or not await self._pools.meta.run(
            self._node.keep_layout, digest
        ):
            self._known[digest] = await self._pools.meta.run(self._store, digest)

    async def digests(self, digest: Digest) -> LayoutDigests:
        """Return what the layout of an own shard has in common with others.

        Raises what `document` raises.
        """
        if digest not in self._known:
            # The process that stored this shard has ended since.
            self._known[digest] = await self._pools.read.run(self._digests, digest)
        return self._known[digest]

    async def document(self, digest: Digest) -> bytes:
        """Return the layout of an own shard. It is stored again if the node tier has lost it.

        Raises what `ensure` raises.
        """
        return await self._pools.read.run(self._document, digest)

    async def wanted(self, digest: Digest) -> RankLayout:
        """Return the layout of the payload that a rank requests from the restore point.

        The document is read from the shared volume and is not stored. Raises what `ensure` raises.
        """
        return await self._pools.read.run(lambda: parse_rank_layout(self._checked(digest)))

    async def publish(self, document: bytes) -> Digest:
        """Write a layout to the shared volume, where the ranks read it. Raises UnavailableError."""
        return await self._pools.meta.run(self._publish, document)

    def _store(self, digest: Digest) -> LayoutDigests:
        document = self._checked(digest)
        digests = layout_digests(document)
        self._node.put_layout(document)
        return digests

    def _digests(self, digest: Digest) -> LayoutDigests:
        return layout_digests(self._document(digest))

    def _document(self, digest: Digest) -> bytes:
        try:
            return self._node.get_layout(digest)
        except (NotFoundError, CorruptionError):
            self._store(digest)
            return self._node.get_layout(digest)

    def _checked(self, digest: Digest) -> bytes:
        document = self._read(digest)
        found = digest_of(document)
        if found != digest:
            raise CorruptionError(f"layout {digest}: the document's digest is {found}")
        return document

    def _publish(self, document: bytes) -> Digest:
        digest = digest_of(document)
        with contextlib.suppress(HoldfastError):
            # Every rank of the pod requests the same document. One that is there already is not written
            # again, so that a full volume does not fail the later requests.
            self._checked(digest)
            return digest
        try:
            self._write(_name(digest), document)
        except OSError as error:
            raise UnavailableError(f"writing layout {digest}: {error}") from error
        return digest

    def _write(self, name: str, document: bytes) -> None:
        with (
            opened_directory(self._directory.parent) as above,
            contextlib.suppress(FileExistsError),
        ):
            os.mkdir(self._directory.name, 0o700, dir_fd=above)
            with opened_directory(self._directory) as created:
                # Ranks may have another uid and the same group. The mode is set through the descriptor,
                # and only if the directory was created here: by now the trainer could have replaced the
                # path by a link to a directory of the sidecar.
                os.fchmod(created, 0o2770)
        with opened_directory(self._directory) as directory:
            replace_file(directory, name, document, mode=0o660)

    def _read(self, digest: Digest) -> bytes:
        try:
            with opened_directory(self._directory) as directory:
                return read_regular(directory, _name(digest), MAX_DOCUMENT_BYTES)
        except FileNotFoundError as error:
            raise NotFoundError(f"layout {digest} is not in {self._directory}") from error
        except OSError as error:
            raise UnavailableError(f"reading layout {digest}: {error}") from error


def _name(digest: Digest) -> str:
    return f"{hex_of(digest)}.json"
