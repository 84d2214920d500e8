"""A worker that keeps copies stores their layout first, and says why if it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.clock import ManualClock
from tests.support.sidecar.contracts import CONTRACT
from tests.support.sidecar.rounds import first_round

from holdfast_core.errors import RefusedError
from holdfast_core.format.digest import digest_of
from holdfast_core.ids import Digest, RestartRound, TierName, Worker
from holdfast_core.messages.schema import KeepLayout, Ok, Refusal
from holdfast_core.node.tier import DiskNodeTier
from holdfast_sidecar.base.failures import PEER_FULL, Failures, reason_of
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.tiers import Pools, Tiers
from holdfast_sidecar.process.control import ManifestRequests

DOCUMENT = b"a layout" * 1000
MESSAGE = KeepLayout(RestartRound(0), Worker(1), digest_of(DOCUMENT))


class Sender:
    """The member whose layout is to be kept."""

    def __init__(self) -> None:
        self.sent = 0

    async def layout(self, worker: Worker, digest: Digest) -> bytes:
        self.sent += 1
        return DOCUMENT


async def keep(folder: Path, capacity_bytes: int) -> tuple[Ok, Sender]:
    """Keep the layout twice on a node of this size."""
    node, pools, sender = (
        DiskNodeTier(folder, capacity_bytes=capacity_bytes),
        Pools(disk=1, fetch=1, store=1),
        Sender(),
    )
    node.open()
    pod = Pod(Settings(CONTRACT), ManualClock(), CurrentRound(first_round()))
    manifests = ManifestRequests(
        pod, Tiers(node, None, pools), cast(Any, None), cast(Any, sender), Failures(lambda: None)
    )
    try:
        await manifests.keep_layout(MESSAGE)
        reply = await manifests.keep_layout(MESSAGE)
        assert node.get_layout(MESSAGE.layout) == DOCUMENT
        return reply, sender
    finally:
        pools.close()


async def test_a_layout_is_durable_when_it_is_acknowledged_and_requested_once(
    tmp_path: Path,
) -> None:
    reply, sender = await keep(tmp_path, 1 << 30)
    assert reply == Ok(RestartRound(0))
    assert sender.sent == 1


@pytest.mark.fault("A target of copies has no room for a layout")
async def test_a_full_node_says_so(tmp_path: Path) -> None:
    """The coordinator prunes more steps while a node reports that it, or a target of its copies, is full."""
    with pytest.raises(RefusedError) as refused:
        await keep(tmp_path, len(DOCUMENT))
    assert refused.value.code is Refusal.NO_SPACE
    assert reason_of(TierName.PEER, refused.value) == PEER_FULL
