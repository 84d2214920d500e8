"""Layouts: documents in the shared volume, named by digest; most the SDK leaves for the sidecar.

Those of saves are read once, bounded, digested, and kept on the node tier; from there they are sent to a
coordinator that does not know them yet.
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
    def __init__(self, directory: Path, node: NodeTier, pools: Pools) -> None:
        self._directory = directory
        self._node = node
        self._pools = pools
        self._known: set[Digest] = set()

    async def ensure(self, digest: Digest) -> None:
        """The document is durable on the node tier when this returns.
        Raises NotFoundError, FormatError (too large), CorruptionError (another digest)."""
        if digest not in self._known:
            await self._pools.meta.run(self._store, digest)
            self._known.add(digest)

    async def text(self, digest: Digest) -> str:
        """For the coordinator. Raises NotFoundError."""
        return (await self._pools.read.run(self._node.get_layout, digest)).decode()

    async def wanted(self, digest: Digest) -> bytes:
        """What a rank wants of the restore point. Raises as `ensure` does; keeps nothing."""
        return await self._pools.read.run(self._checked, digest)

    async def saved(self, ref: ShardRef) -> bytes:
        """The layout of a shard in the node tier, where this node knows the document: its own ranks
        saved it. Raises NotFoundError, CorruptionError."""
        return await self._pools.read.run(self._saved, ref)

    async def part(self, document: bytes, rank: Rank) -> bytes:
        """A rank's own layout out of a checkpoint's. Raises FormatError, CorruptionError."""
        return await self._pools.fill.run(_part, document, rank)

    async def give(self, document: bytes) -> Digest:
        """Put a layout where the ranks read it. Raises UnavailableError."""
        return await self._pools.meta.run(self._give, document)

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

    def _give(self, document: bytes) -> Digest:
        digest = digest_of(document)
        with contextlib.suppress(HoldfastError):
            # A volume that is full takes no more, and need not: every rank of the pod asks for it.
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
                # Ranks may have another uid and the same group. Of the descriptor, and only if it
                # was created here: a path could be a link to a directory of the sidecar by now.
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
            f"layout of rank {rank}: the checkpoint's layout says {layout.ranks[rank].layout}, and "
            f"what it holds of the rank is {digest_of(part)}"
        )
    return part
