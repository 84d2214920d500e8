"""A relay merges the reports of its group."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from tests.support.sidecar.rounds import accepted, round_message
from tests.support.sidecar.waiting import until

from holdfast_core.errors import RefusedError, StaleRoundError, UnavailableError
from holdfast_core.ids import RestartRound, Worker
from holdfast_core.messages.schema import Ok, Refusal, WorkerReport, WorkerReports
from holdfast_sidecar.base.pod import CurrentRound
from holdfast_sidecar.wire.relaying import Relaying

ROUND = RestartRound(0)
GANG = round_message(workers=6, coordinator=Worker(0), fan_in=3)


class Coordinator:
    """A coordinator that answers when the test lets it."""

    def __init__(self) -> None:
        self.received: list[list[int]] = []
        self.answers = asyncio.Semaphore(0)
        self.error: Exception | None = None

    async def call(self, worker: Worker, message: WorkerReports, kind: type[Any]) -> Ok:
        self.received.append([report.worker for report in message.reports])
        await self.answers.acquire()
        if self.error is not None:
            raise self.error
        return Ok(message.round, stacks_token=str(len(self.received)))


def reports(worker: int, round_: RestartRound = ROUND, **fields: Any) -> WorkerReports:
    return WorkerReports(round_, (WorkerReport(round_, Worker(worker), **fields),))


def relaying(coordinator: Coordinator) -> Relaying:
    return Relaying(CurrentRound(accepted(GANG, worker=3)), cast(Any, coordinator))


async def test_reports_that_arrive_during_a_request_go_together() -> None:
    coordinator = Coordinator()
    relay = relaying(coordinator)
    first = asyncio.create_task(relay.report(reports(3)))
    await until(lambda: coordinator.received == [[3]], "the first request")
    others = [asyncio.create_task(relay.report(reports(w))) for w in (4, 5, 4)]
    await asyncio.sleep(0)
    coordinator.answers.release()
    assert (await first).stacks_token == "1"
    await until(lambda: len(coordinator.received) == 2, "the second request")
    assert coordinator.received[1] == [4, 5], "the newest report of each worker"
    assert not any(task.done() for task in others), "the relay acknowledges nothing itself"
    coordinator.answers.release()
    assert {(await task).stacks_token for task in others} == {"2"}


@pytest.mark.fault("The coordinator does not answer its relay")
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        pytest.param(UnavailableError("no reply"), RefusedError, id="silent"),
        pytest.param(
            StaleRoundError("over", own_round=1, own_version=0), StaleRoundError, id="over"
        ),
    ],
)
async def test_a_group_hears_that_the_coordinator_has_no_report(
    error: Exception, raised: type[Exception]
) -> None:
    coordinator = Coordinator()
    coordinator.error = error
    relay = relaying(coordinator)
    found = [asyncio.create_task(relay.report(reports(w))) for w in (3, 4)]
    coordinator.answers.release()
    coordinator.answers.release()
    for task in found:
        with pytest.raises(raised) as caught:
            await task
        if isinstance(caught.value, RefusedError):
            assert caught.value.code is Refusal.BUSY, "the worker repeats its report"


@pytest.mark.fault(
    "The request of a relay to a lost coordinator is under way when the next round begins"
)
async def test_reports_of_the_next_round_do_not_wait_for_a_request_of_the_last_one() -> None:
    coordinator = Coordinator()
    relay = relaying(coordinator)
    old = asyncio.create_task(relay.report(reports(3)))
    await until(lambda: len(coordinator.received) == 1, "the old request")
    new = asyncio.create_task(relay.report(reports(3, RestartRound(1))))
    await until(lambda: len(coordinator.received) == 2, "the new request")
    for task in (old, new):
        task.cancel()


async def test_a_batch_that_is_large_goes_without_later_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast_sidecar.wire.relaying._MOST_SHARDS", 0)
    coordinator = Coordinator()
    relay = relaying(coordinator)
    for worker in (3, 4, 5):
        asyncio.create_task(relay.report(reports(worker)))  # noqa: RUF006
        await asyncio.sleep(0)
    for _ in range(3):
        coordinator.answers.release()
    await until(lambda: coordinator.received == [[3], [4], [5]], "a request for each")
