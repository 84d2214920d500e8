"""Manifests as the coordinator builds them and members check them. This module does no I/O.

A manifest depends only on the job, the ROUND and what the ranks report about their shards, so every
coordinator of a round builds the same bytes, also after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.contract import SidecarContract
from holdfast_core.errors import FormatError
from holdfast_core.format.manifest import (
    JobIdentity,
    Manifest,
    manifest_digest,
    manifest_document,
    parse_manifest,
    parse_manifest_of,
)
from holdfast_core.ids import CheckpointId, Digest, JobUid, Rank
from holdfast_core.messages.schema import ManifestPut, ShardInfo
from holdfast_sidecar.coordinator.ledger import StepEntry


@dataclass(frozen=True, slots=True)
class Built:
    """The manifest of a step, and the shards of all ranks in order."""

    manifest: bytes
    digest: Digest
    shards: tuple[ShardInfo, ...]


def build_manifest(contract: SidecarContract, parent: Digest | None, entry: StepEntry) -> Built:
    """Build the manifest of a step whose shards are known for every rank.

    Args:
        contract: The contract of this pod, which names the job.
        parent: Digest of the manifest that the round restored from.
        entry: The step.

    Raises:
        FormatError: A rank reported a value that no manifest can hold.
    """
    ranks = [Rank(rank) for rank in range(entry.world_size)]
    shards = tuple(entry.shards[rank] for rank in ranks)
    manifest = manifest_document(
        JobIdentity(contract.namespace, contract.job, contract.job_uid),
        CheckpointId(entry.step, entry.round),
        parent,
        [shard.entry(entry.layouts[shard.rank]) for shard in shards],
    )
    return Built(manifest, manifest_digest(manifest), shards)


def shard_infos(
    document: bytes, job_uid: JobUid, checkpoint: CheckpointId
) -> tuple[ShardInfo, ...]:
    """Return the shards that the checkpoint's manifest names. Raises what `parse_manifest_of` raises."""
    return tuple(
        ShardInfo(s.rank, s.payload_bytes, s.blake3, s.chunk_table)
        for s in parse_manifest_of(document, job_uid, checkpoint).shards
    )


def check_put(message: ManifestPut, contract: SidecarContract) -> Manifest:
    """Parse the manifest that a coordinator sent to be stored.

    Raises:
        FormatError: The manifest is not valid, or it is of another job, round or step than this sidecar and
            the message name.
    """
    manifest = parse_manifest(message.manifest.encode())
    found = (manifest.job.uid, manifest.restart_round, manifest.step)
    wanted = (contract.job_uid, message.round, message.step)
    if found != wanted:
        raise FormatError(f"manifest put: job, round, step are {found}, expected {wanted}")
    return manifest
