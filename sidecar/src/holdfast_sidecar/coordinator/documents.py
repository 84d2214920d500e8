"""Manifests and layouts as the sidecar builds, checks and lists them. This module does no I/O.

Both documents depend only on the job, the ROUND and what the ranks report about their shards, so every
coordinator of a round builds the same bytes, also after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.contract import SidecarContract
from holdfast_core.errors import CorruptionError, FormatError
from holdfast_core.format.digest import digest_of
from holdfast_core.format.layout import merge_layouts
from holdfast_core.format.manifest import (
    JobIdentity,
    Manifest,
    ManifestShard,
    manifest_digest,
    parse_manifest,
)
from holdfast_core.format.rank_layout import parse_rank_layout
from holdfast_core.ids import Digest, Rank
from holdfast_core.messages.schema import ManifestPut, Round, ShardInfo
from holdfast_sidecar.coordinator.ledger import StepEntry

_MAX_RANK_LAYOUTS_BYTES = 256 << 20
"""Bytes of rank layouts that a coordinator keeps in memory. It asks again for a layout that was evicted."""


@dataclass(frozen=True, slots=True)
class Built:
    """The manifest of a step, the layout that it names, and the shards of all ranks in order."""

    manifest: bytes
    digest: Digest
    layout: bytes
    shards: tuple[ShardInfo, ...]


class Builder:
    """Collector of the ranks' layouts of one round, from which it builds manifests."""

    def __init__(self, contract: SidecarContract, message: Round) -> None:
        self._job = JobIdentity(contract.namespace, contract.job, contract.job_uid)
        self._parent = message.restore_point.manifest
        self._rank_layouts: dict[Digest, bytes] = {}
        self._merged: tuple[tuple[Digest, ...], bytes] | None = None

    def has(self, layout: Digest) -> bool:
        return layout in self._rank_layouts

    def add(self, layout: Digest, text: str) -> None:
        """Store a rank's layout.

        Raises:
            FormatError: The text is not a rank layout.
            CorruptionError: Its digest is not `layout`.
        """
        document = text.encode()
        found = digest_of(document)
        if found != layout:
            raise CorruptionError(f"rank layout {layout}: the document's digest is {found}")
        parse_rank_layout(document)
        total_bytes = sum(map(len, self._rank_layouts.values())) + len(document)
        while total_bytes > _MAX_RANK_LAYOUTS_BYTES and self._rank_layouts:
            total_bytes -= len(self._rank_layouts.pop(next(iter(self._rank_layouts))))
        self._rank_layouts[layout] = document

    def build(self, entry: StepEntry) -> Built:
        """Build the manifest and the layout of a step whose shards are known for every rank.

        Raises:
            FormatError: A rank's layout is not known, or the layouts do not fit together.
        """
        ranks = [Rank(r) for r in range(entry.world_size)]
        layout = self._layout(tuple(entry.layouts[r] for r in ranks))
        manifest = Manifest(
            job=self._job,
            step=entry.step,
            restart_round=entry.round,
            world_size=entry.world_size,
            parent=self._parent,
            layout=digest_of(layout),
            shards=tuple(
                ManifestShard(
                    r,
                    entry.shards[r].payload_bytes,
                    entry.shards[r].blake3,
                    entry.shards[r].chunk_table,
                )
                for r in ranks
            ),
        ).to_bytes()
        return Built(
            manifest, manifest_digest(manifest), layout, tuple(entry.shards[r] for r in ranks)
        )

    def _layout(self, digests: tuple[Digest, ...]) -> bytes:
        if self._merged is not None and self._merged[0] == digests:
            return self._merged[1]
        known = dict(self._rank_layouts)  # This runs in a thread, and the event loop adds others.
        missing = [d for d in digests if d not in known]
        if missing:
            raise FormatError(f"layouts of {len(missing)} ranks are missing at the coordinator")
        merged = merge_layouts(known[d] for d in digests).to_bytes()
        self._merged = (digests, merged)
        return merged


def shard_infos(document: bytes) -> tuple[ShardInfo, ...]:
    """Return the shards that a manifest names. Raises FormatError."""
    return tuple(
        ShardInfo(s.rank, s.payload_bytes, s.blake3, s.chunk_table)
        for s in parse_manifest(document).shards
    )


def check_put(message: ManifestPut, contract: SidecarContract) -> Manifest:
    """Parse the manifest that a coordinator sent to be stored.

    Raises:
        FormatError: The manifest is not valid, it is of another job, round or step than this sidecar and
            the message name, or the layout in the message is not the one that the manifest names.
    """
    manifest = parse_manifest(message.manifest.encode())
    found = (manifest.job.uid, manifest.restart_round, manifest.step)
    wanted = (contract.job_uid, message.round, message.step)
    if found != wanted:
        raise FormatError(f"manifest put: job, round, step are {found}, expected {wanted}")
    if message.layout is not None and digest_of(message.layout.encode()) != manifest.layout:
        raise FormatError(f"manifest put: expected layout {manifest.layout}, found another one")
    return manifest
