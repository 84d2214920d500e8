"""When the coordinator asks members to compress their uploads."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from unittest.mock import Mock

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.sidecar.contracts import CONTRACT
from tests.support.sidecar.ledgers import LAYOUT, new_ledger, shard_info, store_manifests
from tests.support.tiers.objects import MemoryObjectStore

from holdfast_core.clock import SystemClock
from holdfast_core.ids import Step
from holdfast_core.messages.schema import PersistRequest, Policy, RestorePoint
from holdfast_core.store.tier import ObjectTier
from holdfast_sidecar.coordinator.uploads import GangUploads
from holdfast_sidecar.wire.server import Versioned


def asked(compression: str, *, whole: bool = False, changed: str | None = None) -> PersistRequest:
    """Return the coordinator's first request when step 10 is local. `changed`: the compression in a later
    version of the ROUND."""
    ledger, versioned, requested = new_ledger(), Versioned(), asyncio.Event()
    requests: list[PersistRequest] = []

    def changed_() -> None:
        if ledger.uploads.request is not None:
            requests.append(ledger.uploads.request)
            requested.set()

    def round_with(compression: str) -> Mock:
        policy = Policy(1, object_every_steps=10, object_compression=compression)
        return Mock(
            policy=policy,
            hold_uploads=False,
            last_persisted=None,
            round=ledger.round,
            restore_point=RestorePoint(),
            quarantined=(),
        )

    store = ObjectTier(MemoryObjectStore())
    uploads = GangUploads(
        CONTRACT,
        round_with(compression),
        store,
        ledger=ledger,
        versioned=versioned,
        pools=Mock(),
        failures=Mock(),
        clock=SystemClock(),
        on_change=changed_,
    )
    for rank in (0, 1):
        ledger.prepared(Step(10), shard_info(rank), LAYOUT)
    store_manifests(ledger, 10)
    uploads.committed(Step(10))
    if whole:
        ledger.uploads, _ = ledger.uploads.requested(None, (), compress=True)
        ledger.upload_whole(ledger.steps[Step(10)])
    if changed is not None:
        uploads.policy(round_with(changed))

    async def run() -> None:
        versioned.tick()
        task = asyncio.create_task(uploads.run())
        async with asyncio.timeout(HANG_SECONDS):
            await requested.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
    store.close()
    return requests[0]


@pytest.mark.parametrize(
    ("compression", "expected"),
    [("Zstd", True), ("None", False), ("Brotli", False)],
    ids=["wanted", "not wanted", "a value of a newer operator"],
)
def test_members_are_asked_to_compress(compression: str, expected: bool) -> None:
    assert asked(compression).compress is expected


@pytest.mark.parametrize(("before", "after"), [("None", "Zstd"), ("Zstd", "None")])
def test_compression_is_turned_on_and_off_for_later_uploads(before: str, after: str) -> None:
    assert asked(before, changed=after).compress is (after == "Zstd")


def test_a_whole_upload_is_not_compressed() -> None:
    """The first upload, which refers to a deleted checkpoint, already uses the name of the pack."""
    request = asked("Zstd", whole=True)
    assert (request.whole, request.compress) == (True, False)
