"""How long a listing of 10,000 checkpoints takes, as `holdfast list` makes it: of a folder and of a bucket.

The bucket is one of a MinIO on this machine. Files and objects are small, of two ranks: a listing reads names
only. Most of the time goes to filling the bucket.

Writes results/listing.json and prints it, and exits with 1 if a median is above 2 s.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import median

from tests.support.servers.minio_server import MinioServer
from tests.support.tiers.stores import s3_tier

import holdfast
from benchmarks.report import RESULTS
from holdfast.base.settings import apply_environment
from holdfast.directory.choice import JOB_UID
from holdfast_core.format import keys
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import CheckpointId, JobUid, Rank, RestartRound, ShardRef, Step

CHECKPOINTS = 10_000
LISTINGS = 5
WRITERS = 16
TARGET_SECONDS = 2.0


def main() -> int:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        in_folder = folder_seconds(Path(directory))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        tempfile.tempdir = directory  # holds the server's data
        in_bucket = bucket_seconds()
    is_ok = max(median(in_folder), median(in_bucket)) <= TARGET_SECONDS
    result = {
        "checkpoints": CHECKPOINTS,
        "ranks": 2,
        "folder_seconds": in_folder,
        "bucket_seconds": in_bucket,
        "target_seconds": TARGET_SECONDS,
        "ok": is_ok,
    }
    text = json.dumps(result, indent=1)
    (RESULTS / "listing.json").write_text(text + "\n")
    print(text)
    return 0 if is_ok else 1


def folder_seconds(root: Path) -> list[float]:
    for number in range(CHECKPOINTS):
        for key in keys_of(number, has_layouts=False):
            path = root / "tier" / JOB_UID / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(key.encode())
    return listed(str(root))


def bucket_seconds() -> list[float]:
    with MinioServer() as server, closing(s3_tier(server.config("many"), server.credentials)) as t:
        objects = t.job("team-a", JobUid("uid-of-gpt"))

        def put(number: int) -> None:
            for key in keys_of(number, has_layouts=True):
                objects.put(key, key.encode())

        with ThreadPoolExecutor(WRITERS) as pool:
            for _ in pool.map(put, range(CHECKPOINTS)):
                pass
        apply_environment(server.client_environment())
        return listed(f"s3://{server.bucket}/many")


def listed(place: str) -> list[float]:
    """Return the seconds of each listing of a place."""
    seconds = []
    for _ in range(LISTINGS):
        begun = time.perf_counter()
        with holdfast.open(place) as found:
            count = len(found.listing())
        seconds.append(round(time.perf_counter() - begun, 3))
        assert count == CHECKPOINTS, f"{count} checkpoints are listed"
    return seconds


def keys_of(number: int, *, has_layouts: bool) -> Iterator[str]:
    """Yield the names of the objects of one checkpoint of two ranks."""
    id_ = CheckpointId(Step(10 * (number + 1)), RestartRound(0))
    yield keys.manifest_key(id_)
    for rank in range(2):
        ref = ShardRef(JOB_UID, id_.step, id_.round, Rank(rank), digest_of(b"%d" % number))
        yield keys.shard_key(ref)
        if has_layouts:
            yield keys.stored_layout_key(ref)


if __name__ == "__main__":
    sys.exit(main())
