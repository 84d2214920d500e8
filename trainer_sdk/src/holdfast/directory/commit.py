"""From durable shards to a checkpoint: prepared records of all ranks, then the manifest, then pruning.

 1. Every rank: shard and layout durable -> a record under prepared/s<step>-r<round>/.
 2. Rank 0: all ranks' records are there -> layout and manifest, put-if-absent. Committed.
 3. Every rank sees the manifest -> its own shards that no kept checkpoint names may go.
A kill between any two leaves the older checkpoint as it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from holdfast.directory.choice import JOB_UID
from holdfast_core.errors import FormatError, NotFoundError
from holdfast_core.format.layout import merge_layouts
from holdfast_core.format.manifest import JobIdentity, Manifest, ManifestShard
from holdfast_core.ids import CheckpointId, Digest, Rank
from holdfast_core.tiers.base import ShardRecord
from holdfast_core.tiers.node import DiskNodeTier

IDENTITY = JobIdentity("standalone", "standalone", JOB_UID)


@dataclass(frozen=True, slots=True)
class Committer:
    """Stateless over the directory: any process that opens it sees the same."""

    tier: DiskNodeTier
    prepared_dir: Path
    world_size: int
    own_ranks: range
    keep_last: int
    parent: Digest | None

    def prepare(self, record: ShardRecord) -> None:
        """Say that this rank's shard is durable. Seen whole or not at all."""
        header = record.header
        directory = self._directory(record.checkpoint)
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f".{header.rank}.{os.getpid()}.tmp"
        temporary.write_text(
            json.dumps(
                {
                    "rank": header.rank,
                    "payloadBytes": header.payload_bytes,
                    "layout": header.layout,
                    "blake3": record.blake3,
                    "chunkTable": record.chunk_table,
                }
            )
        )
        temporary.replace(directory / f"{header.rank}.json")

    def is_complete(self, checkpoint: CheckpointId) -> bool:
        directory = self._directory(checkpoint)
        return all((directory / f"{rank}.json").exists() for rank in range(self.world_size))

    def is_committed(self, checkpoint: CheckpointId) -> bool:
        try:
            self.tier.get_manifest(JOB_UID, checkpoint)
        except NotFoundError:
            return False
        return True

    def commit(self, checkpoint: CheckpointId) -> None:
        """Rank 0, once all are prepared. Idempotent. Raises FormatError for a bad record."""
        directory = self._directory(checkpoint)
        shards: list[ManifestShard] = []
        layouts: list[bytes] = []
        for rank in range(self.world_size):
            path = directory / f"{rank}.json"
            try:
                value = json.loads(path.read_text())
                shards.append(
                    ManifestShard(
                        Rank(rank),
                        int(value["payloadBytes"]),
                        Digest(value["blake3"]),
                        Digest(value["chunkTable"]),
                    )
                )
                layouts.append(self.tier.get_layout(Digest(value["layout"])))
            except (ValueError, KeyError, TypeError) as error:
                raise FormatError(f"prepared record {path}: {error}") from error
        layout = self.tier.put_layout(merge_layouts(layouts).to_bytes())
        manifest = Manifest(
            IDENTITY,
            checkpoint.step,
            checkpoint.round,
            self.world_size,
            self.parent,
            layout,
            tuple(shards),
        )
        self.tier.put_manifest(JOB_UID, checkpoint, manifest.to_bytes())
        shutil.rmtree(directory, ignore_errors=True)

    def prune(self, newest: CheckpointId, protected: CheckpointId | None, *, leader: bool) -> None:
        """After `newest` was committed: keep the last ones and the restore point of this run.

        Only the leader takes manifests away; every process then removes shards of its own ranks
        that no manifest names and that are older than `newest`.
        """
        held = [c for uid, c in self.tier.list_manifests() if uid == JOB_UID]
        held.sort(key=lambda c: (c.round, c.step))
        if leader:
            extra = held[: -self.keep_last] if self.keep_last else []
            for checkpoint in extra:
                # Until this run has its own committed ones, what it came from is the way back.
                if checkpoint not in (newest, protected):
                    self.tier.delete_checkpoint(JOB_UID, checkpoint)
                    held.remove(checkpoint)
            self._drop_old_records(newest)
        known = set(held)
        for record in self.tier.list_shards():
            checkpoint = record.checkpoint
            older = (checkpoint.round, checkpoint.step) < (newest.round, newest.step)
            own = record.header.rank in self.own_ranks
            if own and older and checkpoint not in known:
                self.tier.delete_shard(record.ref)

    def _drop_old_records(self, newest: CheckpointId) -> None:
        with contextlib.suppress(FileNotFoundError):
            for path in self.prepared_dir.iterdir():
                step, _, round_ = path.name[1:].partition("-r")
                if (int(round_), int(step)) < (newest.round, newest.step):
                    shutil.rmtree(path, ignore_errors=True)

    def _directory(self, checkpoint: CheckpointId) -> Path:
        return self.prepared_dir / str(checkpoint)
