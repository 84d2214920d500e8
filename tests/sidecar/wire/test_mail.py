"""Letters to one worker: which of them travel together, and what their senders receive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.support.sidecar.waiting import until

from holdfast_core.errors import FormatError, UnavailableError
from holdfast_core.ids import Worker
from holdfast_core.messages.report import Answer, Letter
from holdfast_sidecar.wire.client import Mail


class Relay:
    """Receiver of requests, each of which waits until it is let through."""

    def __init__(self) -> None:
        self.requests: list[tuple[Letter, ...]] = []
        self.through = asyncio.Semaphore(0)
        self.is_away = False
        self.lost = 0
        """Number of answers that it leaves out."""

    async def receive(self, letters: tuple[Letter, ...]) -> list[Answer]:
        self.requests.append(letters)
        await self.through.acquire()
        if self.is_away:
            raise UnavailableError("the relay is away")
        answers = [Answer(200, b"%d" % w) for letter in letters for w in letter.workers]
        return answers[self.lost :]


@asynccontextmanager
async def mail_to(relay: Relay) -> AsyncIterator[Mail]:
    mail = Mail(relay.receive)
    try:
        yield mail
    finally:
        await mail.close()


def send(mail: Mail, worker: int, body: bytes = b"{}") -> asyncio.Task[Answer]:
    return asyncio.create_task(mail.deliver("/v1/plan", Worker(worker), body))


async def test_letters_that_come_during_a_request_travel_together() -> None:
    relay = Relay()
    async with mail_to(relay) as mail:
        first = send(mail, 1)
        await until(lambda: relay.requests, "the first request")
        others = [send(mail, worker, b"%d" % worker) for worker in (2, 3, 4)]
        await asyncio.sleep(0)
        relay.through.release()
        relay.through.release()
        answers = await asyncio.gather(first, *others)
        assert [a.body for a in answers] == [b"1", b"2", b"3", b"4"]
        assert [len(letters) for letters in relay.requests] == [1, 3]


@pytest.mark.fault("A worker repeats a message that still waits at its relay")
async def test_a_message_that_its_sender_repeats_is_sent_once() -> None:
    """The coordinator refuses a letter with several senders, together with all others of the request."""
    relay = Relay()
    async with mail_to(relay) as mail:
        first = send(mail, 1)
        await until(lambda: relay.requests, "the first request")
        repeated = [send(mail, 2), send(mail, 2), send(mail, 3, b"other")]
        await asyncio.sleep(0)
        relay.through.release()
        relay.through.release()
        answers = await asyncio.gather(first, *repeated)
        assert [a.body for a in answers] == [b"1", b"2", b"2", b"3"]
        assert [letter.workers for letter in relay.requests[1]] == [(2,), (3,)]


async def test_equal_messages_are_one_letter_to_several_workers() -> None:
    relay = Relay()
    async with mail_to(relay) as mail:
        sent = [send(mail, 1), send(mail, 2), send(mail, 3, b"other"), send(mail, 4)]
        relay.through.release()
        answers = await asyncio.gather(*sent)
        assert [a.body for a in answers] == [b"1", b"2", b"3", b"4"]
        assert [letter.workers for letter in relay.requests[0]] == [(1, 2, 4), (3,)]


async def test_a_failed_request_fails_its_letters_and_not_the_next_ones() -> None:
    relay = Relay()
    relay.is_away = True
    async with mail_to(relay) as mail:
        lost = [send(mail, 1), send(mail, 2)]
        relay.through.release()
        for task in lost:
            with pytest.raises(UnavailableError):
                await task
        relay.is_away = False
        relay.through.release()
        assert (await send(mail, 1)).body == b"1"


async def test_missing_answers_are_no_answers() -> None:
    relay = Relay()
    relay.lost = 1
    async with mail_to(relay) as mail:
        sent = [send(mail, 1), send(mail, 2)]
        relay.through.release()
        for task in sent:
            with pytest.raises(FormatError):
                await task


async def test_a_sender_that_gives_up_is_not_sent_for() -> None:
    relay = Relay()
    async with mail_to(relay) as mail:
        first = send(mail, 1)
        await until(lambda: relay.requests, "the first request")
        gone, stays = send(mail, 2), send(mail, 3)
        await asyncio.sleep(0)
        gone.cancel()
        relay.through.release()
        relay.through.release()
        await asyncio.gather(first, stays)
        assert [letter.workers for letter in relay.requests[1]] == [(3,)]


async def test_letters_end_with_their_mail() -> None:
    relay = Relay()
    async with mail_to(relay) as mail:
        sent = send(mail, 1)
        await until(lambda: relay.requests, "the request")
    with pytest.raises(asyncio.CancelledError):
        await sent
