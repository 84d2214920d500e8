"""Child of the kill tests: uploads one shard file, or a pack of it, and reports the end.

usage: uploader.py STORE_CONFIG_JSON SHARD_FILE REF_JSON [INDEX_FILE [WIDTH]]

With a WIDTH, all chunks are compressed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.servers.credentials import StaticCredentials
from tests.support.servers.store_server import ACCESS_KEY, SECRET_KEY
from tests.support.tiers.stores import s3_tier

from holdfast_core.contract import StoreConfig
from holdfast_core.ids import Digest, JobUid, Rank, RestartRound, ShardRef, Step
from holdfast_core.node.files import BufferPool
from holdfast_core.node.shard_file import DiskShardReader
from holdfast_core.shards.file import FOOTER, Trailer
from holdfast_core.shards.pack import unpack_index, unshared_index
from holdfast_core.store.s3.credentials import Keys


def main(config: str, path: str, ref: str, index: str = "", width: str = "") -> None:
    job_uid, step, restart_round, rank, digest = json.loads(ref)
    wanted = ShardRef(
        JobUid(job_uid), Step(step), RestartRound(restart_round), Rank(rank), Digest(digest)
    )
    keys = StaticCredentials(Keys(ACCESS_KEY, SECRET_KEY))
    tier = s3_tier(StoreConfig.from_json(config), keys)
    with DiskShardReader.open(Path(path), wanted, BufferPool(1 << 20, keep=2)) as reader:
        if width:
            whole = unshared_index(Trailer(reader.record, reader.table))
            tier.upload_encoded("team-a", reader, whole, bytes([int(width)] * len(whole.places)))
        elif not index:
            tier.upload_shard("team-a", reader)
        else:
            data = Path(index).read_bytes()
            _, stored_bytes, *_ = FOOTER.unpack(data[-FOOTER.size :])
            tier.upload_pack("team-a", reader, unpack_index(data, stored_bytes + len(data)))
    tier.close()
    print("done")


main(*sys.argv[1:])
