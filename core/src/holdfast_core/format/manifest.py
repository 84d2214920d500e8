"""The manifest: a checkpoint exists if and only if its manifest does.

The encoding is canonical, and the parser accepts canonical documents only.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.errors import CorruptionError, FormatError
from holdfast_core.format.canonical import dumps_canonical, loads_canonical
from holdfast_core.format.checks import (
    expect_checkpoint,
    expect_digest,
    expect_document,
    expect_int,
    expect_list,
    expect_object,
    expect_text,
)
from holdfast_core.format.digest import digest_of
from holdfast_core.format.dtypes import MAX_TENSOR_BYTES
from holdfast_core.format.keys import MAX_RANK, checked_job_uid
from holdfast_core.ids import CheckpointId, Digest, JobUid, Rank, RestartRound, ShardRef, Step

FORMAT_VERSION = 1
MAX_SHARDS = 100_000

_FIELDS = frozenset(
    {
        "formatVersion",
        "job",
        "step",
        "restartRound",
        "worldSize",
        "parent",
        "layout",
        "shards",
    }
)
_JOB_FIELDS = frozenset({"namespace", "name", "uid"})
_SHARD_FIELDS = frozenset({"rank", "bytes", "blake3", "chunkTable"})


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The job that a checkpoint belongs to."""

    namespace: str
    name: str
    uid: JobUid


@dataclass(frozen=True, slots=True)
class ManifestShard:
    """Entry of one rank's shard in a manifest."""

    rank: Rank
    payload_bytes: int
    blake3: Digest
    """Digest of the payload."""
    chunk_table: Digest
    """BLAKE3 of the packed chunk table."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Manifest of one checkpoint. `shards` holds every rank once, in order."""

    job: JobIdentity
    step: Step
    restart_round: RestartRound
    world_size: int
    parent: Digest | None
    """Digest of the manifest that the round restored from; None if the round restored nothing."""
    layout: Digest
    """Digest of the layout document of all ranks."""
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
        data = dumps_canonical(
            {
                "formatVersion": FORMAT_VERSION,
                "job": {
                    "namespace": self.job.namespace,
                    "name": self.job.name,
                    "uid": self.job.uid,
                },
                "step": self.step,
                "restartRound": self.restart_round,
                "worldSize": self.world_size,
                "parent": self.parent,
                "layout": self.layout,
                "shards": [
                    {
                        "rank": shard.rank,
                        "bytes": shard.payload_bytes,
                        "blake3": shard.blake3,
                        "chunkTable": shard.chunk_table,
                    }
                    for shard in self.shards
                ],
            }
        )
        parse_manifest(data)
        return data


def manifest_digest(document: bytes) -> Digest:
    """Return the digest of a checkpoint, which is the BLAKE3 of its manifest document."""
    return digest_of(document)


def parse_manifest(document: bytes) -> Manifest:
    """Parse a manifest document.

    Raises FormatError, with the path of the wrong value, for anything that `Manifest.to_bytes` does not
    produce.
    """
    what = "manifest"
    root = expect_document(loads_canonical(document, what), what, _FIELDS, version=FORMAT_VERSION)
    job = expect_object(root["job"], f"{what}.job", _JOB_FIELDS)
    uid = JobUid(expect_text(job["uid"], f"{what}.job.uid", limit=128))
    world_size = expect_int(root["worldSize"], f"{what}.worldSize", low=1, high=MAX_SHARDS)
    entries = expect_list(root["shards"], f"{what}.shards", limit=MAX_SHARDS)
    if len(entries) != world_size:
        raise FormatError(f"{what}.shards: {len(entries)} shards for worldSize {world_size}")
    checkpoint = expect_checkpoint(root, what)
    parent = root["parent"]
    return Manifest(
        job=JobIdentity(
            namespace=expect_text(job["namespace"], f"{what}.job.namespace", limit=253),
            name=expect_text(job["name"], f"{what}.job.name", limit=253),
            uid=checked_job_uid(uid),
        ),
        step=checkpoint.step,
        restart_round=checkpoint.round,
        world_size=world_size,
        parent=None if parent is None else expect_digest(parent, f"{what}.parent"),
        layout=expect_digest(root["layout"], f"{what}.layout"),
        shards=tuple(_shard(entry, index) for index, entry in enumerate(entries)),
    )


def parse_manifest_of(
    document: bytes, job_uid: JobUid, checkpoint: CheckpointId, *, namespace: str | None = None
) -> Manifest:
    """Parse the manifest that was stored under the name of this job and checkpoint.

    Raises:
        FormatError: The document is not a valid manifest.
        CorruptionError: The document is of another job, step, round or, if one is given, namespace. It
            was renamed or copied, and a restore would silently continue from another step.
    """
    manifest = parse_manifest(document)
    found = (manifest.job.uid, manifest.checkpoint)
    if found != (job_uid, checkpoint) or namespace not in (None, manifest.job.namespace):
        raise CorruptionError(
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


def _shard(value: object, index: int) -> ManifestShard:
    path = f"manifest.shards[{index}]"
    entry = expect_object(value, path, _SHARD_FIELDS)
    rank = expect_int(entry["rank"], f"{path}.rank", high=MAX_RANK)
    if rank != index:
        raise FormatError(f"{path}.rank: {rank}, expected {index} (every rank once, in order)")
    return ManifestShard(
        rank=Rank(rank),
        payload_bytes=expect_int(entry["bytes"], f"{path}.bytes", high=MAX_TENSOR_BYTES),
        blake3=expect_digest(entry["blake3"], f"{path}.blake3"),
        chunk_table=expect_digest(entry["chunkTable"], f"{path}.chunkTable"),
    )
