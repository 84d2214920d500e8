"""The manifests of a gang: every sidecar lists them by digest, and the operator fetches each one once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import aiohttp
import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.operator.bench import KEY, UID, Bench, bench, pod_view
from tests.support.operator.builders import held, stored_manifest
from tests.support.operator.served_sidecar import Document, ServedSidecar, document_of

from holdfast_core.ids import CheckpointId, JobUid, Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import FinishCommit, Inventory
from holdfast_operator.model.actions import CallPath
from holdfast_operator.model.job import InventoryView, PodView, Reachable
from holdfast_operator.sidecars import state as manifests

PODS = [pod_view(n) for n in range(3)]


def documents(*steps: int) -> list[Document]:
    return [document_of(stored_manifest(UID, step)) for step in steps]


def fetched(servers: Iterable[ServedSidecar]) -> list[int]:
    """Return the steps of all requests for manifests, in order."""
    return sorted(step for s in servers for kind, step in s.calls if kind == "manifest")


def listed(bench: Bench, pod: PodView) -> list[int]:
    return [m.step for m in stored(bench, pod).manifests]


def stored(bench: Bench, pod: PodView) -> InventoryView:
    inventory = bench.view(pod).inventory
    assert inventory is not None
    return inventory


async def seal(bench: Bench, round_: int, *pods: PodView) -> None:
    for pod in pods:
        bench.seal(pod, round_)
    await bench.until(lambda: all(bench.view(p).sealed_round == round_ for p in pods))


@pytest.mark.fault("Every worker of a large gang lists all manifests")
async def test_each_manifest_of_a_gang_is_fetched_once() -> None:
    async with bench() as b:
        servers = [await b.serve(pod) for pod in PODS]
        for server in servers:
            server.hold(*documents(5, 6))
        b.follow(*PODS)
        await b.until(lambda: all(b.view(p).inventory is not None for p in PODS))
        await seal(b, 1, *PODS)
        assert fetched(servers) == [5, 6]
        first, second, third = (stored(b, p) for p in PODS)
        assert first.manifests == second.manifests == third.manifests
        assert [s.blake3 for s in first.manifests[0].shards] == [
            s.blake3 for s in stored_manifest(UID, 5).shards
        ]


@pytest.mark.fault("An earlier manifest is known when a round is sealed")
async def test_a_seal_brings_the_inventory_of_this_moment() -> None:
    """Manifests that were fetched earlier do not hide what was stored or deleted since."""
    async with bench() as b:
        server = await b.serve(PODS[0])
        server.hold(*documents(5, 6))
        b.follow(PODS[0])
        await b.until(lambda: b.view(PODS[0]).inventory is not None)
        server.hold(*documents(6, 7))
        await seal(b, 1, PODS[0])
        assert listed(b, PODS[0]) == [6, 7]
        assert stored(b, PODS[0]).round == 1
        assert fetched([server]) == [5, 6, 7]


async def test_a_finished_commit_is_known_by_its_reply() -> None:
    async with bench() as b:
        server = await b.serve(PODS[0])
        checkpoint = CheckpointId(Step(20), RestartRound(0))
        server.saved[checkpoint] = 8
        server.keep(checkpoint, Rank(0))
        b.follow(PODS[0])
        await b.until(lambda: b.view(PODS[0]).inventory is not None)
        await seal(b, 1, PODS[0])
        assert [u.step for u in stored(b, PODS[0]).uncommitted] == [20]
        text = stored_manifest(UID, 20).to_bytes().decode()
        message = FinishCommit(RestartRound(1), text)
        b.call(PODS[0], CallPath.FINISH_COMMIT, message)
        await b.until(lambda: listed(b, PODS[0]) == [20])
        assert stored(b, PODS[0]).uncommitted == ()
        assert [m for kind, m in server.calls if kind == "finish-commit"] == [message]


async def test_a_refused_commit_is_requested_again_by_a_later_pass() -> None:
    async with bench() as b:
        server = await b.serve(PODS[0])
        b.follow(PODS[0])
        await b.until(lambda: b.view(PODS[0]).inventory is not None)
        text = stored_manifest(UID, 20).to_bytes().decode()
        message = FinishCommit(RestartRound(1), text)

        def is_asked_again() -> bool:
            b.call(PODS[0], CallPath.FINISH_COMMIT, message)
            return [kind for kind, _ in server.calls].count("finish-commit") >= 2

        await b.until(is_asked_again)
        assert listed(b, PODS[0]) == []
        assert b.view(PODS[0]).reachable is Reachable.YES


@pytest.mark.fault("An inventory arrives after that of a seal which began later")
async def test_an_inventory_that_is_late_does_not_replace_that_of_a_newer_round() -> None:
    """The manifests of the first inventory take longer than those of the seal that began after it."""
    async with bench() as b:
        first, second = await b.serve(PODS[0]), await b.serve(PODS[1])
        second.hold(*documents(6, 7))
        first.hold(*documents(5, 6))
        first.slow = {5: asyncio.Event()}
        b.follow(*PODS[:2])
        await b.until(lambda: b.view(PODS[1]).inventory is not None and 5 in fetched([first]))
        first.hold(*documents(6, 7))  # the gang has committed step 7 and pruned step 5
        await seal(b, 1, PODS[0])
        passes = len(b.enqueued)
        first.slow[5].set()
        await b.until(lambda: len(b.enqueued) > passes)  # the late inventory has been processed
        assert (stored(b, PODS[0]).round, listed(b, PODS[0])) == (1, [6, 7])


@pytest.mark.fault("A manifest is deleted after it was listed")
async def test_a_manifest_that_was_deleted_since_it_was_listed_is_left_out() -> None:
    async with bench() as b:
        server = await b.serve(PODS[0])
        server.hold(*documents(5, 6))
        server.deleted = {5}
        b.follow(PODS[0])
        await b.until(lambda: b.view(PODS[0]).inventory is not None)
        assert listed(b, PODS[0]) == [6]


@pytest.mark.fault("A sidecar sends another document than it listed")
@pytest.mark.parametrize(
    "document",
    [
        stored_manifest(UID, 6).to_bytes().decode(),
        stored_manifest(JobUid("another"), 5).to_bytes().decode(),
        "{}",
    ],
    ids=["another step", "another job", "no manifest"],
)
async def test_a_document_that_is_not_the_listed_one_is_refused(document: str) -> None:
    """The operator fetches the manifest from another sidecar that has the listed document."""
    async with bench() as b:
        bad, good = await b.serve(PODS[0]), await b.serve(PODS[1])
        bad.hold(*documents(5))
        good.hold(*documents(5))
        bad.raw_manifest = document
        b.follow(*PODS[:2])
        await b.until(lambda: "manifest" in [kind for kind, _ in bad.calls])
        await b.until(lambda: b.view(PODS[1]).inventory is not None)
        assert listed(b, PODS[1]) == [5]
        assert b.errors == []


@pytest.mark.fault("A sidecar lists a manifest of another job")
async def test_a_manifest_that_contradicts_its_entry_is_refused() -> None:
    """The document has the listed digest but belongs to another job, so the entry is wrong."""
    async with bench() as b:
        server = await b.serve(PODS[0])
        server.hold(document_of(stored_manifest(JobUid("another"), 5)))
        b.follow(PODS[0])

        def silent() -> bool:
            b.follow(PODS[0], suspects=frozenset({"node-a"}))
            return b.view(PODS[0]).reachable is Reachable.NO

        await b.until(silent)
        assert b.view(PODS[0]).inventory is None


async def test_the_shards_of_another_number_of_ranks_are_not_kept() -> None:
    """Such shards cannot be restored, and would let a sidecar of a small job use much memory."""
    async with bench() as b:
        server = await b.serve(PODS[0])
        server.hold(document_of(stored_manifest(UID, 5, ranks=9)))
        b.follow(PODS[0])
        await b.until(lambda: b.view(PODS[0]).inventory is not None)
        (manifest,) = stored(b, PODS[0]).manifests
        assert (manifest.world_size, manifest.shards) == (9, ())


@pytest.mark.fault("The manifests of an inventory take longer than its time-out")
async def test_an_inventory_whose_manifests_took_too_long_continues_where_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise an inventory that takes longer than its time-out would start again for ever."""
    monkeypatch.setattr(manifests, "ALL_SECONDS", 3.0)
    async with bench() as b:
        server = await b.serve(PODS[0])
        server.hold(*documents(5, 6))
        server.slow = {6: asyncio.Event()}
        b.follow(PODS[0])

        def asked_again() -> bool:
            b.follow(PODS[0])
            return fetched([server]).count(6) == 2

        await b.until(lambda: 6 in fetched([server]))
        # Only this inventory may end by a time-out, however late the test notices that there is another one.
        monkeypatch.setattr(manifests, "ALL_SECONDS", HANG_SECONDS)
        endless = aiohttp.ClientTimeout(total=None)
        monkeypatch.setattr(aiohttp, "ClientTimeout", lambda **_: endless)
        await b.until(asked_again)
        server.slow[6].set()
        await b.until(lambda: b.view(PODS[0]).inventory is not None)
        assert fetched([server]) == [5, 6, 6]


