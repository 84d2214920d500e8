from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.shards.builders import BytesSource, payload, shard_file, shard_header

from holdfast_core.errors import UnavailableError
from holdfast_core.node.files import BufferPool
from holdfast_core.node.tier import DiskNodeTier


def test_buffers_are_kept_and_counted() -> None:
    pool = BufferPool(4096, keep=1)
    with pool.take() as one, pool.take():
        one[:4] = b"here"
        assert pool.allocated_bytes == 8192
    assert pool.allocated_bytes == 4096
    with pool.take() as again:
        assert pool.allocated_bytes == 4096
        again[:4] = b"used"


def test_background_requests_are_refused_at_the_limit() -> None:
    pool = BufferPool(4096, keep=0, limit_bytes=8192)
    with ExitStack() as held:
        held.enter_context(pool.take())
        held.enter_context(pool.take_if_room())
        with pytest.raises(UnavailableError, match="the limit is 8192 bytes"), pool.take_if_room():
            pass
        with pool.take():
            assert pool.allocated_bytes == 3 * 4096
    with pool.take_if_room():
        assert pool.allocated_bytes == 4096


def test_too_many_copies_at_once_leave_nothing_behind_and_own_writes_go_on(tmp_path: Path) -> None:
    tier = DiskNodeTier(tmp_path, capacity_bytes=1 << 30)
    tier.open()
    files = [
        shard_file(shard_header(100, rank=1, step=step), payload(100)) for step in range(1, 34)
    ]
    writers = []
    with pytest.raises(UnavailableError, match="too many transfers"):
        for data, record in files:
            writers.append(tier.begin_copy(record.ref, len(data)))
    assert tier.buffers.allocated_bytes == tier.buffers.limit_bytes
    tier.write_shard(shard_header(5000), BytesSource(payload(5000)))
    for writer in writers:
        writer.abort()
    assert list(tmp_path.rglob(".tmp-*")) == []
    data, record = files[-1]
    writer = tier.begin_copy(record.ref, len(data))
    writer.write(data)
    assert writer.commit() == record
