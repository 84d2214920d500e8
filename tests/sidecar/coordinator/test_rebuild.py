"""A coordinator that replaces another one reads each manifest once, not once from every member."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from holdfast_core.clock import SystemClock
from holdfast_core.errors import UnavailableError
from holdfast_core.format.digest import digest_of
from holdfast_core.ids import Digest, RestartRound, Step, Worker
from holdfast_core.messages.schema import ListedManifest, ManifestDocument, ManifestList
from holdfast_sidecar.coordinator.rebuild import RebuildTarget, rebuild_from

ROUND = RestartRound(2)
STEPS = {Step(7): "seven", Step(8): "eight"}


class Members:
    """Members that all have the manifests of the round. Those in `away` serve none."""

    def __init__(self) -> None:
        self.away: set[int] = set()
        self.read: list[tuple[int, str]] = []

    async def get(
        self, worker: Worker, path: str, reply: type[Any], *, query: Any = None
    ) -> ManifestList | ManifestDocument:
        await asyncio.sleep(0)
        if path == "/v1/inventory":
            return ManifestList(
                tuple(ListedManifest(s, ROUND, digest_of(t.encode()), 5) for s, t in STEPS.items())
            )
        self.read.append((worker, query["step"]))
        await asyncio.sleep(0)
        if worker in self.away:
            raise UnavailableError(f"worker {worker} is away")
        return ManifestDocument(STEPS[Step(int(query["step"]))])


async def rebuild(members: Members) -> set[Step]:
    found = set[Step]()

    async def adopt(step: Step, digest: Digest, document: ManifestDocument) -> None:
        await asyncio.sleep(0)
        found.add(step)

    target = RebuildTarget(lambda inventory: None, found.__contains__, adopt)
    await asyncio.gather(
        *(
            rebuild_from(Worker(w), ROUND, cast(Any, members), SystemClock(), target)
            for w in range(5)
        )
    )
    return found


@pytest.mark.fault("A coordinator restarts in a gang whose members all have the round's manifests")
async def test_each_manifest_is_read_once() -> None:
    members = Members()
    assert await rebuild(members) == set(STEPS)
    assert sorted(step for _, step in members.read) == ["7", "8"]


async def test_a_member_without_an_answer_is_followed_by_another() -> None:
    members = Members()
    members.away = {0, 1}
    assert await rebuild(members) == set(STEPS)
    assert sorted(step for worker, step in members.read if worker > 1) == ["7", "8"]
