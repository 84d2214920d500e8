"""Layout documents in the shared volume, named by their digest.

The SDK writes a document there for each layout that its ranks save or restore with, and the sidecar puts
layouts there that ranks request. The trainer can write to the volume, so a document counts only if its
size is bounded and its digest matches. The layouts of saves are stored on the node tier and are sent from
there to a coordinator that lacks them.
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
from holdfast_core.format.digest import digest_of, hex_of
from holdfast_core.format.layout import parse_layout, rank_layout_of
from holdfast_core.ids import Digest, Rank, ShardRef
from holdfast_core.shm.shared_files import opened_directory, read_regular, replace_file
from holdfast_core.tiers.base import NodeTier
from holdfast_sidecar.base.pools import Pools

MAX_LAYOUT_BYTES = 64 << 20


class RankLayouts:
    """Access to the layout documents of this pod's ranks, in the shared volume and on the node tier."""

    def __init__(self, directory: Path, node: NodeTier, pools: Pools) -> None:
        self._directory = directory
        self._node = node
        self._pools = pools
        self._known: set[Digest] = set()

    async def ensure(self, digest: Digest) -> None:
        """Make the document durable on the node tier.

        Raises:
            NotFoundError: The document is not in the shared volume.
            FormatError: The document is too large, or is no regular file.
            CorruptionError: The document has another digest.
            UnavailableError: The document cannot be read.
        """
        if digest not in self._known:
            await self._pools.meta.run(self._store, digest)
            self._known.add(digest)

    async def text(self, digest: Digest) -> str:
        """Return a document from the node tier, for the coordinator. Raises NotFoundError."""
        return (await self._pools.read.run(self._node.get_layout, digest)).decode()

    async def wanted(self, digest: Digest) -> bytes:
        """Return the layout of the payload that a rank requests from the restore point.

        The document is read from the shared volume and is not stored. Raises what `ensure` raises.
        """
        return await self._pools.read.run(self._checked, digest)

    async def saved(self, ref: ShardRef) -> bytes:
        """Return the layout of a shard, both from the node tier.

        A node has this document for shards that its own ranks saved. Raises NotFoundError and
        CorruptionError.
        """
        return await self._pools.read.run(self._saved, ref)

    async def part(self, document: bytes, rank: Rank) -> bytes:
        """Extract one rank's layout from the layout of a checkpoint. Raises FormatError, CorruptionError."""
        return await self._pools.fill.run(_part, document, rank)

    async def publish(self, document: bytes) -> Digest:
        """Write a layout to the shared volume, where the ranks read it. Raises UnavailableError."""
        return await self._pools.meta.run(self._publish, document)

    def _store(self, digest: Digest) -> None:
        self._node.put_layout(self._checked(digest))

    def _saved(self, ref: ShardRef) -> bytes:
        record = self._node.find(ref)
        if record is None:
            raise NotFoundError(f"shard of {ref} is not in the node tier")
        return self._node.get_layout(record.header.layout)

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
                return read_regular(directory, _name(digest), MAX_LAYOUT_BYTES)
        except FileNotFoundError as error:
            raise NotFoundError(f"layout {digest} is not in {self._directory}") from error
        except OSError as error:
            raise UnavailableError(f"reading layout {digest}: {error}") from error


def _name(digest: Digest) -> str:
    return f"{hex_of(digest)}.json"


def _part(document: bytes, rank: Rank) -> bytes:
    layout = parse_layout(document)
    part = rank_layout_of(layout, rank).to_bytes()
    if digest_of(part) != layout.ranks[rank].layout:
        raise CorruptionError(
            f"layout of rank {rank}: the checkpoint's layout names {layout.ranks[rank].layout}, "
            f"but its part of the rank has digest {digest_of(part)}"
        )
    return part
