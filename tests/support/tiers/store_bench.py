"""Shards, an object tier behind a hostile proxy, and the requests that the proxy can match."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.support.servers.hostile_s3 import (
    HostileProxy,
    Matches,
    Seen,
    on,
)
from tests.support.servers.store_server import StoreServer
from tests.support.shards.builders import JOB_UID
from tests.support.shards.shard_files import CopyWriters

from holdfast_core.errors import (
    NotFoundError,
)
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.node.shard_file import DiskShardReader
from holdfast_core.store.s3.client import S3Client
from holdfast_core.store.tier import ObjectTier

MIB = 1 << 20
NAMESPACE = "team-a"
CHECKPOINT = CheckpointId(Step(100), RestartRound(0))
FOREVER = 1000
ANYTHING = on("")
PUT_WHOLE = on("PUT", query="")
PUT_PART = on("PUT", query="partNumber=")
SECOND_PART = on("PUT", query="partNumber=2")
CREATE = on("POST", query="uploads=")
COMPLETE = on("POST", query="uploadId=")
ABORT = on("DELETE", query="uploadId=")
HEAD = on("HEAD")
GET = on("GET", query="")
LIST = on("GET", query="list-type=2")


@dataclass
class Bench:
    """Two shards on disk, and direct access to the store without the proxy."""

    server: StoreServer
    tier: ObjectTier
    honest: ObjectTier
    proxy: HostileProxy
    client: S3Client
    whole: DiskShardReader
    parts: DiskShardReader
    directory: Path

    def reader(self, kind: str) -> DiskShardReader:
        return self.whole if kind == "whole" else self.parts

    def is_stored(self, reader: DiskShardReader) -> bool:
        """Return whether a direct download of the shard succeeds. The download verifies every byte."""
        try:
            self.honest.download_shard(NAMESPACE, reader.record.ref, self.writers())
        except NotFoundError:
            return False
        return True

    def unfinished(self, reader: DiskShardReader) -> int:
        ref = reader.record.ref
        key = (
            f"{self.client.config.prefix}/{NAMESPACE}/{JOB_UID}/shards/s{ref.step:012d}-r000000/"
            f"rank{ref.rank:06d}-{ref.blake3[3:19]}.shard"
        )
        return len(self.client.list_uploads(key)[0])

    def writers(self) -> CopyWriters:
        number = len(list(self.directory.iterdir()))
        directory = self.directory / f"copies{number}"
        directory.mkdir()
        return CopyWriters(directory)


def asks_for_byte(position: int) -> Matches:
    """Match ranged GETs that include this byte of the object."""

    def matches(seen: Seen) -> bool:
        first, _, last = seen.headers.get("range", "").removeprefix("bytes=").partition("-")
        return seen.method == "GET" and bool(last) and int(first) <= position <= int(last)

    return matches


FIRST_RUN = asks_for_byte(4096)
