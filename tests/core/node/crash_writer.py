"""Child of the crash tests. It writes one shard (or a copy) with the failpoints of its environment.

usage: crash_writer.py ROOT shard|copy|manifest|delete|round|unused-layouts
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.clock import ManualClock
from tests.support.crash.failpoints import install_from_env
from tests.support.shards.builders import JOB_UID, BytesSource, payload, shard_file, shard_header

from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.node.documents import UNUSED_SECONDS, UnusedLayouts
from holdfast_core.node.files import BufferPool
from holdfast_core.node.tier import DiskNodeTier

SIZE = 200_000


def main(root: str, what: str) -> None:
    tier = DiskNodeTier(Path(root), capacity_bytes=64 << 20)
    tier.open()
    install_from_env(os.environ)
    checkpoint = CheckpointId(Step(10), RestartRound(0))
    match what:
        case "shard":
            tier.write_shard(shard_header(SIZE), BytesSource(payload(SIZE)))
        case "copy":
            file, record = shard_file(shard_header(SIZE), payload(SIZE))
            writer = tier.begin_copy(record.ref, len(file))
            writer.write(file)
            writer.commit()
        case "manifest":
            tier.put_manifest(JOB_UID, checkpoint, b'{"a":1}')
        case "delete":
            tier.delete_checkpoint(JOB_UID, checkpoint)
        case "unused-layouts":
            clock = ManualClock()
            unused = UnusedLayouts(Path(root), BufferPool(1 << 20, keep=1), clock.monotonic)
            for _ in range(2):
                unused.look(frozenset())
                clock.advance(UNUSED_SECONDS)
        case "round":
            tier.records.write_round(RestartRound(5), 2)
    print("done")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
