"""A checkpoint's layout is missing: no source has it, or a source did not answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.sidecar.one_rank import DOCUMENT, LAYOUT, MANIFEST, rehydrator_of
from tests.support.sidecar.rounds import accepted, round_message
from tests.support.tiers.memory import MemoryTier

from holdfast_core.clock import ManualClock
from holdfast_core.errors import (
    AccessDeniedError,
    CapacityError,
    HoldfastError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)
from holdfast_core.ids import Digest, Worker
from holdfast_core.messages.schema import (
    ManifestDocument,
    Refusal,
    RestorePoint,
)
from holdfast_sidecar.base.pools import Pools
from holdfast_sidecar.restore.rehydrate import Restored


class FullNode(MemoryTier):
    def put_layout(self, document: bytes) -> Digest:
        raise CapacityError("no room for a layout")


class Asked:
    """Stands for Peers and ObjectTier, with a fixed answer of each member and of the store."""

    def __init__(self, *answers: bytes | HoldfastError | None, store: HoldfastError) -> None:
        self.answers = answers
        self.store = store

    async def get(self, worker: Worker, path: str, reply: Any, **options: Any) -> ManifestDocument:
        answer = self.answers[worker]
        if isinstance(answer, HoldfastError):
            raise answer
        return ManifestDocument(DOCUMENT.decode(), None if answer is None else answer.decode())

    def get_layout(self, namespace: str, job_uid: str, digest: Digest) -> bytes:
        raise self.store


def layout_of(asked: Asked, node: MemoryTier) -> bytes:
    count = len(asked.answers)
    state = accepted(round_message(1, workers=count + 1), worker=count)

    async def scenario() -> bytes:
        pools = Pools(disk=1, fetch=1, store=1)
        rehydrator = rehydrator_of(state, node, asked, pools, ManualClock())
        point = RestorePoint(MANIFEST.step, MANIFEST.restart_round)
        try:
            return await rehydrator.layout(Restored(point, MANIFEST, {}, {}, {}))
        finally:
            pools.close()

    return asyncio.run(scenario())


NONE = NotFoundError("it has none")
AWAY = UnavailableError("connection refused")


@pytest.mark.parametrize(
    ("answers", "store", "expected"),
    [
        pytest.param((None, NONE), NONE, NotFoundError, id="no place has it"),
        pytest.param((b"{}",), NONE, NotFoundError, id="another one"),
        pytest.param((AWAY, None), NONE, UnavailableError, id="a member is away"),
        pytest.param((None, None), AWAY, UnavailableError, id="the store is away"),
        pytest.param(
            (RefusedError(Refusal.BUSY, "later"),), NONE, UnavailableError, id="a member is busy"
        ),
        pytest.param(
            (None,), AccessDeniedError("no key"), UnavailableError, id="the store refuses"
        ),
    ],
)
def test_a_missing_layout_is_unavailable_while_a_place_may_have_it(
    answers: tuple[bytes | HoldfastError | None, ...],
    store: HoldfastError,
    expected: type[HoldfastError],
) -> None:
    with pytest.raises(HoldfastError, match="layout in the object store") as caught:
        layout_of(Asked(*answers, store=store), MemoryTier())
    assert type(caught.value) is expected


def test_the_next_member_is_called_when_one_is_away() -> None:
    node = MemoryTier()
    assert layout_of(Asked(AWAY, LAYOUT, store=AWAY), node) == LAYOUT
    assert node.get_layout(MANIFEST.layout) == LAYOUT


def test_a_layout_is_returned_although_the_node_is_full() -> None:
    assert layout_of(Asked(LAYOUT, store=NONE), FullNode()) == LAYOUT
