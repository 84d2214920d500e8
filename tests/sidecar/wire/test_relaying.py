"""What a relay answers for the workers of its group, and what the coordinator answers to each letter."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from tests.support.sidecar.rounds import accepted, round_message

from holdfast_core.errors import NotFoundError, RefusedError, UnavailableError
from holdfast_core.ids import RestartRound, Worker
from holdfast_core.messages.codec import loads
from holdfast_core.messages.report import Answer, Letter, Relay, encode
from holdfast_core.messages.schema import Ok, Refusal, Refused, WorkerReport
from holdfast_sidecar.base.pod import CurrentRound
from holdfast_sidecar.base.rounds import Caller
from holdfast_sidecar.wire.relaying import Relaying

ROUND = RestartRound(0)
GANG = round_message(workers=6, coordinator=Worker(0), fan_in=2)
LEVEL = b'{"round":0}'


def report(worker: int) -> WorkerReport:
    return WorkerReport(ROUND, Worker(worker), done=True)


def letter_of(worker: int) -> Letter:
    return Letter("/v1/report", (Worker(worker),), encode(report(worker)))


class Group:
    """The workers that a relay reaches, and its mail to the coordinator."""

    def __init__(self) -> None:
        self.away: set[int] = set()
        self.received: list[tuple[int, str, bytes]] = []

    async def exchange(
        self, worker: Worker, path: str, body: bytes, round_: RestartRound | None, *, seconds: float
    ) -> Answer:
        await asyncio.sleep(0)
        if worker in self.away:
            raise UnavailableError(f"worker {worker} is away")
        self.received.append((worker, path, body))
        return Answer(200, b"%d" % worker)

    def mail(self, worker: Worker) -> Group:
        return self

    async def deliver(self, path: str, worker: Worker, body: bytes) -> Answer:
        if 0 in self.away:
            raise UnavailableError("worker 0 is away")
        self.received.append((worker, path, body))
        return Answer(200, encode(Ok(ROUND, stacks_token="7")))


def relaying(worker: int, group: Group) -> Relaying:
    return Relaying(CurrentRound(accepted(GANG, worker=worker)), cast(Any, group))


async def refuse_all(caller: Caller, path: str, message: Any) -> Any:
    raise AssertionError(f"a relay handles no message itself: {path}")


async def test_a_relay_answers_for_each_worker_of_each_letter_in_order() -> None:
    group = Group()
    letters = (
        Letter("/v1/plan", (Worker(3), Worker(2)), LEVEL),
        Letter("/v1/manifest", (Worker(3),), LEVEL),
    )
    reply = await relaying(2, group).serve(Relay(ROUND, letters), refuse_all)
    assert [a.body for a in reply.answers] == [b"3", b"2", b"3"]
    assert {(w, path) for w, path, _ in group.received} == {
        (3, "/v1/plan"),
        (2, "/v1/plan"),
        (3, "/v1/manifest"),
    }


@pytest.mark.fault("A worker behind a relay is silent")
async def test_a_silent_worker_is_no_acknowledgement_and_hides_no_other_one() -> None:
    group = Group()
    group.away = {3}
    letters = (Letter("/v1/manifest", (Worker(3), Worker(2)), LEVEL),)
    reply = await relaying(2, group).serve(Relay(ROUND, letters), refuse_all)
    assert [a.status for a in reply.answers] == [503, 200]


async def test_the_coordinator_handles_each_letter_as_from_its_sender() -> None:
    handled: list[tuple[str, int]] = []

    async def dispatch(caller: Caller, path: str, message: Any) -> Any:
        handled.append((caller.pod, message.worker))
        if message.worker == 3:
            raise RefusedError(Refusal.CONFLICT, "another digest")
        if message.worker == 5:
            raise NotFoundError("no such step")
        return Ok(ROUND)

    letters = tuple(letter_of(w) for w in (2, 3, 5))
    reply = await relaying(0, Group()).serve(Relay(ROUND, letters), dispatch)
    assert handled == [("gpt-2-r0", 2), ("gpt-3-r0", 3), ("gpt-5-r0", 5)]
    assert [a.status for a in reply.answers] == [200, 409, 409]
    codes = [loads(Refused, a.body).code for a in reply.answers[1:]]
    assert codes == [Refusal.CONFLICT, Refusal.NOT_FOUND]


async def test_a_letter_that_is_no_message_is_refused_alone() -> None:
    async def dispatch(caller: Caller, path: str, message: Any) -> Any:
        return Ok(ROUND)

    letters = (
        Letter("/v1/report", (Worker(2),), b"[]"),
        Letter("/v1/nothing", (Worker(2),), b"{}"),
        Letter("/v1/relay", (Worker(2),), encode(Relay(ROUND, (letter_of(2),)))),
        Letter("/v1/prune", (Worker(2),), b'{"round":0,"checkpoints":[]}'),
        letter_of(3),
    )
    reply = await relaying(0, Group()).serve(Relay(ROUND, letters), dispatch)
    assert [a.status for a in reply.answers] == [400, 400, 400, 400, 200]


async def test_a_relay_passes_the_coordinators_reply_on() -> None:
    group = Group()
    reply = await relaying(2, group).to_coordinator("/v1/report", report(3))
    assert reply == Ok(ROUND, stacks_token="7")
    assert group.received == [(3, "/v1/report", encode(report(3)))]


async def test_a_relay_without_its_coordinator_asks_for_patience() -> None:
    group = Group()
    group.away = {0}
    with pytest.raises(RefusedError) as refused:
        await relaying(2, group).to_coordinator("/v1/report", report(3))
    assert refused.value.code is Refusal.BUSY
