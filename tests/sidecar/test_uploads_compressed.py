"""When members are asked to compress: the job wants it, and every member of the gang reads it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from unittest.mock import Mock

import pytest
from tests.sidecar.test_choice import acknowledge, info, ledger
from tests.sidecar.test_leftovers import CONTRACT, CountingTier

from holdfast_core.clock import SystemClock
from holdfast_core.ids import RestartRound, Step, Worker
from holdfast_core.transfer.messages import PersistRequest, Policy, WorkerReport
from holdfast_sidecar.gathered import Gathered
from holdfast_sidecar.uploads import Uploads
from holdfast_sidecar.versioned import Versioned


def report(worker: int, **fields: bool) -> WorkerReport:
    return WorkerReport(RestartRound(1), Worker(worker), **fields)  # type: ignore[arg-type]


NEW = {"reads_compressed": True}


def gathered(*reports: WorkerReport) -> Gathered:
    found = Gathered(frozenset({Worker(0), Worker(1)}), 2, 0.0)
    for said in reports:
        found.heard(said, 1.0)
    return found


def asked(
    compression: str,
    members: Gathered,
    *,
    whole: bool = False,
    later: tuple[WorkerReport, ...] = (),
    changed: str | None = None,
) -> PersistRequest:
    """What the coordinator asks for first when step 10 is local. `later`: reports that come when it has
    looked at those that there are; `changed`: what a later version of the ROUND wants."""
    book, versioned, heard = ledger(), Versioned(), asyncio.Event()
    requests: list[PersistRequest] = []

    def persist(request: PersistRequest) -> None:
        requests.append(request)
        heard.set()

    def all_read() -> bool | None:
        found = members.reads_compressed
        for said in later:
            members.heard(said, 2.0)
            versioned.tick()
        return found

    def round_with(word: str) -> Mock:
        policy = Policy(1, object_every_steps=10, object_compression=word)
        return Mock(policy=policy, last_persisted=None, round=book.round)

    store = CountingTier()
    uploads = Uploads(
        CONTRACT,
        round_with(compression),
        Mock(),
        store,
        ledger=book,
        outbox=Mock(persist=persist),
        versioned=versioned,
        pools=Mock(),
        failures=Mock(),
        clock=SystemClock(),
        on_change=lambda: None,
        all_read_compressed=all_read,
    )
    for rank in (0, 1):
        book.prepared(Step(10), info(rank), info(rank).blake3)
    acknowledge(book, 10)
    uploads.committed(Step(10))
    if whole:
        book.upload_whole(Step(10))
    if changed is not None:
        uploads.policy(round_with(changed))

    async def run() -> None:
        versioned.tick()
        task = asyncio.create_task(uploads.run())
        async with asyncio.timeout(120):
            await heard.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
    store.close()
    return requests[0]


@pytest.mark.parametrize(
    ("compression", "members", "all_read", "expected"),
    [
        ("Zstd", gathered(report(0, **NEW), report(1, **NEW)), True, True),
        ("None", gathered(report(0, **NEW), report(1, **NEW)), True, False),
        ("Brotli", gathered(report(0, **NEW), report(1, **NEW)), True, False),
        ("Zstd", gathered(report(0, **NEW), report(1)), False, False),
    ],
    ids=[
        "all read it",
        "not wanted",
        "a word of a newer operator",
        "a member of an older release",
    ],
)
def test_members_are_asked_to_compress(
    compression: str, members: Gathered, all_read: bool, expected: bool
) -> None:
    request = asked(compression, members)
    said = (request.share, request.reads_compressed, request.compress)
    assert said == (True, all_read, expected)


@pytest.mark.parametrize("fields", [NEW, {}], ids=["it reads it", "of an older release"])
def test_nobody_is_asked_before_every_member_has_said_what_it_reads(
    fields: dict[str, bool],
) -> None:
    """A coordinator that has just begun: it would ask for everything as it is, and would not change
    that until the step is persisted."""
    found = asked("Zstd", gathered(report(0, **NEW)), later=(report(1, **fields),))
    assert (found.reads_compressed, found.compress) == (bool(fields), bool(fields))


@pytest.mark.parametrize(("before", "after"), [("None", "Zstd"), ("Zstd", "None")])
def test_compression_is_turned_on_and_off_for_later_uploads(before: str, after: str) -> None:
    members = gathered(report(0, **NEW), report(1, **NEW))
    found = asked(before, members, changed=after)
    assert (found.reads_compressed, found.compress) == (True, after == "Zstd")


def test_what_must_refer_to_nothing_is_not_compressed() -> None:
    """The name of the pack is taken by the one that referred to what is gone."""
    request = asked("Zstd", gathered(report(0, **NEW), report(1, **NEW)), whole=True)
    assert (request.share, request.whole, request.compress) == (False, True, False)
