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
    FormatError,
    HoldfastError,
    NotFoundError,
    UnavailableError,
)
from holdfast_core.format.digest import digest_of, hex_of
from holdfast_core.format.layout import parse_layout, rank_layout_of
from holdfast_core.ids import Digest, Rank, ShardRef
from holdfast_core.tiers.base import NodeTier
from holdfast_sidecar.pools import Pools

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
        document = self._read(self._directory / f"{hex_of(digest)}.json")
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
        path = self._directory / f"{hex_of(digest)}.json"
        temporary = path.with_name(f".{path.name}.sidecar")
        try:
            if not self._directory.exists():
                self._directory.mkdir(parents=True, exist_ok=True)
                self._directory.chmod(0o2770)  # ranks may have another uid and the same group
            temporary.write_bytes(document)
            temporary.chmod(0o660)
            temporary.replace(path)
        except OSError as error:
            raise UnavailableError(f"writing layout {path}: {error}") from error
        return digest

    def _read(self, path: Path) -> bytes:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFoundError(f"layout {path.name} is not in {path.parent}") from error
        except OSError as error:
            raise UnavailableError(f"opening layout {path}: {error}") from error
        with os.fdopen(fd, "rb") as file:
            document = file.read(MAX_LAYOUT_BYTES + 1)
        if len(document) > MAX_LAYOUT_BYTES:
            raise FormatError(f"layout {path.name}: more than {MAX_LAYOUT_BYTES} bytes")
        return document


def _part(document: bytes, rank: Rank) -> bytes:
    layout = parse_layout(document)
    part = rank_layout_of(layout, rank).to_bytes()
    if digest_of(part) != layout.ranks[rank].layout:
        raise CorruptionError(
            f"layout of rank {rank}: the checkpoint's layout says {layout.ranks[rank].layout}, and "
            f"what it holds of the rank is {digest_of(part)}"
        )
    return part
