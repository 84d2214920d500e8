"""The manifest: a checkpoint exists if and only if its manifest does.

The encoding is canonical, and the parser accepts canonical documents only.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast_core.errors import CorruptionError, FormatError, SwappedError
from holdfast_core.format.canonical import (
    TypedDocument,
    decode_document,
    digest_of,
    encode_document,
    expect_digest,
    expect_int,
    expect_text,
)
from holdfast_core.format.keys import checked_job_uid
from holdfast_core.format.rank_layout import MAX_TENSOR_BYTES, LayoutDigests
from holdfast_core.ids import (
    MAX_ROUND,
    MAX_STEP,
    CheckpointId,
    Digest,
    JobUid,
    Rank,
    RestartRound,
    ShardInfo,
    ShardRef,
    Step,
)

FORMAT_VERSION = 1
MAX_SHARDS = 100_000

_WHAT = "manifest"


class JobIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The job that a checkpoint belongs to."""

    namespace: str
    name: str
    uid: JobUid


class ManifestShard(
    msgspec.Struct,
    frozen=True,
    gc=False,
    forbid_unknown_fields=True,
    rename={
        "payload_bytes": "bytes",
        "chunk_table": "chunkTable",
        "same_tensors": "sameTensors",
        "same_boxes": "sameBoxes",
    },
):
    """Entry of one rank's shard in a manifest."""

    rank: Rank
    payload_bytes: int
    blake3: Digest
    """Digest of the payload."""
    chunk_table: Digest
    """BLAKE3 of the packed chunk table."""
    layout: Digest
    """Digest of the rank's layout document."""
    same_tensors: Rank
    """The lowest rank that has tensors of the same names, dtypes and global shapes."""
    same_boxes: Rank
    """The lowest rank that has the same boxes of the same tensors at the same bytes of its payload."""

    @property
    def info(self) -> ShardInfo:
        return ShardInfo(self.rank, self.payload_bytes, self.blake3, self.chunk_table)


