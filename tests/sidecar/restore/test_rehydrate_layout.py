"""The layout of a rank is missing: no source has it, or a source did not answer."""

from __future__ import annotations

import asyncio

import pytest
from tests.sidecar.one_rank import HEADER, LAYOUT, MANIFEST, RECORD, rehydrator_of
from tests.support.clock import ManualClock
from tests.support.sidecar.rounds import accepted, round_message
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.errors import (
    AccessDeniedError,
    CapacityError,
    CorruptionError,
    HoldfastError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)
from holdfast_core.ids import Digest, Rank, ShardRef, Worker
from holdfast_core.messages.schema import (
    Refusal,
    RestorePoint,
)
from holdfast_sidecar.base.tiers import Pools
from holdfast_sidecar.restore.rehydrate import Restored


class FullNode(ScratchTier):
    def put_layout(self, document: bytes) -> Digest:
        raise CapacityError("no room for a layout")


class Asked:
    """Stands for Peers and ObjectTier, with a fixed answer of each member and of the store."""

    def __init__(self, *answers: bytes | HoldfastError, store: HoldfastError) -> None:
        self.answers = answers
        self.store = store

    async def layout(self, worker: Worker, digest: Digest) -> bytes:
        assert digest == HEADER.layout
        answer = self.answers[worker]
        if isinstance(answer, HoldfastError):
            raise answer
        return answer

    def get_layout(self, namespace: str, ref: ShardRef, digest: Digest) -> bytes:
        assert (ref, digest) == (RECORD.ref, HEADER.layout)
        raise self.store


def layout_of(asked: Asked, node: ScratchTier) -> bytes:
    count = len(asked.answers)
    state = accepted(round_message(1, workers=count + 1), worker=count)

    async def scenario() -> bytes:
        pools = Pools(disk=1, fetch=1, store=1)
        rehydrator = rehydrator_of(state, node, asked, pools, ManualClock())
        point = RestorePoint(MANIFEST.step, MANIFEST.restart_round)
        try:
            return await rehydrator.layout(Restored(point, MANIFEST, {}, {}, {}), Rank(0))
        finally:
            pools.close()

    return asyncio.run(scenario())


NONE = NotFoundError("it has none")
WRONG = CorruptionError("digest b3:1, expected b3:2")
AWAY = UnavailableError("connection refused")


@pytest.mark.parametrize(
    ("answers", "store", "expected"),
    [
        pytest.param((NONE, NONE), NONE, NotFoundError, id="no place has it"),
        pytest.param((WRONG,), NONE, NotFoundError, id="another one"),
        pytest.param((AWAY, NONE), NONE, UnavailableError, id="a member is away"),
        pytest.param((NONE, NONE), AWAY, UnavailableError, id="the store is away"),
        pytest.param(
            (RefusedError(Refusal.BUSY, "later"),), NONE, UnavailableError, id="a member is busy"
        ),
        pytest.param(
            (NONE,), AccessDeniedError("no key"), UnavailableError, id="the store refuses"
        ),
    ],
)
def test_a_missing_layout_is_unavailable_while_a_place_may_have_it(
    answers: tuple[bytes | HoldfastError, ...],
    store: HoldfastError,
    expected: type[HoldfastError],
) -> None:
    with pytest.raises(HoldfastError, match="layout of rank 0 in the object store") as caught:
        layout_of(Asked(*answers, store=store), ScratchTier())
    assert type(caught.value) is expected


def test_the_next_member_is_called_when_one_is_away() -> None:
    node = ScratchTier()
    assert layout_of(Asked(AWAY, LAYOUT, store=AWAY), node) == LAYOUT
    assert node.get_layout(HEADER.layout) == LAYOUT


def test_a_layout_is_returned_although_the_node_is_full() -> None:
    assert layout_of(Asked(LAYOUT, store=NONE), FullNode()) == LAYOUT
