"""No upload refers to the objects of a quarantined checkpoint: a drill may have found them damaged."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
from tests.support.clock import ManualClock
from tests.support.sidecar.contracts import CONTRACT
from tests.support.sidecar.ledgers import LAYOUT, new_ledger, shard_info, store_manifests
from tests.support.sidecar.waiting import until
from tests.support.tiers.objects import MemoryObjectStore

from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.messages.schema import PersistRequest, Policy, RestorePoint
from holdfast_core.store.tier import ObjectTier
from holdfast_core.tasks import Tasks
from holdfast_sidecar.base.telemetry import Failures
from holdfast_sidecar.base.tiers import Pools
from holdfast_sidecar.coordinator.uploads import GangUploads
from holdfast_sidecar.wire.server import Versioned

OLD = CheckpointId(Step(10), RestartRound(0))
NEWEST = CheckpointId(Step(20), RestartRound(0))


def round_with(*quarantined: CheckpointId) -> Any:
    return Mock(
        policy=Policy(1, object_every_steps=1000),
        last_persisted=RestorePoint(NEWEST.step, NEWEST.round),
        round=RestartRound(0),
        restore_point=RestorePoint(NEWEST.step, NEWEST.round),
        quarantined=tuple(RestorePoint(c.step, c.round) for c in quarantined),
        hold_uploads=False,
    )


async def requested(*apart: CheckpointId) -> PersistRequest:
    """Return the request for step 30, which the store's step 20 precedes, whose chunks step 10 has, too."""
    ledger, versioned, tasks = new_ledger(), Versioned(), Tasks()
    pools, tier = Pools(disk=1, fetch=1, store=1), ObjectTier(MemoryObjectStore())
    tier.put_references(CONTRACT.namespace, CONTRACT.job_uid, NEWEST, {OLD: 1 << 20})
    uploads = GangUploads(
        CONTRACT,
        round_with(),
        tier,
        ledger=ledger,
        versioned=versioned,
        pools=pools,
        failures=Failures(lambda: None),
        clock=ManualClock(),
        on_change=lambda: None,
    )
    uploads.policy(round_with(*apart))
    for rank in (0, 1):
        ledger.prepared(Step(30), shard_info(rank), LAYOUT)
    assert store_manifests(ledger, 30) == [True]
    uploads.ask_after(Step(29))
    uploads.committed(Step(30))
    versioned.tick()
    tasks.spawn(uploads.run(), "uploads")
    await until(lambda: ledger.uploads.request is not None, "the request")
    request = ledger.uploads.request
    await tasks.cancel()
    pools.close()
    tier.close()
    assert request is not None
    return request


@pytest.mark.parametrize(
    ("apart", "base", "older"),
    [
        pytest.param((), NEWEST, (OLD,), id="none"),
        pytest.param((OLD,), NEWEST, (), id="an older one"),
        pytest.param((NEWEST,), None, (), id="the newest"),
    ],
)
def test_what_an_upload_may_refer_to(
    apart: tuple[CheckpointId, ...],
    base: CheckpointId | None,
    older: tuple[CheckpointId, ...],
) -> None:
    request = asyncio.run(requested(*apart))
    found = None if request.base is None else request.base.own_checkpoint
    assert found == base
    assert request.older == older