class Manifest(TypedDocument, frozen=True, tag=FORMAT_VERSION):
    """Manifest of one checkpoint. `shards` holds every rank once, in order."""

    job: JobIdentity
    step: Step
    restart_round: RestartRound
    world_size: int
    parent: Digest | None
    """Digest of the manifest that the round restored from; None if the round restored nothing."""
    shards: tuple[ManifestShard, ...]

    @property
    def checkpoint(self) -> CheckpointId:
        return CheckpointId(self.step, self.restart_round)

    @property
    def payload_bytes(self) -> int:
        """Total size of all payloads."""
        return sum(shard.payload_bytes for shard in self.shards)

    def ref(self, rank: Rank) -> ShardRef:
        """Return the identity of a rank's shard. Raises FormatError if there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise FormatError(
                f"manifest {self.checkpoint}: expected a rank below {self.world_size}, found {rank}"
            )
        shard = self.shards[rank]
        return ShardRef(self.job.uid, self.step, self.restart_round, shard.rank, shard.blake3)

    def to_bytes(self) -> bytes:
        """Return the canonical document. Raises FormatError if `parse_manifest` would refuse it."""
        _check(self)
        return encode_document(self, _WHAT)


_DECODER = msgspec.json.Decoder(Manifest)


def manifest_shards(
    entries: Sequence[tuple[ShardInfo, LayoutDigests]],
) -> tuple[ManifestShard, ...]:
    """Return the entries of all shards, from each shard and its layout, by rank."""
    tensors: dict[Digest, Rank] = {}
    boxes: dict[Digest, Rank] = {}
    return tuple(
        ManifestShard(
            shard.rank,
            shard.payload_bytes,
            shard.blake3,
            shard.chunk_table,
            layout.layout,
            tensors.setdefault(layout.tensors, shard.rank),
            boxes.setdefault(layout.boxes, shard.rank),
        )
        for shard, layout in entries
    )


def manifest_document(
    job: JobIdentity,
    checkpoint: CheckpointId,
    parent: Digest | None,
    entries: Sequence[tuple[ShardInfo, LayoutDigests]],
) -> bytes:
    """Return the manifest of a checkpoint. Everyone who knows the shards builds the same bytes.

    Args:
        job: Identity of the job.
        checkpoint: The checkpoint.
        parent: Digest of the manifest that the round restored from, or None.
        entries: Each rank's shard and its layout, by rank.

    Raises:
        FormatError: A value is one that no manifest can hold.
    """
    step, round_, shards = checkpoint.step, checkpoint.round, manifest_shards(entries)
    return Manifest(job, step, round_, len(shards), parent, shards).to_bytes()


def manifest_digest(document: bytes) -> Digest:
    """Return the digest of a checkpoint, which is the BLAKE3 of its manifest document."""
    return digest_of(document)


def parse_manifest(document: bytes) -> Manifest:
    """Parse a manifest document.

    Raises FormatError, with the path of the wrong value, for anything that `Manifest.to_bytes` does not
    produce.
    """
    manifest = decode_document(_DECODER, document, _WHAT, FORMAT_VERSION)
    _check(manifest)
    return manifest


def parse_manifest_of(
    document: bytes, job_uid: JobUid, checkpoint: CheckpointId, *, namespace: str | None = None
) -> Manifest:
    """Parse the manifest that was stored under the name of this job and checkpoint.

    Raises:
        FormatError: The document is not a valid manifest.
        SwappedError: The document is of another job, step, round or, if one is given, namespace. It was
            renamed or copied, and a restore would silently continue from another step.
    """
    manifest = parse_manifest(document)
    found = (manifest.job.uid, manifest.checkpoint)
    if found != (job_uid, checkpoint) or namespace not in (None, manifest.job.namespace):
        raise SwappedError(
            f"the manifest of {checkpoint} of job {job_uid} names {manifest.checkpoint} of job "
            f"{manifest.job.uid} in namespace {manifest.job.namespace}: the document was renamed "
            "or copied"
        )
    return manifest


def misnamed(document: bytes, job_uid: JobUid, checkpoint: CheckpointId) -> str | None:
    """Return why a document does not belong to the job and checkpoint under whose name it was stored.

    Returns None if it does, or if it cannot be parsed: it may have a newer format.
    """
    try:
        parse_manifest_of(document, job_uid, checkpoint)
    except CorruptionError as error:
        return str(error)
    except FormatError:
        return None
    return None


def _check(manifest: Manifest) -> None:
    """Raise FormatError if a field is out of bounds or contradicts another one."""
    expect_text(manifest.job.namespace, f"{_WHAT}.job.namespace", limit=253)
    expect_text(manifest.job.name, f"{_WHAT}.job.name", limit=253)
    checked_job_uid(manifest.job.uid)
    expect_int(manifest.step, f"{_WHAT}.step", high=MAX_STEP)
    expect_int(manifest.restart_round, f"{_WHAT}.restartRound", high=MAX_ROUND)
    expect_int(manifest.world_size, f"{_WHAT}.worldSize", low=1, high=MAX_SHARDS)
    if manifest.parent is not None:
        expect_digest(manifest.parent, f"{_WHAT}.parent")
    if len(manifest.shards) != manifest.world_size:
        raise FormatError(
            f"{_WHAT}.shards: {len(manifest.shards)} shards for worldSize {manifest.world_size}"
        )
    for index, shard in enumerate(manifest.shards):
        _check_shard(shard, index, manifest.shards)


def _check_shard(shard: ManifestShard, index: int, shards: Sequence[ManifestShard]) -> None:
    path = f"{_WHAT}.shards[{index}]"
    if shard.rank != index:
        raise FormatError(
            f"{path}.rank: {shard.rank}, expected {index} (every rank once, in order)"
        )
    expect_int(shard.payload_bytes, f"{path}.bytes", high=MAX_TENSOR_BYTES)
    expect_digest(shard.blake3, f"{path}.blake3")
    expect_digest(shard.chunk_table, f"{path}.chunkTable")
    expect_digest(shard.layout, f"{path}.layout")
    tensors = expect_int(shard.same_tensors, f"{path}.sameTensors", high=index)
    boxes = expect_int(shard.same_boxes, f"{path}.sameBoxes", high=index)
    # The lowest rank of a group names itself, and equal boxes are boxes of equal tensors.
    if tensors != index and shards[tensors].same_tensors != tensors:
        raise FormatError(f"{path}.sameTensors: rank {tensors} names another rank")
    if boxes != index and (shards[boxes].same_boxes, shards[boxes].same_tensors) != (
        boxes,
        tensors,
    ):
        raise FormatError(f"{path}.sameBoxes: rank {boxes} names another rank or has other tensors")
