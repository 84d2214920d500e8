"""When the coordinator looks for uploads that nobody will finish."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from holdfast_core.clock import ManualClock
from holdfast_core.contract import SidecarContract, StoreConfig
from holdfast_core.errors import UnavailableError
from holdfast_core.ids import JobUid, RestartRound, ShardRef, Worker
from holdfast_core.testing.builders import JOB_UID
from holdfast_core.tiers.object import S3ObjectTier
from holdfast_core.tiers.s3_credentials import Keys, StaticCredentials
from holdfast_sidecar.pools import Pools
from holdfast_sidecar.uploads import Reaper

STORE = StoreConfig("127.0.0.1:1", False, "bucket", "prefix", "us-east-1")
CONTRACT = SidecarContract(
    job_uid=JOB_UID,
    job="gpt",
    namespace="team-a",
    worker=Worker(0),
    birth_round=RestartRound(0),
    procs_per_worker=1,
    shared_dir="",
    pod_name="gpt-0",
    pod_ip="",
    node_dir="",
    node_capacity_bytes=0,
    certs_dir="",
    store_dir="",
    store="",
)


class CountingTier(S3ObjectTier):
    """Says what it was asked to end; the store is out of reach at the first time."""

    def __init__(self) -> None:
        super().__init__(STORE, StaticCredentials(Keys("key", "secret")))
        self.asked: list[tuple[str, JobUid, timedelta]] = []

    def abort_stale_uploads(
        self,
        namespace: str,
        job_uid: JobUid,
        older_than: timedelta,
        refs: Sequence[ShardRef] = (),
    ) -> int:
        self.asked.append((namespace, job_uid, older_than))
        if len(self.asked) == 1:
            raise UnavailableError("no answer")
        return 0


def test_at_first_and_then_every_six_hours_whatever_the_store_says() -> None:
    clock, tier = ManualClock(), CountingTier()
    pools = Pools(disk=1, copy=1, store=1)
    counts: list[int] = []

    async def run() -> None:
        reaper = Reaper(CONTRACT, tier, pools, clock)
        for hours in (0, 0, 5, 2, 1, 6):
            clock.advance(hours * 3600)
            await reaper.reap_if_due()
            counts.append(len(tier.asked))

    asyncio.run(run())
    pools.close()
    tier.close()
    assert counts == [1, 1, 1, 2, 2, 3]
    assert set(tier.asked) == {("team-a", JOB_UID, timedelta(hours=24))}