async def test_manifests_that_no_sidecar_lists_are_forgotten() -> None:
    async with bench() as b:
        server = await b.serve(PODS[0])
        for round_, steps in ((1, (5,)), (2, ()), (3, (5,))):
            server.hold(*documents(*steps))
            b.follow(PODS[0], round_=round_)
            await b.until(lambda: b.view(PODS[0]).inventory is not None)
            await seal(b, round_, PODS[0])
            b.follow(PODS[0], round_=round_)
        assert fetched([server]) == [5, 5]


async def test_the_manifests_of_a_deleted_job_are_forgotten() -> None:
    async with bench() as b:
        server = await b.serve(PODS[0])
        server.hold(*documents(5))
        b.follow(PODS[0])
        await b.until(lambda: b.view(PODS[0]).inventory is not None)
        b.sidecars.forget(UID)
        b.sidecars.follow(
            KEY, UID, RestartRound(0), PODS[:1], None, frozenset(), ranks=8, gang=frozenset()
        )
        await b.until(lambda: b.view(PODS[0]).inventory is not None)
        assert fetched([server]) == [5, 5]


async def test_a_shard_in_a_slot_counts_like_one_on_disk() -> None:
    on_disk, in_memory = held(5, 0, 0), held(5, 0, 1)
    inventory = Inventory(
        Worker(0), "gpt-0-r0", RestartRound(1), 1, shards=(on_disk,), in_memory=(in_memory,)
    )

    async def fetch(listed: CheckpointId) -> bytes | None:
        raise AssertionError(f"no manifest is listed, and {listed} was requested")

    assert (await manifests.Manifests(UID).view(inventory, 2, fetch)).shards == (on_disk, in_memory)
